"""Ops with a custom partitioning rule, for Auto meshes.

XLA partitions an op over axes that all its buffers share (`bind.py`). An op without such axes, or with sums over other
axes, defines the computation of each device itself, with JAX's `custom_partitioning`.

XLA then calls a Python function of this process, and JAX writes its address into the program. This has two effects.
`jax.export` cannot save such a program, so exports for several devices use another function in its place. And the keys
of JAX's persistent cache contain the address, so another process misses, unless
`jax_remove_custom_partitioning_ptr_from_cache_key` is set. With that flag the key does not identify the function, and
two functions of operands of the same types would share an entry. So each op is called through a function that is named
by a digest of its parameters, and the name stays in the key.

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
    """The ops on local arrays, which XLA does not partition."""

    def __getattr__(self, name: str) -> Any:
        return functools.partial(getattr(ops, name), may_shard=False)


local = _Local()


def partitionable(
    whole: Callable[..., Any],
    partition: Callable[..., Any],
    rule: str,
    sizes: Mapping[str, int] | None = None,
    *,
    decode: bool = True,
) -> Callable[..., Any]:
    """Return `whole`, a function of whole arrays, with a custom partitioning rule.

    Args:
      whole: the function of whole arrays.
      partition: the callback of `custom_partitioning`. It returns the mesh, the function of each device, and the
        shardings of results and operands.
      rule: the rule by which Shardy propagates shardings, in einsum notation.
      sizes: the size of each factor that `rule` names.
      decode: whether JAX converts shardings to mesh axis names. That raises if only a part of a mesh axis shards an
        array; `spec_on` supports this case.
    """
    made: Any = custom_partitioning(whole)
    made.def_partition(partition=partition, sharding_rule=rule, decode_shardings=decode, **(sizes or {}))
    return jax.jit(made, inline=True)


def specs_of(op: str, arrays: Sequence[Any]) -> list[Any]:
    """Return the PartitionSpecs of the arrays that XLA passes to a partitioning callback."""
    shardings = [array.sharding for array in arrays]
    if not all(isinstance(sharding, NamedSharding) or sharding.is_fully_replicated for sharding in shardings):
        raise ValueError(f"{op}: operands are sharded, but there is no mesh; trace within jax.set_mesh(mesh)")
    return [sharding.spec if isinstance(sharding, NamedSharding) else PartitionSpec() for sharding in shardings]


def spec_on(mesh: Any, array: Any) -> PartitionSpec:
    """Return the PartitionSpec of an array that XLA passes; unsharded if whole axes of `mesh` cannot express it."""
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
    """Return the mesh that XLA passes; if it is empty, the abstract mesh of the trace with the devices of an array."""
    if not mesh.empty:
        return mesh
    even = (abstract.size,) * len(array.shape)  # Any sharding divides this shape evenly.
    devices = np.array(list(array.sharding.devices_indices_map(even)))
    return jax.sharding.Mesh(devices.reshape(abstract.axis_sizes), abstract.axis_names)


def call_partitionable(
    function: Callable[..., Any], exported: Callable[..., Any], static: Any, *operands: Any
) -> list[jax.Array]:
    """Call a function from `partitionable`, and return the leaves of its results.

    Exports for several devices use `exported` instead. `static` are dataclasses that distinguish `function` from others
    with the same operand types; their `repr` must be the same in all processes. Operands are pytrees of arrays.
    """
    both = {"function": jax.make_jaxpr(function)(*operands), "exported": jax.make_jaxpr(exported)(*operands)}
    text = f"{__version__} {static!r} {both['exported']}"
    name = f"qshard_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    made: list[jax.Array] = _call_p.bind(*jax.tree.leaves(operands), **both, name=name)
    return made


def _lower(ctx: Any, *operands: Any, function: Any, exported: Any, name: str) -> Any:
    is_saved = device_count(ctx) > 1 and is_for_export(ctx)
    call = jaxpr_as_fun(exported if is_saved else function)

    def named(*operands: Any) -> Any:
        return call(*operands)

    named.__name__ = named.__qualname__ = name
    return mlir.lower_fun(jax.jit(named), multiple_results=True)(ctx, *operands)


_jitted: dict[Any, Any] = {}  # Jitted functions of `_run`, in the order of their last calls.
_MAX_JITTED = 256


def _run(*operands: Any, function: Any, name: str, **_: Any) -> Any:
    """Call `function` in a program that is compiled once for its name and mesh. Constants are not in the name."""
    key = name, jax.sharding.get_abstract_mesh()
    jitted = None if function.consts else _jitted.pop(key, None)
    if jitted is None:
        jitted = jax.jit(jaxpr_as_fun(function))
    if not function.consts:
        _jitted[key] = jitted
        for oldest in list(_jitted)[:-_MAX_JITTED]:
            _jitted.pop(oldest, None)
    return ops.run_jitted(jitted, *operands)


# This primitive is lowered to `exported` in an export for several devices, and to `function` otherwise.
_call_p = Primitive("qshard_custom_partitioning")
_call_p.multiple_results = True
_call_p.def_impl(_run)
_call_p.def_abstract_eval(lambda *operands, function, **_: function.out_avals)
mlir.register_lowering(_call_p, _lower)
