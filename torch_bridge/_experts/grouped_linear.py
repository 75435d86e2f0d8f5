"""Linear layers of experts, on tokens sorted by expert.

    x [M, K], sorted  ->  tiles, each of one expert  ->  codes, with scales by expert  ->  products by expert

A loop over single `Linear` layers computes the same codes, bit for bit. Here the number of kernel launches does not
grow with the number of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from qshard._core.operands import check_state, check_weight_shape
from qshard._core.validation import quote
from qshard.recipes import Recipe, RecipeLike, as_recipe
from qshard.torch_bridge._experts.autograd import DelayedStates, GroupedProduct, ProductOptions
from qshard.torch_bridge._experts.tiles import GroupedRows
from qshard.torch_bridge._nn.operands import ROLES, check_gathered, check_operand
from qshard.torch_bridge._ops.autograd_node import apply_node
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.eager import is_capturing, is_compiling
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_tensor


def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor] | Tensor,
    group_sizes: Tensor | GroupedRows,
    recipe: RecipeLike,
    *,
    bias: Tensor | None = None,
    weight_layout: Literal["NK", "KN"] | None = None,
    seeds: Tensor | None = None,
    delayed: DelayedStates | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `linear` for each expert: rows of group e give `x_e @ weights[e].T`.

    Args:
      x: float32, bfloat16 or float16 `[M, K]`, rows sorted by expert.
      weights: one `[N, K]` per expert, each as for `linear`; or one tensor of all experts, values or a
        `QuantizedStack`.
      group_sizes: int32 or int64 `[E]`, the number of rows of each expert, 0 or more. Rows after the last group give
        zeros. They may be on the CPU or on the device of x. The call never waits for the device.
      recipe: as for `linear`.
      bias: `[E, N]`, or None. The bias of an expert is added to its rows.
      weight_layout: required with one tensor of all experts, because N == K would be ambiguous: "NK" for `[E, N, K]`,
        "KN" for `[E, K, N]`, as in `torch.nn.functional.grouped_mm`. Both give the same bits. "KN" copies values in
        each call, but no codes.
      seeds: for stochastic rounding, int32 `[E, 2]`: the seed of `linear` for each expert.
      delayed: for each expert the states that `linear` takes; or for each role one `DelayedScale` of all experts.
      dtype: as for `linear`.

    Returns:
      `[M, N]`. The weight gradient of an expert without rows is zeros.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: shapes do not fit each other or the formats; a seed, a state or `weight_layout` is missing; or group
        sizes on the CPU are negative, exceed the rows of x, or would be captured in a CUDA graph. Group sizes on a GPU
        are checked by a device assertion, which ends the CUDA context of the process.

    Codes and scales are bit for bit the codes and scales of `linear` on the rows of each expert. Products are summed in
    another order. On a CPU, and on Hopper with cuBLASLt 13.5 or newer, each product is one op for all experts: of FP8
    codes with one scale or in blocks of 128, otherwise of dequantized values, in bfloat16 on the GPU. Elsewhere PyTorch
    multiplies bfloat16 values and the result is rounded to bfloat16; or each expert is a call, if the host knows the
    sizes. The number of launches does not grow with the number of experts otherwise.

    A forward pass quantizes weights once, and saves the codes for the backward pass. Codes of a stack are multiplied
    where they are, by one call for all experts. So are codes of a list, if one op multiplies codes; otherwise they are
    copied next to each other, and either way the host works for each expert. Codes are not kept for the next call:
    PyTorch does not see every write to a parameter.

    Scales depend on this rank's rows only. Ranks may have different experts or different rows. `torch.compile` traces
    the call. A CUDA graph may capture it if group sizes are on the GPU, and reads new sizes in a replay.

    >>> from qshard.recipes import CurrentScaling
    >>> x, w = torch.full((6, 32), 7.0), torch.stack([torch.full((16, 32), v) for v in (0.875, 1.75, 3.5)])
    >>> grouped_linear(x, w, torch.tensor([2, 0, 3]), CurrentScaling(), weight_layout="NK")[:, 0]
    tensor([196., 196., 784., 784., 784.,   0.])

    Sources: `torch._grouped_mm`; TransformerEngine (`GroupedLinear`: scales by expert, rows padded to blocks).
    """
    recipe = as_recipe(recipe, "grouped_linear", by_product=False)
    check_tensor("grouped_linear", "x", x)
    if not isinstance(weights, Tensor | Sequence) or type(weights) is QuantizedTensor:
        raise TypeError(
            f"grouped_linear: weights ({quote(weights)}) are not tensors of values or a list; pass one [E, N, K], or "
            "[N, K] for each expert"
        )
    weights = _in_rows(weights, weight_layout)
    each = [weights] if isinstance(weights, Tensor) else [*weights]
    _check_weights(each, recipe)
    each = [weight if weight.is_contiguous() else weight.contiguous() for weight in each]
    if dtype is not None:
        check_dtype("grouped_linear", "dtype", dtype)
    experts, shape = _check_shapes(x, weights, each)
    check_weight_shape("grouped_linear", "weights", recipe, shape)
    bias = _checked_bias(bias, experts, shape[0])
    seeds = _checked_seeds(seeds, recipe, experts)
    states = _count_states(delayed)
    advice = "a dict of DelayedScale by role for each expert" if recipe.stateful else "None"
    fits = states in (None, experts)
    check_state("grouped_linear", "delayed", states, recipe, advice, layers=f"{experts} experts", fits=fits)
    groups, sizes, transfer = group_sizes, None, None
    row_amaxes = token_weights = None
    if isinstance(group_sizes, GroupedRows):
        assert bias is None, "the gradient of a bias needs the rows of x"
        transfer, fusion = group_sizes.transfer, group_sizes.fusion
        if fusion is not None:  # Autograd and Dynamo look for these tensors among the inputs themselves.
            row_amaxes, token_weights = fusion.amaxes_of(x), fusion.weights
            groups = group_sizes._replace(fusion=fusion._replace(amaxes=None, weights=None))
    else:
        sizes = checked_sizes(x, experts, group_sizes)
        groups = group_sizes.to(x.device, torch.int32, non_blocking=True)
    is_gathered = isinstance(each[0], QuantizedTensor)
    how = ProductOptions(recipe, x.dtype if dtype is None else dtype, sizes, delayed, is_gathered, transfer)
    y: Tensor = apply_node(GroupedProduct, x, groups, seeds, bias, row_amaxes, token_weights, how, *each)
    return y


