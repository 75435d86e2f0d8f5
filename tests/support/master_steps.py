"""`qshard.master.cast_master` over the ops of each front end, with NumPy arrays in and out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from qshard.master import MasterPlan
from support.fronts import JaxFront, TorchFront

Call = Callable[..., list[Any]]


class Steps(Protocol):
    """One front end's way to run `cast_master`, given as `call`, for one rank."""

    fast: bool

    def run(
        self,
        call: Call,
        plan: MasterPlan,
        data: Sequence[np.ndarray],
        masters: Sequence[np.ndarray],
        starts: Sequence[int],
        reduce_max: Callable[[np.ndarray], np.ndarray] | None,
        seeds: Sequence[int] | None,
    ) -> list[Any]: ...


def words(numbers: Sequence[int]) -> np.ndarray:
    """`[n, 2]` uint32, the low words first."""
    return np.array([[n & 0xFFFFFFFF, n >> 32] for n in numbers], np.uint32).reshape(-1, 2)


class TorchSteps:
    fast = True

    def __init__(self, device: str = "cpu"):
        self.front = TorchFront(device)

    def __str__(self) -> str:
        return f"torch-{self.front.device}"

    def run(self, call, plan, data, masters, starts, reduce_max, seeds):
        import torch

        from qshard.torch_bridge.slice_ops import SliceOps

        front = self.front

        def reduce(amax):
            return front.array(reduce_max(front.numpy(amax).copy()))

        made = call(
            SliceOps(plan, torch.device(front.device)),
            [front.array(d.copy()) for d in data],
            [front.array(m.copy()) for m in masters],
            front.array(words(starts)),
            None if reduce_max is None else reduce,
            seeds=None if seeds is None else front.array(words(seeds)),
        )
        return [[None if part is None else front.numpy(part) for part in parts] for parts in made]


class JaxSteps:
    fast = False  # It compiles every call.

    def __init__(self, device: str = "cpu"):
        self.front = JaxFront(device)

    def __str__(self) -> str:
        return f"jax-{self.front.device}"

    def run(self, call, plan, data, masters, starts, reduce_max, seeds):
        from qshard.jax import steps as ops

        front = self.front
        made = call(
            ops,
            [front.array(d) for d in data],
            [front.array(m) for m in masters],
            front.array(words(starts)),
            None if reduce_max is None else lambda amax: front.array(reduce_max(front.numpy(amax))),
            seeds=None if seeds is None else front.array(words(seeds)),
        )
        return [[None if part is None else front.numpy(part) for part in parts] for parts in made]


STEPS: list[Any] = [
    steps() for name, steps in {"torch": TorchSteps, "jax": JaxSteps}.items() if importlib.util.find_spec(name)
]
