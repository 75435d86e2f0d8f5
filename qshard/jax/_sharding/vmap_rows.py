"""Products under `vmap` as one matrix: the rows of all examples share scales and blocks."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

from qshard.jax._ops.mesh import explicit_sharding
from qshard.jax._sharding.shard_spec import matrix_of, unfold


def vmap_as_rows(product: Callable[..., Any], fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[..., Any]:
    """Return a differentiable `product(config, x, *rest)` such that `vmap` over `x` alone adds rows to the matrix `x`.

    If `vmap` is over `rest` too, each example is a product of its own, as usual. `fwd` and `bwd` are the rules of
    `jax.custom_vjp`, with `config` first: a dataclass, with the sharding of `x` on Explicit meshes as `x_type`.

    `grad(vmap(f))` and `vmap(grad(f))` differ in the gradient of `rest`: one for all rows, or one for each example. JAX
    calls the same rules of a `custom_vjp` in both. So the product is a primitive, `_rows_p`. In `grad(vmap(f))` JAX
    first applies its batching rule, which adds rows, and then differentiates one product. In `vmap(grad(f))` JAX first
    differentiates, and then calls the rules of `vmap` of the forward and of the backward pass.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def folded(config: Any, x: jax.Array, *rest: Any) -> Any:
        return product(config, x, *rest)

    def folded_fwd(config: Any, x: jax.Array, *rest: Any) -> Any:
        y, kept = _call_as_rows(lambda x, *rest: _with_rows(fwd(config, x, *rest)), _enough_rows, x, *rest)
        return y, (*kept, x[:0, :0])

    def folded_bwd(config: Any, saved: Any, dy: jax.Array) -> Any:
        *kept_rows, of_x = saved
        dy = _mapped_like(dy, of_x)

        def gradients(dy: jax.Array, kept: Any, rows: jax.Array) -> Any:
            if len(dy) != len(rows):
                raise ValueError(
                    f"vmap: dy {dy.shape} does not have the {len(rows)} rows of x; map over the same axes of both"
                )
            dx, *rest = bwd(config, kept, dy)
            return dx, rest

        dx, rest = _call_as_rows(gradients, lambda _, kept, rows: len(rows), dy, *kept_rows, by_example=True)
        return dx, *rest

    folded.defvjp(folded_fwd, folded_bwd)

    def bind(config: Any, x: jax.Array, *rest: Any) -> Any:
        leaves, structure = jax.tree.flatten((x, *rest))

        def call(*leaves: jax.Array) -> Any:
            x, *rest = jax.tree.unflatten(structure, leaves)
            return _call_or_raise_later(functools.partial(folded, config), _enough_rows, x, *rest)

        def call_of_rows(*leaves: jax.Array) -> Any:
            x, *rest = jax.tree.unflatten(structure, leaves)
            return bind(dataclasses.replace(config, x_type=explicit_sharding(x)), x, *rest)

        program = jax.make_jaxpr(call)(*leaves)
        return _rows_p.bind(*leaves, program=program, call=call, call_of_rows=call_of_rows)[0]

    return bind


def _batch(operands: Sequence[Any], axes: Sequence[Any], *, call: Any, call_of_rows: Any, **_: Any) -> Any:
    """Add rows to x, the first operand, or if others are mapped over too, make a product for each example."""
    (x, *rest), (axis, *others) = operands, axes
    if any(other is not None for other in others):
        y = jax.vmap(call, in_axes=tuple(axes))(*operands)
    else:
        x = jnp.moveaxis(x, axis, 0)
        y = call_of_rows(matrix_of(x), *rest)
        y = unfold(y, (*x.shape[:2], y.shape[-1]))
    return [y], [0]


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, program: Any, **_: Any) -> Any:
    return jax.jvp(jaxpr_as_fun(program), tuple(primals), tuple(map(ad.instantiate_zeros, tangents)))


def _run(*operands: Any, program: Any, **_: Any) -> Any:
    return jaxpr_as_fun(program)(*operands)


_rows_p = Primitive("qshard_rows")
_rows_p.multiple_results = True
_rows_p.def_impl(_run)
_rows_p.def_abstract_eval(lambda *_, program, **__: program.out_avals)
batching.primitive_batchers[_rows_p] = _batch
ad.primitive_jvps[_rows_p] = _differentiate
mlir.register_lowering(_rows_p, mlir.lower_fun(_run, multiple_results=True))


@custom_vmap
def _mapped_like(dy: jax.Array, x: jax.Array) -> jax.Array:
    """Return `dy`, mapped over wherever `x` is: the gradient of a sum is the same for all examples."""
    return dy


@_mapped_like.def_vmap
def _map(size: int, batched: list[bool], dy: jax.Array, x: jax.Array) -> tuple[jax.Array, bool]:
    return _mapped_like(dy if batched[0] else jnp.broadcast_to(dy, (size, *dy.shape)), x), True


