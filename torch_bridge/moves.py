"""Moves of modules: `nn.Module.to` and its like, where something that belongs to a weight cannot move along.

Such a move raises before any tensor of the model has moved. `nn.Module._apply`, by which all of them work, moves one
module after the other, so a layer that refuses alone would leave those before it moved.
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
    """Whether a move would give `tensor` another dtype, device or memory.

    >>> changes(lambda t: t.to(torch.float32), torch.ones(2)), changes(lambda t: t.half(), torch.ones(2))
    (False, True)
    """
    trial = torch.empty(1, dtype=tensor.dtype, device=tensor.device)
    return move(trial) is not trial


class Guard:
    """Stands at `_apply` of a module, and calls `check(module, move)` before the module is moved.

    Copies of the module have one of their own, with a copy of `check`.
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
    """Makes `check` run before `module`, or a module that it is in, is moved."""
    module.__dict__["_apply"] = Guard(module, check)
