"""Views of operands that leave XLA free to cut them.

XLA runs an op on shards of the leading axes that all its operands share, and gathers what is cut along any other axis.
So `[..., K]` is seen as `[..., K / run, run]`, and a scale is repeated for every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
from jax import lax
from jax.sharding import AxisType

__all__ = ["Runs", "reshape_as", "split_rows"]


@dataclass(frozen=True)
class Runs:
    """A view of an array: each element of the `lead` leading axes is one contiguous run of elements."""

    array: jax.Array
    lead: int

    def spread(self, scale: jax.Array) -> jax.Array:
        """The scale of every run, from one for all of them, or from one for each element of the first axes (`vmap`)."""
        shape = self.array.shape[: max(self.lead, scale.ndim)]
        return lax.broadcast_in_dim(scale, shape, tuple(range(scale.ndim)))


def split_rows(x: jax.Array) -> Runs:
    """Sees `x` `[..., K]` as runs that no shard boundary cuts.

    In `shard_map`, and where there is one device, all is local: one run is everything. On Explicit meshes the type
    tells how K is cut: a run is a shard's part of a row. Else XLA decides after tracing: a run is then `gcd(K, 128)`,
    so that K may be cut into shards of any multiple of it. That costs 4 bytes a run for the scale, and on an H200 14 of
    the 112 us of quantizing 8192 x 8192 bfloat16. Where it would make runs shorter than 32, a run is the row: such a K
    is rarely cut. A run that is cut after all costs a gather, and gives the same bits.
    """
    mesh, spec = jax.typeof(x).sharding.mesh, jax.typeof(x).sharding.spec
    kinds = set(mesh.axis_types)
    if x.ndim == 0 or kinds == {AxisType.Manual} or (mesh.empty and jax.device_count() == 1):
        return Runs(x, 0)
    names = spec[-1] or ()
    shards = math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names))
    row = x.shape[-1] // shards
    run = math.gcd(row, 128)
    if run < 32 or (kinds and AxisType.Auto not in kinds):
        run = row
    view = x.reshape(*x.shape[:-1], x.shape[-1] // run, run) if run else x[..., None]
    return Runs(view, x.ndim)


def reshape_as(y: jax.Array, x: jax.Array) -> jax.Array:
    """`y` in the shape of `x`, and on Explicit meshes cut as `x` is, which JAX infers for few reshapes."""
    sharding = jax.typeof(x).sharding
    return lax.reshape(y, x.shape, out_sharding=sharding if sharding.mesh.explicit_axes else None)
