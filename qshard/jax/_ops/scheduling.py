"""Optimization barriers and common subexpression elimination, which control the schedule of XLA.

XLA for GPUs has one collective in flight at a time, and starts it as late as it expects to be early enough. Left alone,
it gathers a weight right before its GEMM, because the all-reduce of an amax lies between that GEMM and the GEMM before
it. It also delays the gradients of all weights to the end of a step, and keeps their operands until then. With
barriers, each `linear` hides its own collectives, in a loop and under `jax.checkpoint` too (`linear_vjp.py`). Here `|`
means "at the same time as":

    forward    GEMM of the layer before | gather w;  amax of x, all-reduce, cast;  GEMM
    backward   amax of dy, all-reduce, cast;  GEMM of dw | gather w;  GEMM of dx | reduce-scatter dw
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.interpreters import batching, mlir

from qshard.jax._jax_internals import lower_once

_Tree = TypeVar("_Tree")
_Other = TypeVar("_Other")


def barrier(first: _Tree, second: _Other) -> tuple[_Tree, _Other]:
    """Return both trees unchanged, but compute nothing from either before all of both is available.

    XLA then also repeats a computation on `first` that occurs earlier, instead of keeping its result until here.
    """
    leaves, structure = jax.tree.flatten((first, second))
    # A barrier makes all its operands vary over the same axes. Scales that all shards share must not vary.
    varying = [jax.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    held = [i for i, axes in enumerate(varying) if axes == varying[0]]
    for i, leaf in zip(held, lax.optimization_barrier([leaves[i] for i in held]), strict=True):
        leaves[i] = leaf
    both: tuple[_Tree, _Other] = jax.tree.unflatten(structure, leaves)
    return both


def cse(made: _Tree, of: Any, how: Hashable) -> _Tree:
    """Return `made`, or the value that the program computed before it from the same arrays `of` in the same way.

    XLA finds such pairs itself only if no all-reduce is involved: it treats any two all-reduces that it inserts for
    Auto meshes as different. So q, k and v would each quantize the same x. `how` is a hashable description of the
    computation.
    """
    leaves, structure = jax.tree.flatten(made)
    first: _Tree = jax.tree.unflatten(structure, _cse_p.bind(*leaves, *jax.tree.leaves(of), count=len(leaves), how=how))
    return first


def name_residual(x: jax.Array, name: str) -> jax.Array:
    """Name `x` for policies of `jax.checkpoint`, as integers.

    `jax.checkpoint` rounds the floats that it saves, and turns E4M3 values above 240 into NaN.
    """
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(checkpoint_name(bits, name), x.dtype)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["bits"], meta_fields=["dtype"])
@dataclass(frozen=True)
class _Bits:
    """An array of 8-bit floats as uint8."""

    bits: jax.Array
    dtype: Any


def residuals_as_bits(tree: Any) -> Any:
    """Replace arrays of 8-bit floats in a tree of residuals by their bits, which every policy of checkpoints keeps.

    A policy that saves all results, such as `everything_saveable`, saves the floats that `name_residual` returns, and
    JAX would round them. See `name_residual`.
    """

    def as_bits(leaf: Any) -> Any:
        dtype = leaf.dtype
        if dtype.itemsize > 1 or not jnp.issubdtype(dtype, jnp.floating):
            return leaf
        return _Bits(lax.bitcast_convert_type(leaf, jnp.uint8), dtype)

    return jax.tree.map(as_bits, tree)


def residuals_from_bits(tree: Any) -> Any:
    """Return the tree that `residuals_as_bits` was called with."""

    def as_floats(leaf: Any) -> Any:
        return lax.bitcast_convert_type(leaf.bits, leaf.dtype) if isinstance(leaf, _Bits) else leaf

    return jax.tree.map(as_floats, tree, is_leaf=lambda node: isinstance(node, _Bits))


_cse_p = Primitive("qshard_cse")
_cse_p.multiple_results = True
_cse_p.def_impl(lambda *arrays, count, how: list(arrays[:count]))
_cse_p.def_abstract_eval(lambda *types, count, how: list(types[:count]))


def _batch(arrays: Any, axes: Any, *, count: int, how: Hashable) -> Any:
    # Calls with other batch axes compute other values from the same arrays.
    return _cse_p.bind(*arrays, count=count, how=(how, tuple(axes))), axes[:count]


def _lower(ctx: Any, *values: Any, count: int, how: Hashable) -> Any:
    # Values of the same block of the module precede this one, so they may replace it.
    block = ir.InsertionPoint.current.block
    return lower_once(ctx, (_cse_p, block, values[count:], how), values[:count])


batching.primitive_batchers[_cse_p] = _batch
mlir.register_lowering(_cse_p, _lower, cacheable=False)
