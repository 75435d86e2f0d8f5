"""Token-choice routing: the experts of each token, and their weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from qshard._core.layers import ScoreFunction, check_scores
from qshard.jax._ops.validation import check_array, check_dtype


def topk_routing(
    logits: jax.Array,
    top_k: int,
    *,
    score_function: ScoreFunction = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Choose `top_k` experts for each token, and compute their weights in fp32. Differentiable.

    | model | arguments |
    | --- | --- |
    | Mixtral, gpt-oss, Qwen3-MoE | the defaults: softmax of the `top_k` largest logits |
    | DeepSeek-V3 | `score_function="sigmoid"`, `scale=2.5`, `bias` |

    Args:
      logits: float32, bfloat16 or float16 `[..., E]`, the output of the router.
      top_k: number of experts of each token, at most E.
      score_function: "softmax" over all experts, or "sigmoid" of each.
      normalize: divide the chosen scores by their sum.
      scale: factor of the weights, after `normalize`.
      bias: `[E]`, added to the scores for the choice only, as in load balancing without an auxiliary loss. It gets no
        gradient.

    Returns:
      indices: int32 `[..., top_k]`, by falling score.
      weights: float32 `[..., top_k]`, with gradients of `logits`.

    Raises:
      TypeError: `logits` is not an array of such a dtype.
      ValueError: `top_k` or `score_function` is out of range, or `bias` does not fit.

    >>> indices, weights = topk_routing(jnp.array([[1.0, 3.0, 2.0, 0.0]]), 2)
    >>> indices, jnp.round(4 * weights)
    (Array([[1, 2]], dtype=int32), Array([[3., 1.]], dtype=float32))

    Sources: arXiv:2401.04088 (Mixtral); arXiv:2412.19437 (DeepSeek-V3).
    """
    check_array("topk_routing", "logits", logits)
    check_dtype("topk_routing", "logits", logits)
    check_scores(jnp.shape(logits), top_k, score_function, None if bias is None else jnp.shape(bias))
    wide = jnp.asarray(logits, jnp.float32)
    scores = jax.nn.softmax(wide) if score_function == "softmax" else jax.nn.sigmoid(wide)
    indices = lax.top_k(lax.stop_gradient(scores if bias is None else scores + bias), top_k)[1]
    weights = jnp.take_along_axis(scores, indices, -1)
    if normalize:
        # Sigmoids may all be 0 in fp32.
        weights = weights / jnp.maximum(weights.sum(-1, keepdims=True), jnp.finfo(jnp.float32).tiny)
    return indices, weights * scale
