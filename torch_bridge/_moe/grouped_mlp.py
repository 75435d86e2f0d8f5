"""The MLP of all experts: from the choice of a router to the sum over the experts of each token.

    x, indices  --permute-->  rows by expert  --w13-->  gate, up  --SwiGLU-->  h  --w2-->  y  --unpermute-->  sum

Two grouped products serve all experts. `w13` has the weights of gate and up, so the rows are quantized once for both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.layers import check_mlp
from qshard._core.validation import quote
from qshard.recipes import Recipe, RecipeLike, as_recipe
from qshard.torch_bridge._distributed.token_exchange import ExpertGroup, expert_group
from qshard.torch_bridge._experts.autograd import DelayedStates
from qshard.torch_bridge._experts.expert_parallel import check_parallel_recipe
from qshard.torch_bridge._experts.fusion import Fusion
from qshard.torch_bridge._experts.grouped_linear import grouped_linear
from qshard.torch_bridge._experts.tiles import GroupedRows, tile_rows_of
from qshard.torch_bridge._moe.expert_parallel import parallel_experts
from qshard.torch_bridge._moe.permutation import combine_experts, moe_permutation, moe_permute, padded_rows
from qshard.torch_bridge._nn.activations import swiglu_gate_up
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._quantized.validation import check_tensor

Weights = Sequence[Tensor] | Tensor
"""One weight per expert, or one tensor of all experts."""

Groups = Tensor | GroupedRows
"""The number of rows of each expert, for rows sorted by expert; or padded rows."""

Product = Callable[[Tensor, Groups], Any]
"""A grouped product. Arguments: rows, and the rows of each expert. A `Fusion` with SwiGLU gives a pair."""


def grouped_mlp(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    w13: Weights,
    w2: Weights,
    recipe: RecipeLike | None,
    *,
    weight_layout: Literal["NK", "KN"] = "NK",
    seeds: tuple[Tensor, Tensor] | None = None,
    delayed: tuple[DelayedStates, DelayedStates] | None = None,
    ep_group: ExpertGroup | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `sum(weights[t, j] * mlp(x[t], indices[t, j]) for j in range(k))` for each token t. Differentiable.

    `mlp(x, e)` is `swiglu(x @ w1[e].T, x @ w3[e].T) @ w2[e].T`, and `w13[e]` has the rows of `w1[e]`, then the rows of
    `w3[e]`. Weights multiply the result of an expert, as in Mixtral, Qwen3-MoE, DeepSeek-V3 and gpt-oss. For weights
    that multiply its input, as in torchtitan's `score_before_experts`, call `moe_permute` and `grouped_linear`.

    Args:
      x: float32, bfloat16 or float16 `[..., H]`.
      indices: int32 or int64 `[..., k]`, the experts of each token, as from `topk_routing`. An index outside of 0..E-1
        names no expert and adds nothing.
      weights: a float dtype `[..., k]`, the weight of each of these experts.
      w13: `[E, 2 I, H]`, or one `[2 I, H]` per expert, each as for `linear`.
      w2: `[E, H, I]`, or one `[H, I]` per expert.
      recipe: as for `linear`; None multiplies the values in the dtype of x, without quantization.
      weight_layout: "NK", or "KN" for `w13` `[E, H, 2 I]` and `w2` `[E, I, H]`.
      seeds: for stochastic rounding, the seeds of `grouped_linear`, int32 `[E, 2]`, for `w13` and for `w2`.
      delayed: for delayed scaling, the states of `grouped_linear` for `w13` and for `w2`.
      ep_group: expert parallelism: R ranks, each with its own tokens and `E / R` of the E experts. `w13`, `w2` and
        `seeds` belong to the local experts, and `indices` count all experts: rank r has `r * E / R` and following.
      dtype: as for `linear`.

    Returns:
      `[..., H]`. The gradient of the weight of an expert without tokens is zeros.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: shapes do not fit each other or the formats, a seed or state is missing, or the ranks of `ep_group`
        have different shapes of experts, dtypes or recipes, which raises on all ranks; or DistributedDataParallel
        averages the weights over them.
      NotImplementedError: delayed scaling with `ep_group`.

    `linear` on the rows of each expert computes the same codes and scales. Nothing waits for the device. The number of
    launches grows with the number of experts only where it does in `grouped_linear`.

    With `ep_group`, one device with the tokens of all ranks, rank 0 first, has the same codes and scales. Each forward
    pass waits for the device once, for the counts of rows to receive. Gradients of weights are sums over the tokens of
    all ranks.

    >>> x, w13, w2 = torch.ones(2, 32), torch.ones((4, 64, 32)), torch.full((4, 32, 32), 0.125)
    >>> indices, weights = torch.tensor([[0, 1], [3, 0]]), torch.full((2, 2), 0.5)
    >>> grouped_mlp(x, indices, weights, w13, w2, "CurrentScaling")[:, 0].round()
    tensor([4096., 4096.])

    Sources: Megatron-Core (`GroupedMLP`); arXiv:2401.04088 (Mixtral).
    """
    check_tensor("grouped_mlp", "x", x)
    check_tensor("grouped_mlp", "weights", weights)
    for name, choice in (("w13", w13), ("w2", w2)):
        if not isinstance(choice, Tensor | Sequence) or not len(choice):
            raise TypeError(
                f"grouped_mlp: {name} ({quote(choice)}) are not tensors; pass one of all experts, or one for each"
            )
    if not isinstance(indices, Tensor):
        raise TypeError(f"grouped_mlp: indices ({quote(indices)}) are not a torch.Tensor; pass int64 [..., k]")
    check_mlp(x.shape, indices.shape, weights.shape, (_shape(w13), _shape(w2)), weight_layout)

    group = None if ep_group is None else expert_group("grouped_mlp", ep_group)
    experts = len(w13) if group is None else len(w13) * group.size()
    if group is not None:
        check_parallel_recipe("grouped_mlp", recipe)
    products = _Products(recipe, weight_layout, seeds, delayed, dtype)
    if recipe is None:  # There rows of no expert are multiplied, too.
        weights = torch.where((indices >= 0) & (indices < experts), weights, 0)
        recipes = None
    else:
        recipes = (as_recipe(recipe, "grouped_mlp", by_product=False),) * 2
    run = (lambda rows, groups: products(0, rows, w13, groups), lambda rows, groups: products(1, rows, w2, groups))
    facts = (_shape(w13), weight_layout, x.dtype, dtype, recipes)
    own = [[w] if isinstance(w, Tensor) else w for w in (w13, w2)]
    return apply_experts(x, indices, weights, experts, recipes, *run, group=group, local=own, facts=facts)


