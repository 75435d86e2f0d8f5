"""SwiGLU, RMSNorm and mixture-of-experts layers: argument checks of both front ends, and the permutation of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from qshard._core.validation import quote
from qshard.op_table import table

ScoreFunction = Literal["softmax", "sigmoid"]
"""The function that maps the logits of a router to scores."""

Array = Any
Shape = Sequence[int]

SUM_ROWS = int(table()["rms_norm_grad"].attributes["rows"][1][0])
"""Rows of x per partial sum of the weight gradient of RMSNorm: the only value that the op accepts."""


class MoEPermutation(NamedTuple):
    """The permutation of rows of `moe_permutation`: token t has the rows `positions[t]` of the permuted matrix.

    Attributes:
      choices: int32 `[T k]`: for each permuted row the index of its choice, `t * k + j` for expert j of token t.
      positions: int32 `[T, k]`, the inverse: the permuted row of each choice.
      group_sizes: int32 `[E]`: the number of rows of each expert, as products of experts take them.
    """

    choices: Array
    positions: Array
    group_sizes: Array

    @property
    def tokens(self) -> Array:
        """The token of each permuted row, int32 `[T k]`."""
        return self.choices // self.positions.shape[1]


def check_pair(op: str, gate: Shape, gate_dtype: str, up: Shape, up_dtype: str) -> None:
    """Raise ValueError unless the two inputs of SwiGLU have one shape and dtype."""
    if tuple(gate) != tuple(up) or gate_dtype != up_dtype:
        raise ValueError(
            f"{op}: up ({up_dtype} {tuple(up)}) does not match gate ({gate_dtype} {tuple(gate)}); pass both in one "
            "shape and dtype"
        )


def check_norm(op: str, x: Shape, weight: Shape, eps: Any) -> None:
    """Raise ValueError unless RMSNorm of these shapes is defined."""
    if len(weight) != 1 or len(x) < 1 or x[-1] != weight[0]:
        raise ValueError(
            f"{op}: weight {tuple(weight)} does not fit x {tuple(x)}; pass weight as [K] and x as [*lead, K]"
        )
    if not eps >= 0:
        raise ValueError(f"{op}: eps ({quote(eps)}) must be a small number of at least 0, such as 1e-5")


def check_scores(logits: Shape, top_k: Any, score_function: Any, bias: Shape | None) -> None:
    """Raise ValueError unless the arguments of `topk_routing` fit logits `[..., E]`."""
    if not logits:
        raise ValueError("topk_routing: logits () have no axis of experts; pass [..., E]")
    experts = logits[-1]
    if not hasattr(top_k, "__index__") or not 1 <= top_k <= experts:
        raise ValueError(
            f"topk_routing: top_k ({quote(top_k)}) is not a number of experts of logits {tuple(logits)}; pass an "
            f"integer from 1 to {experts}"
        )
    if score_function not in ("softmax", "sigmoid"):
        raise ValueError(
            f"topk_routing: score_function ({quote(score_function)}) is not a score function; pass 'softmax' or "
            "'sigmoid'"
        )
    if bias is not None and tuple(bias) != (experts,):
        raise ValueError(
            f"topk_routing: bias {tuple(bias)} is not one number for each of {experts} experts; pass ({experts},)"
        )


def check_choice(op: str, indices: Shape, num_experts: Any) -> None:
    """Raise ValueError unless `indices` are `[T, k]` and `num_experts` is positive."""
    if len(indices) != 2:
        raise ValueError(f"{op}: indices {tuple(indices)} are not [T, k]; pass the k experts of each of T tokens")
    if not hasattr(num_experts, "__index__") or num_experts < 1:
        raise ValueError(f"{op}: num_experts ({quote(num_experts)}) is not positive; pass an integer of at least 1")


def check_tokens(op: str, name: str, x: Shape, rows: int, meaning: str) -> None:
    """Raise ValueError unless `x` is a matrix of that many rows."""
    if len(x) != 2 or x[0] != rows:
        raise ValueError(f"{op}: {name} {tuple(x)} does not have {rows} rows; pass {meaning}")


def check_weights(op: str, weights: Shape, positions: Shape) -> None:
    """Raise ValueError unless there is one weight for each choice."""
    if tuple(weights) != tuple(positions):
        raise ValueError(
            f"{op}: weights {tuple(weights)} are not {tuple(positions)}; pass one weight for each of the k experts of "
            "a token"
        )


def check_mlp(x: Shape, indices: Shape, weights: Shape, experts: tuple[Shape, Shape] | None, layout: Any) -> None:
    """Raise ValueError unless the shapes of `grouped_mlp` fit. `experts` are the shapes of w13 and w2, if known."""
    if layout not in ("NK", "KN"):
        raise ValueError(
            f"grouped_mlp: weight_layout ({quote(layout)}) is not a layout; pass 'NK' for w13 [E, 2 I, H] and w2 "
            "[E, H, I], or 'KN' for w13 [E, H, 2 I] and w2 [E, I, H]"
        )
    if experts is not None and not _fits(x, *experts, layout):
        axes = ("[E, 2 I, H]", "[E, H, I]") if layout == "NK" else ("[E, H, 2 I]", "[E, I, H]")
        raise ValueError(
            f"grouped_mlp: w13 {tuple(experts[0])} and w2 {tuple(experts[1])} do not fit x {tuple(x)}; pass "
            f"them as {axes[0]} and {axes[1]} for weight_layout {layout!r}, and x as [..., H]"
        )
    if not indices or tuple(indices[:-1]) != tuple(x[:-1]) or tuple(weights) != tuple(indices):
        raise ValueError(
            f"grouped_mlp: indices {tuple(indices)} and weights {tuple(weights)} do not fit x {tuple(x)}; pass the k "
            "experts of each token, and their weights, as [..., k]"
        )


def _fits(x: Shape, w13: Shape, w2: Shape, layout: str) -> bool:
    if not x or len(w13) != 3 or len(w2) != 3 or w13[0] != w2[0]:
        return False
    (n13, k13), (n2, k2) = ((w[layout.index("N") + 1], w[layout.index("K") + 1]) for w in (w13, w2))
    return (k13, n2, n13) == (x[-1], x[-1], 2 * k2)
