"""Which pass over a converted model runs: what tells one use of its weights from the next.

The words are those of the glossary in `scale_state.py`. A backward pass is a graph task of autograd. A forward pass is
a call of the model that was converted, which hooks on it see. They are put there once FSDP2 shards a part of it, and
before FSDP2's own, of which the first one gathers.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


class Passes:
    """The passes over one model. `Passes.of(model)` is always the same object.

    It does not keep the model: weights refer to it, and what tensors refer to is freed late, or never.
    """

    def __init__(self, root: nn.Module | None = None):
        self._root = None if root is None else weakref.ref(root)
        self._forward: object | None = None

    @classmethod
    def of(cls, root: nn.Module | None) -> Passes:
        """Without a model there are backward passes alone."""
        if root is None:
            return cls()
        found = _OF.get(root)
        passes = None if found is None else found()
        if passes is None:
            passes = cls(root)
            _OF[root] = weakref.ref(passes)  # States hold it, as long as there are any.
        return passes

    @property
    def root(self) -> nn.Module | None:
        return None if self._root is None else self._root()

    def now(self) -> object | None:
        """The pass that runs, to be compared with others; None if there is none that we know of."""
        task: int = torch._C._current_graph_task_id()
        return self._forward if task == -1 else task

    def watch(self) -> None:
        """Sees to it that forward passes are seen. To ask again is cheap."""
        root = self.root
        if root is None:
            return
        hooks = root._forward_pre_hooks
        if next(iter(hooks.values()), None) is _begin_forward:
            return
        for key, hook in hooks.items():
            if hook is _begin_forward:
                hooks.move_to_end(key, last=False)  # type: ignore[attr-defined]
                return
        root.register_forward_pre_hook(_begin_forward, prepend=True)
        root.register_forward_hook(_end_forward)


_OF: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Passes]] = weakref.WeakKeyDictionary()


# Functions, not methods: a model is copied and pickled with its hooks. A model that is compiled as a whole, and its
# hooks with it, is not seen to run, so its weights are refreshed one by one.
def _begin_forward(module: nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling():
        passes = Passes.of(module)
        passes._forward = object()


def _end_forward(module: nn.Module, args: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        Passes.of(module)._forward = None
