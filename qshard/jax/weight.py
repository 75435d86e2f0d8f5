"""Weights as `linear` takes them: how they lie over devices, and codes with a place for their gradient."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from qshard.jax.array import QuantizedArray
from qshard.jax.cuts import Cut
from qshard.jax.gather import gather_cut, scatter_gradient

__all__ = ["CodedWeight", "CutWeight", "Shards"]


class Shards(Protocol):
    """How a weight lies over devices; hashable, as it is static."""

    def gather(self, codes: Any) -> QuantizedArray:
        """The whole weight, of what one device has of it."""

    def scatter(self, gradient: jax.Array) -> jax.Array:
        """What one device keeps of the gradient of the whole weight."""


@dataclass(frozen=True)
class CutWeight:
    """`Shards` of a weight that FSDP has cut along a mesh axis, or that is whole (None)."""

    cut: Cut
    axis: str | None

    def gather(self, codes: QuantizedArray) -> QuantizedArray:
        return codes if self.axis is None else gather_cut(codes, self.axis, self.cut)

    def scatter(self, gradient: jax.Array) -> jax.Array:
        return scatter_gradient(gradient, self.axis, self.cut)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "sink"], meta_fields=["shards"])
@dataclass(frozen=True, eq=False)
class CodedWeight:
    """A weight `[N, K]` for `linear` that is codes already, and where its gradient goes.

    Attributes:
      codes: a `QuantizedArray` of the whole weight; or a pytree that `shards.gather` makes one of, which `linear` then
        calls in the forward and again in the backward pass.
      sink: an array. The gradient with respect to it is `shards.scatter` of that of the whole weight; the values of it
        are not used. None: the weight has no gradient.
      shards: static.
    """

    codes: Any
    sink: jax.Array | None
    shards: Shards
