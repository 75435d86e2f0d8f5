"""Functions of which XLA asks how they are cut, on Auto meshes, once it knows how their operands are.

XLA cuts an op over axes that all its buffers share (`bind.py`). What adds up over other axes, or has none in common,
says itself what each device does, by JAX's `custom_partitioning`.

XLA calls a Python function of this process, and JAX writes its address into the program. `jax.export` cannot save it,
so exports for several devices have another function in its place. The keys of JAX's persistent cache have the address
too, so another process misses, unless `jax_remove_custom_partitioning_ptr_from_cache_key` is set. Then the key has
nothing of the function, and two functions of alike arrays would share an entry. So each op is called through a function
with a digest of its parameters as a name, which stays in the key.

Sources: `jax.experimental.custom_partitioning`; Shardy, `sdy.op_sharding_rule`.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec

from qshard._core.environment import __version__
from qshard.jax._jax_internals import device_count, is_for_export
from qshard.jax._ops import bind as ops


class _Local:
    """The ops, on what a device has: XLA cuts none of it."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(ops, name), cuttable=False)


local = _Local()


def partitionable(
    whole: Callable[..., Any],
    partition: Callable[..., Any],
    rule: str,
    sizes: Mapping[str, int] | None = None,
    *,
    decode: bool = True,
) -> Callable[..., Any]:
    """`whole`, of which XLA asks `partition`.

    Args:
      partition: as `custom_partitioning` calls it: gives the mesh, what each device does, and how results and operands
        are cut.
      rule: how Shardy carries cuts through, in the notation of einsum.
      sizes: the length of each factor that the rule names.
      decode: whether JAX names the mesh axes of shardings. It raises where a part of one shards an array, which
        `spec_on` takes.
    """
    made: Any = custom_partitioning(whole)
    made.def_partition(partition=partition, sharding_rule=rule, decode_shardings=decode, **(sizes or {}))
    return jax.jit(made, inline=True)


def specs_of(op: str, arrays: Sequence[Any]) -> list[Any]:
    """How arrays are cut, of what XLA tells when it asks."""
    shardings = [array.sharding for array in arrays]
    if not all(isinstance(sharding, NamedSharding) or sharding.is_fully_replicated for sharding in shardings):
        raise ValueError(f"{op}: operands are sharded, but there is no mesh; trace within jax.set_mesh(mesh)")
    return [sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec() for sharding in shardings]


def spec_on(mesh: Any, array: Any) -> PartitionSpec:
    """The sharding of an array that XLA tells, on a mesh; unsharded where mesh axes as a whole do not say it."""
    try:
        indices = array.sharding.devices_indices_map(array.shape)
    except ValueError:  # Shards are uneven.
        return PartitionSpec()
    grid = np.indices(mesh.devices.shape)
    entries: list[tuple[str, ...]] = []
    for axis, size in enumerate(array.shape):
        starts = np.array([indices[device][axis].start or 0 for device in mesh.devices.flat]).reshape(grid.shape[1:])
        steps = [int(np.diff(starts, axis=i).reshape(-1)[0]) if n > 1 else 0 for i, n in enumerate(starts.shape)]
        order = sorted((i for i, step in enumerate(steps) if step), key=lambda i: -steps[i])
        shards = math.prod(starts.shape[i] for i in order)
        whole = np.array_equal(starts, sum(step * at for step, at in zip(steps, grid, strict=True)))
        if not whole or (order and steps[order[-1]] * shards != size):
            return PartitionSpec()
        entries.append(tuple(mesh.axis_names[i] for i in order))
    return PartitionSpec(*(names or None for names in entries))


def mesh_of_call(mesh: Any, array: Any, abstract: Any) -> Any:
    """The mesh that XLA tells, or, where it tells of none, the abstract one of the trace on the devices of an array."""
    if not mesh.empty:
        return mesh
    even = (abstract.size,) * len(array.shape)  # Whatever shards it.
    devices = np.array(list(array.sharding.devices_indices_map(even)))
    return jax.sharding.Mesh(devices.reshape(abstract.axis_sizes), abstract.axis_names)


def call_partitionable(
    function: Callable[..., Any], exported: Callable[..., Any], static: Any, *operands: Any
) -> list[jax.Array]:
    """The leaves of the results of `function`, from `partitionable`; in exports for several devices, of `exported`.

    `static`: dataclasses that tell `function` from others of its operands, by their `repr` in all processes.
    """
    both = {"function": jax.make_jaxpr(function)(*operands), "exported": jax.make_jaxpr(exported)(*operands)}
    text = f"{__version__} {static!r} {both['exported']}"
    name = f"qshard_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    made: list[jax.Array] = _asked.bind(*jax.tree.leaves(operands), **both, name=name)
    return made


def _lower(ctx: Any, *operands: Any, function: Any, exported: Any, name: str) -> Any:
    is_saved = device_count(ctx) > 1 and is_for_export(ctx)
    call = jaxpr_as_fun(exported if is_saved else function)

    def named(*operands: Any) -> Any:
        return call(*operands)

    named.__name__ = named.__qualname__ = name
    return mlir.lower_fun(jax.jit(named), multiple_results=True)(ctx, *operands)


def _run(*operands: Any, function: Any, **_: Any) -> Any:
    return ops.run_jitted(jax.jit(jaxpr_as_fun(function)), *operands)


# What JAX lowers it to depends on what for.
_asked = Primitive("qshard_asked")
_asked.multiple_results = True
_asked.def_impl(_run)
_asked.def_abstract_eval(lambda *operands, function, **_: function.out_avals)
mlir.register_lowering(_asked, _lower)
