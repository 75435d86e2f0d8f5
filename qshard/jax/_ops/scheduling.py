"""In which order XLA does things, and what it does once.

XLA for GPUs has one collective in flight at a time, and begins it as late as it thinks will do. Left alone, it gathers
a weight right before its GEMM, because the all-reduce of an amax lies between that and the GEMM before; and it puts off
all gradients of weights to the end of a step, and keeps until then what they are made of. Ties make of each `linear`
what hides its own collectives, in a loop and under `jax.checkpoint` too (`linear_vjp.py`):

    forward    GEMM of the layer before | gather w;  amax of x, all-reduce, cast;  GEMM
    backward   amax of dy, all-reduce, cast;  GEMM of dw | gather w;  GEMM of dx | reduce-scatter dw
"""

from __future__ import annotations

from collections.abc import Hashable
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
    """Both as they are, but what is made of either is made only once all of both is there.

    It also keeps XLA from seeing that a thing is made twice of `first`, and from keeping it in between.
    """
    leaves, structure = jax.tree.flatten((first, second))
    # A barrier makes all of its operands vary alike, and scales that shards have in common do not vary.
    varying = [jax.typeof(leaf).manual_axis_type.varying for leaf in leaves]
    held = [i for i, axes in enumerate(varying) if axes == varying[0]]
    for i, leaf in zip(held, lax.optimization_barrier([leaves[i] for i in held]), strict=True):
        leaves[i] = leaf
    both: tuple[_Tree, _Other] = jax.tree.unflatten(structure, leaves)
    return both


def cse(made: _Tree, of: Any, how: Hashable) -> _Tree:
    """`made`, or what a program made before it of the same arrays `of` in the same way.

    XLA finds that by itself only where it has no all-reduce to make: those that it makes for Auto meshes are no two
    alike to it. So q, k and v would each quantize their x.
    """
    leaves, structure = jax.tree.flatten(made)
    first: _Tree = jax.tree.unflatten(structure, _once.bind(*leaves, *jax.tree.leaves(of), count=len(leaves), how=how))
    return first


def name_residual(x: jax.Array, name: str) -> jax.Array:
    """`x` under a name, as integers: `jax.checkpoint` rounds floats that it keeps, and makes NaN of E4M3 above 240."""
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return lax.bitcast_convert_type(checkpoint_name(bits, name), x.dtype)


_once = Primitive("qshard_once")
_once.multiple_results = True
_once.def_impl(lambda *arrays, count, how: list(arrays[:count]))
_once.def_abstract_eval(lambda *types, count, how: list(types[:count]))


def _batch(arrays: Any, axes: Any, *, count: int, how: Hashable) -> Any:
    return _once.bind(*arrays, count=count, how=how), axes[:count]


def _lower(ctx: Any, *values: Any, count: int, how: Hashable) -> Any:
    # What a block has made lies before what it makes next, and so may serve it.
    block = ir.InsertionPoint.current.block
    return lower_once(ctx, (_once, block, values[count:], how), values[:count])


batching.primitive_batchers[_once] = _batch
mlir.register_lowering(_once, _lower, cacheable=False)