def _in_rows(weights: Sequence[Tensor] | Tensor, layout: Any) -> Sequence[Tensor] | Tensor:
    """Return the weights as one `[N, K]` per expert, or as one tensor `[E, N, K]`."""
    if not isinstance(weights, Tensor):
        if layout not in (None, "NK"):
            raise ValueError(
                f"grouped_linear: weight_layout ({quote(layout)}) is for one tensor of all experts, but weights is a "
                "list; pass each as [N, K], and leave weight_layout out"
            )
        return weights
    if layout not in ("NK", "KN"):
        raise ValueError(
            f"grouped_linear: weight_layout ({quote(layout)}) is not a layout; pass 'NK' for weights [E, N, K], as in "
            "nn.Linear, or 'KN' for weights [E, K, N], as in grouped_mm"
        )
    if layout == "NK" or weights.ndim != 3:
        return weights
    transposed = weights.transpose(1, 2)
    return transposed if isinstance(transposed, QuantizedStack) else transposed.contiguous()


def _check_weights(each: Sequence[Any], recipe: Recipe) -> None:
    """Raise unless weights are values, or all are codes in the recipe's weight format."""
    kinds = {type(weight) for weight in each}
    if kinds == {QuantizedTensor} and all(weight.format is each[0].format for weight in each):
        each = each[:1]  # The usual case of many experts.
    for weight in each:
        check_operand("grouped_linear", weight, recipe)
        check_gathered(weight, "grouped_linear")
    if QuantizedTensor in kinds and len(kinds) > 1:
        names = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise TypeError(
            f"grouped_linear: weights ({names}) are codes of some experts and values of others; quantize all, or none"
        )


