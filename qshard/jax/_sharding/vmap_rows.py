"""Products under `vmap` whose examples are rows of one matrix, with scales and blocks of all of them."""

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
    """A differentiable `product(config, x, *rest)` of a matrix `x`, to which `vmap` over `x` alone adds rows.

    Where `vmap` is over the rest too, every example is a product of its own, as elsewhere.

    Args:
      product: gives y `[rows, N]`.
      fwd, bwd: as `jax.custom_vjp` takes them, `config` first. What `fwd` keeps and the gradient of the rest are of all
        rows.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def folded(config: Any, x: jax.Array, *rest: Any) -> Any:
        # One result, beside which nothing is kept.
        return _call_as_rows(lambda x, *rest: (product(config, x, *rest), ()), _enough, x, *rest)[0]

    def folded_fwd(config: Any, x: jax.Array, *rest: Any) -> Any:
        return _call_as_rows(lambda x, *rest: _with_rows(fwd(config, x, *rest)), _enough, x, *rest)

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
    """What is kept, and an empty array of as many rows as the product has."""
    y, kept = made
    return y, (kept, jnp.zeros((len(y), 0), jnp.bool_))


def _enough(x: jax.Array, *_: Any) -> int:
    return 128 * len(x)  # Whole blocks, whatever the format.


def _call_as_rows(function: Callable[..., Any], enough: Callable[..., int], x: jax.Array, *rest: Any) -> Any:
    """`function(x, *rest)`, a matrix and what else it gives; `vmap` over x alone adds rows to both matrices."""
    call = custom_vmap(functools.partial(_or_refused, function, enough))

    @call.def_vmap
    def rule(size: int, batched: list[Any], x: jax.Array, *rest: Any) -> Any:
        if any(jax.tree.leaves(batched[1:])):
            axes = [jax.tree.map(lambda flag: 0 if flag else None, flags) for flags in batched]
            out = jax.vmap(function, in_axes=axes, axis_size=size)(x, *rest)
            return out, jax.tree.map(lambda _: True, out)
        y, others = call(matrix_of(x), *rest)
        return (unfold(y, (*x.shape[:2], y.shape[-1])), others), (True, jax.tree.map(lambda _: False, others))

    return call(x, *rest)


def _or_refused(function: Callable[..., Any], enough: Callable[..., int], x: jax.Array, *rest: Any) -> Any:
    """`function(x, *rest)`; where x has too few rows for it, results that are an error to compute.

    JAX traces the program of one example before it asks what `vmap` makes of it, and drops it then.
    """
    try:
        return function(x, *rest)
    except ValueError as error:
        copies = enough(x, *rest) // len(x)
        made = jax.eval_shape(lambda x, *rest: function(jnp.tile(x, (copies, 1)), *rest), x, *rest)
        leaves, structure = jax.tree.flatten(made)
        leaves[0] = leaves[0].update(shape=(len(x), *leaves[0].shape[1:]))
        return jax.tree.unflatten(structure, _refused.bind(avals=tuple(leaves), error=error))


def refuse(tree: Any, error: ValueError) -> Any:
    """Arrays in the shapes of `tree`. A program that needs one raises `error` when it is lowered.

    A rule of a `custom_vjp` must not raise itself: JAX 0.10 has then lost what its cached traces know, and later calls
    that are right fail with "Store empty".
    """
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, _refused.bind(avals=tuple(map(jax.typeof, leaves)), error=error))


def _refuse(*, error: ValueError, **_: Any) -> Any:
    raise error


_refused = Primitive("qshard_refused")
_refused.multiple_results = True
_refused.def_impl(_refuse)
_refused.def_abstract_eval(
    lambda *, avals, **_: [x if isinstance(x, ShapedArray) else ShapedArray(x.shape, x.dtype) for x in avals]
)
mlir.register_lowering(_refused, lambda _, **options: _refuse(**options))
