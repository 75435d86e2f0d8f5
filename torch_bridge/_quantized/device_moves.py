"""Checks that run before a module moves, as in `nn.Module.to`, `half`, `to_empty` and every other call of `_apply`.

A master weight or a flat buffer does not move with its module, so such a move must raise. `_apply` moves one module
after the other: an error in a layer would leave the previous layers moved. A `Guard` raises before the first move.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Move = Callable[[Tensor], Tensor]
"""The argument of `nn.Module._apply`."""


def changes(move: Move, tensor: Tensor) -> bool:
    """Return True if a move would give `tensor` another dtype, device or memory.

    >>> changes(lambda t: t.to(torch.float32), torch.ones(2)), changes(lambda t: t.half(), torch.ones(2))
    (False, True)
    """
    trial = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
    return move(trial) is not trial


class Guard:
    """Replacement for `_apply` of a module: calls `check(module, move)`, then moves the module.

    Copies have their own.
    """

    def __init__(self, module: nn.Module, check: Callable[[nn.Module, Move], None]):
        self._module, self._check = weakref.ref(module), check

    def __call__(self, fn: Move, recurse: bool = True) -> Any:
        module = self._module()
        assert module is not None
        self._check(module, fn)
        return type(module)._apply(module, fn, recurse)

    def __reduce__(self) -> tuple[Any, ...]:
        return Guard, (self._module(), self._check)


def guard_moves(module: nn.Module, check: Callable[[nn.Module, Move], None]) -> None:
    """Make `check` run before `module` moves, alone or with a module that contains it."""
    module.__dict__["_apply"] = Guard(module, check)