def _check_shapes(x: Tensor, weights: Sequence[Tensor] | Tensor, each: Sequence[Tensor]) -> tuple[int, tuple[int, ...]]:
    """Return the number of experts, and the shape `(N, K)` of the weight of each."""
    experts = weights.shape[0] if isinstance(weights, Tensor) else len(weights)
    whole = isinstance(weights, Tensor)
    shapes = [tuple(shape[1:] if whole else shape) for shape in dict.fromkeys([weight.shape for weight in each])]
    if not experts or len(shapes) != 1 or len(shapes[0]) != 2 or x.ndim != 2 or x.shape[1] != shapes[0][1]:
        raise ValueError(
            f"grouped_linear: weights {', '.join(map(str, shapes)) or '(none)'} do not fit x {tuple(x.shape)}; pass "
            "each as [N, K], all of one shape, and x as [M, K]"
        )
    if others := {weight.device for weight in each} - {x.device}:
        raise ValueError(
            f"grouped_linear: weights (on {', '.join(map(str, others))}) are not on the device of x, {x.device}; move "
            "them there"
        )
    return experts, shapes[0]


def _checked_bias(bias: Any, experts: int, columns: int) -> Tensor | None:
    if bias is None:
        return None
    if not isinstance(bias, Tensor):
        raise TypeError(f"grouped_linear: bias ({quote(bias)}) is not a torch.Tensor or None; pass a tensor [E, N]")
    if tuple(bias.shape) != (experts, columns):
        raise ValueError(
            f"grouped_linear: bias {tuple(bias.shape)} does not fit {experts} experts with weights of {columns} rows; "
            "pass bias as [E, N]"
        )
    return bias


def _count_states(delayed: DelayedStates | None) -> int | None:
    """Return the number of experts that have states; 0 if roles are missing or differ, and None without states."""
    if not isinstance(delayed, Mapping):
        return None if delayed is None else len(delayed)
    shapes = {tuple(delayed[role].scale.shape) if role in delayed else () for role in ROLES}
    return next(iter(shapes))[0] if len(shapes) == 1 and () not in shapes else 0


def _checked_seeds(seeds: Any, recipe: Recipe, experts: int) -> Tensor | None:
    if not recipe.stochastic:
        return None
    what = quote(seeds) if not isinstance(seeds, Tensor) else f"{dtype_name(seeds.dtype)} {tuple(seeds.shape)}"
    if not isinstance(seeds, Tensor) or seeds.dtype != torch.int32 or tuple(seeds.shape) != (experts, 2):
        raise (ValueError if seeds is None or isinstance(seeds, Tensor) else TypeError)(
            f"grouped_linear: {type(recipe).__name__} uses stochastic rounding and needs `seeds` as int32 "
            f"{(experts, 2)}, not {what}; pass a new uint64 per expert, as two int32"
        )
    return seeds


def checked_sizes(x: Tensor, experts: int, group_sizes: Tensor) -> tuple[int, ...] | None:
    """Check `group_sizes`, and return them as ints if they are on the CPU."""
    if not isinstance(group_sizes, Tensor):
        raise TypeError(f"grouped_linear: group_sizes ({quote(group_sizes)}) is not a torch.Tensor; pass int32 [E]")
    if tuple(group_sizes.shape) != (experts,) or group_sizes.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"grouped_linear: group_sizes ({dtype_name(group_sizes.dtype)} {tuple(group_sizes.shape)}) is not one "
            f"int32 or int64 for each of {experts} experts; pass the number of rows of each expert"
        )
    if group_sizes.device.type == "cpu" and is_capturing(x.device):
        raise ValueError(
            "grouped_linear: group_sizes (on the CPU) would be constants of the captured CUDA graph; pass them on "
            f"{x.device}, so that a replay reads new sizes"
        )
    if group_sizes.device.type == "cpu" and not is_compiling():
        sizes = tuple(group_sizes.tolist())
        if min(sizes) < 0 or sum(sizes) > x.shape[0]:
            raise ValueError(
                f"grouped_linear: group_sizes (sum {sum(sizes)}, minimum {min(sizes)}) are negative or exceed the rows "
                f"of x {tuple(x.shape)}; pass the number of rows of each expert"
            )
        return sizes
    if group_sizes.device.type != "cpu" and group_sizes.device != x.device:
        raise ValueError(
            f"grouped_linear: group_sizes (on {group_sizes.device}) are neither on the CPU nor on {x.device}, the "
            "device of x; move them there"
        )
    return None
