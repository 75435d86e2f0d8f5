"""The MLP of all experts: from the choice of a router to the sum over the experts of each token.

    x, indices  --permute-->  rows by expert  --w13-->  gate, up  --SwiGLU-->  h  --w2-->  y  --unpermute-->  sum

Two ragged products serve all experts. `w13` has the weights of gate and up, so the rows are quantized once for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from qshard._core.layers import check_mlp
from qshard._core.validation import WeightLayout
from qshard.jax._delayed_scaling import LinearState
from qshard.jax._experts.ragged_dot import LayerOptions, product_and_amaxes
from qshard.jax._experts.ragged_dot_vjp import Result
from qshard.jax._experts.token_exchange import device_count
from qshard.jax._moe.expert_parallel import expert_axes, parallel_mlp
from qshard.jax._moe.permutation import moe_permutation, moe_permute, moe_unpermute
from qshard.jax._ops.mesh import AxisName, Spec
from qshard.jax._ops.validation import Seed, check_array, check_dtype
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._quantized.gather import CodedWeight
from qshard.jax._quantized.primary import PrimaryWeight
from qshard.recipes import RecipeLike, as_recipe

Weights = jax.Array | QuantizedArray | PrimaryWeight | CodedWeight


def grouped_mlp(
    x: jax.Array,
    indices: jax.Array,
    weights: jax.Array,
    w13: Weights,
    w2: Weights,
    recipe: RecipeLike | None,
    *,
    weight_layout: WeightLayout = "NK",
    weight_spec: Spec = None,
    gather_axis: str | Sequence[str] | None = None,
    reshard_after_forward: bool = True,
    axis_name: AxisName = None,
    ep_axis: AxisName = None,
    capacity_factor: float | None = None,
    seeds: tuple[Seed, Seed] | None = None,
    states: tuple[LinearState, LinearState] | None = None,
) -> jax.Array:
    """Compute `sum(weights[t, j] * mlp(x[t], indices[t, j]) for j in range(k))` for each token t. Differentiable.

    `mlp(x, e)` is `swiglu(x @ w1[e].T, x @ w3[e].T) @ w2[e].T`, and `w13[e]` has the rows of `w1[e]`, then the rows of
    `w3[e]`. Weights multiply the result of an expert, as in Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss. For weights
    that multiply its input, call `moe_permute` and `ragged_dot`.

    Args:
      x: float32, bfloat16 or float16 `[..., H]`.
      indices: integers `[..., k]`, the experts of each token, as from `topk_routing`. An index outside of 0..E-1
        names no expert and adds nothing.
      weights: a float dtype `[..., k]`, the weight of each of these experts.
      w13: `[E, 2 I, H]`, a weight of all experts as for `ragged_dot`.
      w2: `[E, H, I]`, likewise.
      recipe: as for `ragged_dot`; None multiplies without quantization.
      weight_layout: "NK", or "KN" for `w13` `[E, H, 2 I]` and `w2` `[E, I, H]`.
      weight_spec: as for `ragged_dot`, for both weights.
      gather_axis: as for `ragged_dot`.
      reshard_after_forward: as for `ragged_dot`.
      axis_name: as for `ragged_dot`.
      ep_axis: expert parallelism: in `shard_map`, the mesh axis, or axes, of R devices that share the experts. Each has
        its own tokens, and `E / R` of the E experts. `w13`, `w2` and `states` belong to the local experts, and
        `indices` count all experts: device r has `r * E / R` and following.
      capacity_factor: with `ep_axis`, the number of rows that a device has room for, as a multiple of the `T k` rows
        that it sends. None: R, the worst case. A balanced router needs 1.
      seeds: for stochastic rounding, the seed of `ragged_dot` for `w13` and for `w2`. With `ep_axis`, pass the same on
        all of its devices: expert e is counted among all experts.
      states: for delayed scaling, the state of `ragged_dot` for `w13` and for `w2`.

    Returns:
      `[..., H]`, in the dtype of x. The gradient of the weight of an expert without tokens is zeros. If a device of
      `ep_axis` would receive more rows than `capacity_factor` allows, all is NaN on all of these devices, and so is the
      gradient of x, and one row in the gradient of each weight: no row is dropped silently.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: shapes do not fit each other or the formats, a seed or state is missing, or `ep_axis` is not an axis
        of an enclosing `shard_map`.

    `linear` on the rows of each expert computes the same codes and scales. In `shard_map` without `ep_axis`, a device
    computes its own tokens with the experts that it is given. On Auto meshes XLA shards the products.

    With `ep_axis`, one device with the tokens of all devices, device 0 first, has the same codes and scales. Formats
    with one scale for each expert are quantized once and sent as codes, in both directions; for others values are sent.
    Gradients of weights are sums over the tokens of all devices.

    >>> x, w13, w2 = jnp.ones((2, 32)), jnp.ones((4, 64, 32)), jnp.full((4, 32, 32), 0.125)
    >>> indices, weights = jnp.array([[0, 1], [3, 0]]), jnp.full((2, 2), 0.5)
    >>> grouped_mlp(x, indices, weights, w13, w2, "CurrentScaling")[:, 0].round()
    Array([4096., 4096.], dtype=float32)

    Sources: Megatron-Core (`GroupedMLP`); arXiv:2401.04088 (Mixtral).
    """
    for name, array in (("x", x), ("weights", weights)):
        check_array("grouped_mlp", name, array)
        check_dtype("grouped_mlp", name, array)
    check_array("grouped_mlp", "indices", indices)
    shapes = _shape("w13", w13), _shape("w2", w2)
    # `ragged_dot` checks the shapes of weights that it gathers.
    checked = None if gather_axis is not None else shapes
    check_mlp(jnp.shape(x), jnp.shape(indices), jnp.shape(weights), checked, weight_layout)
    options = LayerOptions(recipe, weight_layout, weight_spec, gather_axis, reshard_after_forward, axis_name)
    axes = expert_axes(ep_axis, axis_name, capacity_factor)
    k, experts = jnp.shape(indices)[-1], shapes[0][0] * device_count(axes)

    def products(rows: jax.Array, of_w13: Any, of_w2: Any, v13: Any, v2: Any) -> jax.Array:
        """Multiply rows by `v13`, apply SwiGLU, and multiply by `v2`. `of_w13` and `of_w2` are the rows of experts."""

        def product(number: int, rows: jax.Array, w: Any, groups: Any, **passed: Any) -> Result:
            seed = None if seeds is None else seeds[number]
            state = None if states is None else states[number]
            return product_and_amaxes(options, rows, w, groups, seed, state, known_axes=axes, **passed)

        h, amaxes = product(0, rows, v13, of_w13, swiglu=True)
        return product(1, h, v2, of_w2, row_amaxes=amaxes)[0]

    x, indices, weights = jnp.asarray(x), jnp.asarray(indices), jnp.asarray(weights)
    permutation = moe_permutation(indices.reshape(-1, k), experts)
    rows = moe_permute(x.reshape(-1, x.shape[-1]), permutation)
    sizes = permutation.group_sizes
    if axes and rows.shape[0]:
        made = None if recipe is None else as_recipe(recipe, "grouped_mlp", by_product=False)
        y = parallel_mlp(products, rows, w13, w2, sizes, made, axes, capacity_factor)
    else:
        sizes = sizes[: shapes[0][0]]
        y = products(rows, sizes, sizes, w13, w2)
    return moe_unpermute(y, permutation, weights.reshape(-1, k)).reshape(*x.shape[:-1], y.shape[-1])


def _shape(name: str, w: Any) -> tuple[int, ...]:
    if isinstance(w, CodedWeight):
        w = w.sink if w.codes is None else w.codes
    if not isinstance(w, QuantizedArray | PrimaryWeight):
        check_array("grouped_mlp", name, w)
    return tuple(w.shape if hasattr(w, "shape") else jnp.shape(w))