def _with_rows(made: tuple[jax.Array, Any]) -> Any:
    """Add to the residuals an empty array with as many rows as the product."""
    y, kept = made
    return y, (kept, jnp.zeros((len(y), 0), jnp.bool_))


def _enough_rows(x: jax.Array, *_: Any) -> int:
    return 128 * len(x)  # A whole number of blocks in every format.


def _call_as_rows(
    function: Callable[..., Any],
    enough_rows: Callable[..., int],
    x: jax.Array,
    *rest: Any,
    by_example: bool = False,
) -> Any:
    """Call `function(x, *rest)`, which returns a matrix and more. `vmap` over `x` alone adds rows to both matrices.

    The other results cover all rows, or with `by_example` the rows of one example: each example calls `function` with
    the rows of others set to zero.
    """
    call = custom_vmap(functools.partial(_call_or_raise_later, function, enough_rows))

    @call.def_vmap
    def rule(size: int, batched: list[Any], x: jax.Array, *rest: Any) -> Any:
        if any(jax.tree.leaves(batched[1:])):
            axes = [jax.tree.map(lambda flag: 0 if flag else None, flags) for flags in batched]
            out = jax.vmap(function, in_axes=axes, axis_size=size)(x, *rest)
            return out, jax.tree.map(lambda _: True, out)
        y, others = call(matrix_of(x), *rest)
        y = unfold(y, (*x.shape[:2], y.shape[-1]))
        if by_example:
            _, others = _call_by_example(function, enough_rows, size, matrix_of(x), *rest)
        return (y, others), (True, jax.tree.map(lambda _: by_example, others))

    return call(x, *rest)


def _call_by_example(
    function: Callable[..., Any], enough_rows: Callable[..., int], size: int, x: jax.Array, *rest: Any
) -> Any:
    """Return `x`, and the other results of `function(x, *rest)` for each of `size` examples, stacked."""

    def each(x: jax.Array, *rest: Any) -> Any:
        rows = len(x) // size
        row = lax.broadcasted_iota(jnp.int32, x.shape, 0, out_sharding=explicit_sharding(x))

        def one(example: jax.Array) -> Any:
            return function(jnp.where(row // rows == example, x, jnp.zeros_like(x)), *rest)[1]

        return x, lax.map(one, jnp.arange(size, dtype=jnp.int32))

    call = custom_vmap(functools.partial(_call_or_raise_later, each, enough_rows))

    @call.def_vmap
    def rule(more: int, batched: list[Any], x: jax.Array, *rest: Any) -> Any:
        if any(jax.tree.leaves(batched[1:])):
            axes = [jax.tree.map(lambda flag: 0 if flag else None, flags) for flags in batched]
            out = jax.vmap(each, in_axes=axes, axis_size=more)(x, *rest)
        else:
            _, others = _call_by_example(function, enough_rows, more * size, matrix_of(x), *rest)
            out = x, jax.tree.map(lambda a: a.reshape(more, size, *a.shape[1:]), others)
        return out, jax.tree.map(lambda _: True, out)

    return call(x, *rest)


def _call_or_raise_later(
    function: Callable[..., Any], enough_rows: Callable[..., int], x: jax.Array, *rest: Any
) -> Any:
    """Call `function(x, *rest)`, or if `x` has too few rows for it, return results that raise when they are computed.

    JAX first traces the program of one example and drops it when it applies the rule of `vmap`.
    """
    try:
        return function(x, *rest)
    except ValueError as error:
        copies = enough_rows(x, *rest) // len(x)
        made = jax.eval_shape(lambda x, *rest: function(jnp.tile(x, (copies, 1)), *rest), x, *rest)
        leaves, structure = jax.tree.flatten(made)
        leaves[0] = leaves[0].update(shape=(len(x), *leaves[0].shape[1:]))
        return jax.tree.unflatten(structure, _error_p.bind(avals=tuple(leaves), error=error))


def refuse(tree: Any, error: ValueError) -> Any:
    """Return arrays in the shapes of `tree`. A program that needs one of them raises `error` when it is lowered.

    A rule of a `custom_vjp` must not raise: JAX 0.10 would lose the state of its cached traces, and later correct calls
    would fail with "Store empty".
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _error_p.bind(avals=tuple(map(jax.typeof, leaves)), error=error))


def _raise(*, error: ValueError, **_: Any) -> Any:
    raise error


_error_p = Primitive("qshard_error")
_error_p.multiple_results = True
_error_p.def_impl(_raise)
_error_p.def_abstract_eval(
    lambda *, avals, **_: [x if isinstance(x, ShapedArray) else ShapedArray(x.shape, x.dtype) for x in avals]
)
mlir.register_lowering(_error_p, lambda _, **options: _raise(**options))
