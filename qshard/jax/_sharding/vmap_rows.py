"""Products under `vmap` as one matrix: the rows of all examples share scales and blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from qshard.jax._sharding.shard_spec import matrix_of, unfold


def vmap_as_rows(product: Callable[..., Any], fwd: Callable[..., Any], bwd: Callable[..., Any]) -> Callable[..., Any]:
    """Return a differentiable `product(config, x, *rest)` such that `vmap` over `x` alone adds rows to the matrix `x`.

    If `vmap` is over `rest` too, each example is a product of its own, as usual. `fwd` and `bwd` are the rules of
    `jax.custom_vjp`, with `config` first; the residuals, and the gradient of `rest`, cover all rows.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def folded(config: Any, x: jax.Array, *rest: Any) -> Any:
        # One result and no residuals.
        return _call_as_rows(lambda x, *rest: (product(config, x, *rest), ()), _enough_rows, x, *rest)[0]

    def folded_fwd(config: Any, x: jax.Array, *rest: Any) -> Any:
        return _call_as_rows(lambda x, *rest: _with_rows(fwd(config, x, *rest)), _enough_rows, x, *rest)

    def folded_bwd(config: Any, kept_rows: Any, dy: jax.Array) -> Any:
        def gradients(dy: jax.Array, kept: Any, rows: jax.Array) -> Any:
            if len(dy) != len(rows):
                raise ValueError(
                    f"vmap: dy {dy.shape} does not have the {len(rows)} rows of x; map over the same axes of both"
                )
            dx, *rest = bwd(config, kept, dy)
            return dx, rest

        dx, rest = _call_as_rows(gradients, lambda _, kept, rows: len(rows), dy, *kept_rows)
        return dx, *rest

    folded.defvjp(folded_fwd, folded_bwd)
    return folded


def _with_rows(made: tuple[jax.Array, Any]) -> Any:
    """Add to the residuals an empty array with as many rows as the product."""
    y, kept = made
    return y, (kept, jnp.zeros((len(y), 0), jnp.bool_))


def _enough_rows(x: jax.Array, *_: Any) -> int:
    return 128 * len(x)  # A whole number of blocks in every format.


def _call_as_rows(function: Callable[..., Any], enough_rows: Callable[..., int], x: jax.Array, *rest: Any) -> Any:
    """Call `function(x, *rest)`, which returns a matrix and more. `vmap` over `x` alone adds rows to both matrices."""
    call = custom_vmap(functools.partial(_call_or_raise_later, function, enough_rows))

    @call.def_vmap
    def rule(size: int, batched: list[Any], x: jax.Array, *rest: Any) -> Any:
        if any(jax.tree.leaves(batched[1:])):
            axes = [jax.tree.map(lambda flag: 0 if flag else None, flags) for flags in batched]
            out = jax.vmap(function, in_axes=axes, axis_size=size)(x, *rest)
            return out, jax.tree.map(lambda _: True, out)
        y, others = call(matrix_of(x), *rest)
        return (unfold(y, (*x.shape[:2], y.shape[-1])), others), (True, jax.tree.map(lambda _: False, others))

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
