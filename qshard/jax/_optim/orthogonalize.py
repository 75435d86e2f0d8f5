"""Newton-Schulz of whole matrices on the devices that own them: the same bits for every mesh and sharding.

XLA would partition the products of sharded matrices, and their bits would depend on the mesh. So each matrix has an
owner, which runs the same program wherever it is:

    parts of matrices  ->  all-to-all in bfloat16  ->  a loop over the matrices of one shape  ->  all-to-all  ->  parts

The loop has a body that depends only on the shape, and a number of steps that is only known at run time. So XLA
compiles the body alike for one matrix and for many, and barriers keep other computations out of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.optimizers.muon_plan import STACK, assign_owners, newton_schulz_cost, units_of
from qshard._core.placement import Box
from qshard._core.validation import quote
from qshard.jax._jax_internals import vmapped_mesh_axes
from qshard.jax._ops.mesh import MeshAxes, MeshKind, count_shards, mesh_of, names_of, vary_alike
from qshard.jax._optim.newton_schulz import NewtonSchulz
from qshard.jax._sharding.shard_spec import ShardSpec
from qshard.layout import Shape

_Unit = tuple[int, Box]  # index of a matrix, and its part


class _Slots(NamedTuple):
    """The units of one shape, in the order of devices: each device has as many slots as any needs.

    Attributes:
      units: for each slot of all devices, the index of a unit, or None.
      counts: the units of each device.
    """

    units: tuple[int | None, ...]
    counts: tuple[int, ...]


@functools.partial(jax.jit, static_argnames=("newton_schulz",))
def orthogonalize(matrices: Sequence[jax.Array], step: jax.Array, *, newton_schulz: NewtonSchulz) -> list[jax.Array]:
    """Orthogonalize whole arrays, which XLA or an Explicit mesh may shard over any axes.

    Args:
      matrices: bfloat16 `[N, K]` or `[E, N, K]`.
      step: int32 `[]`, the number of earlier steps.
      newton_schulz: the settings.

    Returns:
      Arrays like `matrices`, with the shardings of their types.
    """
    kinds = [MeshKind.of(x) for x in matrices]
    if MeshKind.MIXED in kinds:
        mesh = mesh_of(matrices[kinds.index(MeshKind.MIXED)])
        raise ValueError(
            f"muon: the mesh has axes of several kinds ({quote(mesh)}); call update inside shard_map over all axes, or "
            "under jit with one kind"
        )
    if axes := vmapped_mesh_axes():
        raise ValueError(
            f"muon: JAX has no shard_map in a vmap over Explicit mesh axes {axes}; call update outside of vmap, or "
            "vmap over an array axis that is not sharded"
        )
    meshes = [mesh_of(x) for x, kind in zip(matrices, kinds, strict=True) if kind is not MeshKind.LOCAL]
    mesh = next((mesh for mesh in meshes if not mesh.empty), None)
    devices = 1 if mesh is None else mesh.size
    movable = [_unsharded_experts(x) for x in matrices]
    units = [(i, unit) for i, x in enumerate(matrices) for unit in units_of(x.shape)]
    results: dict[int, jax.Array] = {}
    for slots in _plan(units, devices):
        parts = _alike([_part(movable, *units[u]) for u in slots.units if u is not None])
        given = iter(parts)
        stack = jnp.stack([jnp.zeros_like(parts[0]) if u is None else next(given) for u in slots.units])
        stack = _run(stack, slots.counts, step, newton_schulz, mesh)
        results.update({u: stack[i] for i, u in enumerate(slots.units) if u is not None})
    return [_like(y, x) for x, y in zip(matrices, _join_units(matrices, units, results), strict=True)]


def orthogonalize_shards(
    matrices: Sequence[jax.Array], specs: Sequence[ShardSpec], step: jax.Array, *, newton_schulz: NewtonSchulz
) -> list[jax.Array]:
    """Orthogonalize local shards in `shard_map`. Collective over the mesh axes in `specs`.

    Devices with equal shards each compute the result, as they do all other parts of the update.

    Args:
      matrices: bfloat16, the local shard of each `[N, K]` or `[E, N, K]`.
      specs: the sharding of each.
      step: as for `orthogonalize`.
      newton_schulz: the settings.
    """
    results: list[Any] = [None] * len(matrices)
    groups: dict[tuple[MeshAxes, ...], list[int]] = {}
    parts = list(matrices)
    for i, (x, spec) in enumerate(zip(matrices, specs, strict=True)):
        if x.ndim == 3 and spec.entries[0] and x.shape[0] % STACK:  # A unit of experts is on several devices.
            parts[i] = lax.all_gather(x, spec.entries[0], axis=0, tiled=True)
        groups.setdefault(spec.entries[-2:], []).append(i)
    for (rows, columns), members in groups.items():
        sizes = [specs[members[0]].count(names) for names in (rows, columns)]
        whole = [(*parts[i].shape[:-2], *specs[i].whole(parts[i].shape)[-2:]) for i in members]
        units = [(i, unit) for i, shape in enumerate(whole) for unit in units_of(shape)]
        made: dict[int, jax.Array] = {}
        for slots in _plan(units, math.prod(sizes)):
            of_units = {u: _part([parts[i] for i in members], *units[u]) for u in slots.units if u is not None}
            empty = jnp.zeros_like(next(iter(of_units.values())))
            stack = jnp.stack(vary_alike(*[empty if u is None else of_units[u] for u in slots.units]))
            stack = _exchange(stack, slots, (rows, columns), sizes, step, newton_schulz)
            made.update({u: stack[i] for i, u in enumerate(slots.units) if u is not None})
        for i, y in zip(members, _join_units([parts[i] for i in members], units, made), strict=True):
            results[i] = y
    for i, (x, y, spec) in enumerate(zip(matrices, results, specs, strict=True)):
        if y.shape != x.shape:
            results[i] = lax.dynamic_slice_in_dim(y, lax.axis_index(spec.entries[0]) * x.shape[0], x.shape[0], 0)
    return results


def _plan(units: Sequence[_Unit], devices: int) -> list[_Slots]:
    """Return the slots of the units of each shape."""
    owners = assign_owners([newton_schulz_cost(unit.size) for _, unit in units], [[0] * devices] * len(units))
    shapes: dict[Shape, list[list[int | None]]] = {}
    for u, ((_, unit), owner) in enumerate(zip(units, owners, strict=True)):
        shapes.setdefault(unit.size, [[] for _ in range(devices)])[owner].append(u)
    made = []
    for of_devices in shapes.values():
        counts = tuple(map(len, of_devices))
        padded = [each + [None] * (max(counts) - len(each)) for each in of_devices]
        made.append(_Slots(tuple(u for each in padded for u in each), counts))
    return made


def _part(matrices: Sequence[jax.Array], i: int, unit: Box) -> jax.Array:
    x = matrices[i]
    if x.ndim == 2:
        return x
    part: jax.Array = lax.slice_in_dim(x, unit.start[0], unit.stop[0], axis=0)
    return part


def _join_units(
    matrices: Sequence[jax.Array], units: Sequence[_Unit], results: dict[int, jax.Array]
) -> list[jax.Array]:
    """Return the arrays of the results of units. Arrays without elements have none."""
    found: list[list[jax.Array]] = [[] for _ in matrices]
    for u, (i, _) in enumerate(units):
        found[i].append(results[u])
    return [
        x if not parts else parts[0] if x.ndim == 2 else lax.concatenate(parts, 0)
        for x, parts in zip(matrices, found, strict=True)
    ]


def _loop(stack: jax.Array, count: Any, step: jax.Array, newton_schulz: NewtonSchulz) -> jax.Array:
    """Orthogonalize the first `count` units of a stack, one by one.

    XLA does not know that `step` is not negative, so it does not know the number of iterations either.
    """
    count = jnp.asarray(count, jnp.int32) + jnp.minimum(step, 0)
    stack, count, start = vary_alike(stack, count, jnp.zeros_like(count))

    def body(i: jax.Array, stack: jax.Array) -> jax.Array:
        x = lax.optimization_barrier(lax.dynamic_index_in_dim(stack, i, 0, keepdims=False))
        y = lax.optimization_barrier(newton_schulz(x))
        written: jax.Array = lax.dynamic_update_index_in_dim(stack, y, i, 0)
        return written

    made: jax.Array = lax.fori_loop(start, count, body, stack)
    return made


def _run(
    stack: jax.Array, counts: tuple[int, ...], step: jax.Array, newton_schulz: NewtonSchulz, mesh: Any
) -> jax.Array:
    """Move units `[slots of all devices, ...]` to their owners, orthogonalize them, and move them back."""
    if mesh is None:
        return _loop(stack, counts[0], step, newton_schulz)
    axes, back = mesh.axis_names, jax.typeof(stack).sharding
    owned = PartitionSpec(axes)
    if mesh.explicit_axes:
        stack = jax.sharding.reshard(stack, NamedSharding(mesh, PartitionSpec(axes, *[None] * (stack.ndim - 1))))
        step = jax.sharding.reshard(step, NamedSharding(mesh, PartitionSpec()))

    def on_owner(stack: jax.Array, step: jax.Array) -> jax.Array:
        return _loop(stack, jnp.asarray(np.array(counts, np.int32))[lax.axis_index(axes)], step, newton_schulz)

    stack = jax.shard_map(on_owner, mesh=mesh, in_specs=(owned, PartitionSpec()), out_specs=owned)(stack, step)
    if mesh.explicit_axes:
        moved: jax.Array = jax.sharding.reshard(stack, back)
        return moved
    free = PartitionSpec(None, *[PartitionSpec.UNCONSTRAINED] * (stack.ndim - 1))
    constrained: jax.Array = lax.with_sharding_constraint(stack, NamedSharding(mesh, free))
    return constrained


def _exchange(
    stack: jax.Array,
    slots: _Slots,
    axes: tuple[tuple[str, ...], tuple[str, ...]],
    sizes: Sequence[int],
    step: jax.Array,
    newton_schulz: NewtonSchulz,
) -> jax.Array:
    """Send parts of units `[slots of all devices, ..., n, k]` to their owners, and results back, in `shard_map`."""
    names = (*axes[0], *axes[1])
    if not names:
        return _loop(stack, slots.counts[0], step, newton_schulz)
    devices, (*lead, n, k) = math.prod(sizes), stack.shape[1:]
    each = len(slots.units) // devices
    grid = (*sizes, each, *lead, n, k)  # [rows of devices, columns of devices, slots, ..., n, k]
    order = (*range(2, 3 + len(lead)), 0, len(grid) - 2, 1, len(grid) - 1)
    received = lax.all_to_all(stack, names, 0, 0, tiled=True).reshape(grid)
    whole = received.transpose(order).reshape(each, *lead, n * sizes[0], k * sizes[1])
    count = jnp.asarray(np.array(slots.counts, np.int32))[lax.axis_index(names)]
    whole = _loop(whole, count, step, newton_schulz)
    parts = whole.reshape(each, *lead, sizes[0], n, sizes[1], k).transpose(np.argsort(order))
    made: jax.Array = lax.all_to_all(parts.reshape(stack.shape), names, 0, 0, tiled=True)
    return made


def _unsharded_experts(x: jax.Array) -> jax.Array:
    """On an Explicit mesh, move the mesh axes of the experts to rows or columns, if these can be sharded by them."""
    sharding = jax.typeof(x).sharding
    if x.ndim != 3 or not sharding.mesh.explicit_axes or sharding.spec[0] is None:
        return x
    lead, *inner = map(names_of, sharding.spec)
    for axis in (0, 1):
        names = (*inner[axis], *lead)
        if x.shape[axis + 1] % count_shards(sharding.mesh.shape, names) == 0:
            inner[axis] = names
            break
    moved: jax.Array = jax.sharding.reshard(x, NamedSharding(sharding.mesh, PartitionSpec(None, *inner)))
    return moved


def _alike(parts: list[jax.Array]) -> list[jax.Array]:
    """On an Explicit mesh, reshard every array like the first."""
    sharding = jax.typeof(parts[0]).sharding
    return [jax.sharding.reshard(x, sharding) for x in parts] if sharding.mesh.explicit_axes else parts


def _like(y: jax.Array, x: jax.Array) -> jax.Array:
    sharding = jax.typeof(x).sharding
    return jax.sharding.reshard(y, sharding) if sharding.mesh.explicit_axes else y