class _Products(NamedTuple):
    """The grouped products of `grouped_mlp`, and their options."""

    recipe: RecipeLike | None
    weight_layout: Literal["NK", "KN"]
    seeds: tuple[Tensor, Tensor] | None
    delayed: tuple[DelayedStates, DelayedStates] | None
    dtype: torch.dtype | None

    def __call__(self, number: int, rows: Tensor, w: Weights, groups: Groups) -> Tensor:
        if self.recipe is None:
            assert isinstance(groups, Tensor)
            return _value_product(rows, w, groups, self.weight_layout)
        seeds = None if self.seeds is None else self.seeds[number]
        delayed = None if self.delayed is None else self.delayed[number]
        layout = self.weight_layout if isinstance(w, Tensor) else None
        given: dict[str, Any] = {"seeds": seeds, "delayed": delayed, "dtype": self.dtype}
        y: Tensor = grouped_linear(rows, w, groups, self.recipe, weight_layout=layout, **given)
        return y


def _shape(w: Weights) -> tuple[int, ...]:
    return tuple(w.shape) if isinstance(w, Tensor) else (len(w), *w[0].shape)


def apply_experts(
    x: Tensor,
    indices: Tensor,
    weights: Tensor,
    num_experts: int,
    recipes: tuple[Recipe, Recipe] | None,
    w13: Product,
    w2: Product,
    activation: Callable[[Tensor], Tensor] | None = None,
    *,
    fuses: bool = True,
    group: dist.ProcessGroup | None = None,
    local: Sequence[Sequence[Tensor]] = (),
    facts: Hashable = None,
) -> Tensor:
    """Compute `grouped_mlp` with given products, the recipe of each, and a function of each row between them.

    The function is SwiGLU if `activation` is None. It has no parameters, because it is also applied to padding. Only
    recipes pad rows. The ranks of `group` must agree on `facts`, and `local` are the weights of both products on this
    rank. `fuses` lets the products compute SwiGLU and the sum over experts under a compiler (`Fusion`). Pass False if
    hooks see the results of the products.

    With recipes, tokens go straight to the padded rows of experts, and all between the products stays there: no pass
    over memory permutes, pads or gathers rows. Padding rows are not quantized, and nothing reads their results.
    """
    k, tokens = indices.shape[-1], x.reshape(-1, x.shape[-1])
    permutation = moe_permutation(indices.reshape(-1, k), num_experts)
    first: Groups = permutation.group_sizes
    second, rows, of_tokens = first, tokens, weights.reshape(-1, k)
    between = swiglu_gate_up if activation is None else activation
    if group is not None and group.size() > 1:
        rows = moe_permute(tokens, permutation)
        y = parallel_experts(rows, permutation.group_sizes, recipes, w13, w2, between, group, local, facts)
    else:
        if recipes is None or not tokens.shape[0]:
            rows = moe_permute(tokens, permutation)
        else:
            permutation, first, second = padded_rows(permutation, tile_rows_of(tokens.device, *recipes))
            if fuses and activation is None and is_compiling():
                h, amaxes = w13(rows, first._replace(fusion=Fusion(swiglu=True)))
                fusion = Fusion((h, amaxes), permutation=permutation, weights=of_tokens)
                return _in_shape_of(x, w2(h, second._replace(fusion=fusion)))
        y = w2(between(w13(rows, first)), second)
    return _in_shape_of(x, combine_experts(y, permutation, of_tokens))


def _in_shape_of(x: Tensor, y: Tensor) -> Tensor:
    # No view where none is needed: FSDP2 warns of modules that return one.
    return y if x.ndim == 2 else y.view(*x.shape[:-1], y.shape[-1])


def _value_product(x: Tensor, weights: Weights, group_sizes: Tensor, layout: str) -> Tensor:
    """Multiply rows by the weight of their expert, without quantization; rows of no expert by the last weight."""
    w = weights if isinstance(weights, Tensor) else torch.stack([*weights])
    ends = group_sizes.cumsum(0, dtype=torch.int32)
    # `_grouped_mm` does not write rows after the last group, and writing zeros there would take another pass.
    ends[-1] = x.shape[0]
    return torch._grouped_mm(x, (w.transpose(1, 2) if layout == "NK" else w).to(x.dtype), offs=ends)
