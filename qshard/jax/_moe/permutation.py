"""The permutation that sorts the rows of a mixture-of-experts layer by expert, and its inverse.

    x [T, H], each token with k experts  --permute-->  [T k, H], rows sorted by expert  --unpermute-->  [T, H]

Backward passes gather rows instead of adding to them, so gradients are deterministic, and each is rounded once. XLA
fuses the gathers with the sums.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from qshard._core.layers import MoEPermutation, check_choice, check_tokens, check_weights
from qshard._core.validation import quote
from qshard.jax._ops.mesh import vary_alike
from qshard.jax._ops.validation import check_array, check_dtype


def moe_permutation(indices: jax.Array, num_experts: int) -> MoEPermutation:
    """Sort the choices of a router by expert. Choices of the same expert keep the order of their tokens.

    Args:
      indices: integers `[T, k]`: the experts of each token. An index outside of 0..E-1 names no expert: its row comes
        after the last group, where `ragged_dot` gives zeros.
      num_experts: E.

    Returns:
      The permutation of the `T k` rows.

    Raises:
      TypeError: `indices` are not integers.
      ValueError: `indices` are not `[T, k]`, `num_experts` is not positive, or a mesh has Explicit axes, over which JAX
        does not sort.

    In `shard_map` a device sorts its own tokens. On Auto meshes XLA sorts all of them.

    >>> permutation = moe_permutation(jnp.array([[2, 0], [0, 1]]), 3)
    >>> permutation.tokens, permutation.group_sizes
    (Array([0, 1, 1, 0], dtype=int32), Array([2, 1, 1], dtype=int32))

    Source: Megatron-Core (`moe_utils.permute`).
    """
    check_array("moe_permutation", "indices", indices)
    if not jnp.issubdtype(jnp.result_type(indices), jnp.integer):
        raise TypeError(f"moe_permutation: indices ({quote(indices)}) are not integers; pass the experts of each token")
    check_choice("moe_permutation", jnp.shape(indices), num_experts)
    indices = jnp.asarray(indices)
    if axes := jax.typeof(indices).sharding.mesh.explicit_axes:
        raise ValueError(
            f"moe_permutation: JAX does not sort over Explicit mesh axes {axes}; call it inside jax.shard_map over them"
        )
    flat = indices.reshape(-1)
    if flat.dtype.itemsize < 4:
        flat = flat.astype(jnp.int32)  # `num_experts` may not fit a narrower type.
    keys = jnp.where((flat < 0) | (flat > num_experts), num_experts, flat).astype(jnp.int32)
    choices = jnp.argsort(keys, stable=True).astype(jnp.int32)
    row = jnp.arange(keys.shape[0], dtype=jnp.int32)
    positions = jnp.zeros_like(choices).at[choices].set(row, unique_indices=True, mode="promise_in_bounds")
    experts = jnp.arange(num_experts, dtype=jnp.int32)
    group_sizes = jnp.sum(keys[:, None] == experts[None], 0, dtype=jnp.int32)
    return MoEPermutation(choices, positions.reshape(indices.shape), group_sizes)


def moe_permute(x: jax.Array, permutation: MoEPermutation) -> jax.Array:
    """Copy the rows of tokens to the rows of their experts. Differentiable.

    Args:
      x: float32, bfloat16 or float16 `[T, H]`.
      permutation: the result of `moe_permutation`.

    Returns:
      `[T k, H]`, sorted by expert. The gradient of a token is the sum over its rows, in fp32 and rounded once.

    Raises:
      TypeError: `x` is not an array of such a dtype.
      ValueError: `x` does not have T rows.

    >>> moe_permute(jnp.array([[1.0], [2.0]]), moe_permutation(jnp.array([[2, 0], [0, 1]]), 3)).ravel()
    Array([1., 2., 2., 1.], dtype=float32)

    Source: Megatron-Core (`moe_utils.permute`).
    """
    check_array("moe_permute", "x", x)
    check_dtype("moe_permute", "x", x)
    check_tokens("moe_permute", "x", jnp.shape(x), permutation.positions.shape[0], "x as [T, H]")
    x, *varying = vary_alike(jnp.asarray(x), *permutation)
    return _permute(x, MoEPermutation(*varying))


def moe_unpermute(y: jax.Array, permutation: MoEPermutation, weights: jax.Array | None = None) -> jax.Array:
    """Add the rows of each token, times the weights of its experts. Differentiable in both.

    Args:
      y: float32, bfloat16 or float16 `[T k, N]`, sorted by expert.
      permutation: the result of `moe_permutation`.
      weights: the weight of each choice, a float dtype `[T, k]`; None for 1.

    Returns:
      `[T, N]` in the dtype of `y`: the sum over k, in fp32 and rounded once.

    Raises:
      TypeError: `y` or `weights` is not an array of such a dtype.
      ValueError: `y` does not have `T k` rows, or `weights` are not `[T, k]`.

    >>> permutation = moe_permutation(jnp.array([[2, 0], [0, 1]]), 3)
    >>> moe_unpermute(jnp.array([[1.0], [2.0], [4.0], [8.0]]), permutation, jnp.array([[1.0, 0.5], [1.0, 2.0]]))
    Array([[ 8.5],
           [10. ]], dtype=float32)

    Source: Megatron-Core (`moe_utils.unpermute`).
    """
    check_array("moe_unpermute", "y", y)
    check_dtype("moe_unpermute", "y", y)
    shape = permutation.positions.shape
    check_tokens("moe_unpermute", "y", jnp.shape(y), shape[0] * shape[1], "one row for each of the T k choices")
    if weights is None:
        weights = jnp.ones(shape, jnp.float32)
    check_array("moe_unpermute", "weights", weights)
    check_dtype("moe_unpermute", "weights", weights)
    check_weights("moe_unpermute", jnp.shape(weights), shape)
    y, weights, *varying = vary_alike(jnp.asarray(y), jnp.asarray(weights), *permutation)
    return _unpermute(y, weights, MoEPermutation(*varying))


def _combine(y: jax.Array, positions: jax.Array, weights: jax.Array | None = None) -> jax.Array:
    """Return `sum(weights[t, j] * y[positions[t, j]] for j in range(k))` for each t, in fp32 and rounded once."""
    each = y[positions].astype(jnp.float32)
    if weights is not None:
        each = each * weights.astype(jnp.float32)[..., None]
    return each.sum(1).astype(y.dtype)


@jax.custom_vjp
def _permute(x: jax.Array, permutation: MoEPermutation) -> jax.Array:
    return x[permutation.tokens]


def _permute_forward(x: jax.Array, permutation: MoEPermutation) -> tuple[jax.Array, jax.Array]:
    return _permute(x, permutation), permutation.positions


def _permute_backward(positions: jax.Array, grad: jax.Array) -> tuple[jax.Array, None]:
    return _combine(grad, positions), None


_permute.defvjp(_permute_forward, _permute_backward)


@jax.custom_vjp
def _unpermute(y: jax.Array, weights: jax.Array, permutation: MoEPermutation) -> jax.Array:
    return _combine(y, permutation.positions, weights)


def _unpermute_forward(
    y: jax.Array, weights: jax.Array, permutation: MoEPermutation
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, MoEPermutation]]:
    return _unpermute(y, weights, permutation), (y, weights, permutation)


def _unpermute_backward(
    saved: tuple[jax.Array, jax.Array, MoEPermutation], grad: jax.Array
) -> tuple[jax.Array, jax.Array, None]:
    y, weights, permutation = saved
    rows = grad[permutation.tokens].astype(jnp.float32)
    dy = rows * weights.astype(jnp.float32).reshape(-1)[permutation.choices][:, None]
    dots = (rows * y.astype(jnp.float32)).sum(1)
    return dy.astype(y.dtype), dots[permutation.positions].astype(weights.dtype), None


_unpermute.defvjp(_unpermute_forward, _unpermute_backward)
