"""Linear layers of experts, on tokens sorted by expert.

    x [M, K], sorted  ->  tiles, each of one expert  ->  codes, with scales by expert  ->  products by expert

A loop over single `Linear` layers computes the same codes, bit for bit. Here the number of kernel launches does not
grow with the number of experts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from qshard._core.flat_shards import FlatSlice
from qshard._core.quantize_steps import Plane, Scales
from qshard._core.validation import quote
from qshard.formats import Format, Usage
from qshard.layout import source
from qshard.recipes import Recipe, RecipeLike, Role, as_recipe, check_state, check_weight_shape
from qshard.torch_bridge._fsdp.scale_state import Passes
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._nn.expert_tiles import (
    GroupedOperand,
    Tiles,
    expert_products,
    make_operand,
    quantize_tiles,
    row_product,
    stack_weights,
    tiles_of,
)
from qshard.torch_bridge._nn.functional import check_operand
from qshard.torch_bridge._nn.linear import Linear
from qshard.torch_bridge._nn.operands import ROLES, LayerQuantizer, operand_spec, planes_of, values_of
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.foreach import flat_plan
from qshard.torch_bridge._quantized.gemm import Operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_dtype, check_tensor
from qshard.torch_bridge._torch_internals import pytree


@torch.compiler.disable
def grouped_linear(
    x: Tensor,
    weights: Sequence[Tensor] | Tensor,
    group_sizes: Tensor,
    recipe: RecipeLike,
    *,
    weight_layout: Literal["NK", "KN"] | None = None,
    seeds: Tensor | None = None,
    delayed: Sequence[Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `linear` for each expert: rows of group e give `x_e @ weights[e].T`.

    Args:
      x: float32, bfloat16 or float16 `[M, K]`, rows sorted by expert.
      weights: one `[N, K]` per expert, each as for `linear`; or one tensor of all experts.
      group_sizes: int32 or int64 `[E]`, the number of rows of each expert, 0 or more. Rows after the last group give
        zeros. If they are on the GPU, the call does not synchronize with the host. If they are on the CPU, each
        expert's product is a GEMM call of its own.
      recipe: as for `linear`.
      weight_layout: required with one tensor of all experts, because N == K would be ambiguous: "NK" for `[E, N, K]`,
        "KN" for `[E, K, N]`, as in `torch.nn.functional.grouped_mm`. Both give the same bits. "KN" copies the weights
        in each call.
      seeds: for stochastic rounding, int32 `[E, 2]`: the seed of `linear` for each expert.
      delayed: for each expert the states that `linear` takes.
      dtype: as for `linear`.

    Returns:
      `[M, N]`. The weight gradient of an expert without rows is zeros.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: shapes do not fit each other or the formats; a seed, a state or `weight_layout` is missing; or group
        sizes on the CPU are negative or exceed the rows of x. Group sizes on a GPU are checked by a device assertion,
        which ends the CUDA context of the process.

    Codes and scales are bit for bit the codes and scales of `linear` on the rows of each expert. The number of launches
    does not grow with the number of experts, except to quantize weights with 1-D blocks, stochastic rounding or delayed
    scaling. Products are summed in another order than in `linear`. With group sizes on the GPU, products are computed
    in bfloat16, or on Hopper from E4M3 codes of per-tensor formats, and the result is rounded to bfloat16.

    Scales depend on this rank's rows only. Ranks may have different experts or different rows. Under `torch.compile`
    the call runs eagerly, after a graph break.

    >>> from qshard.recipes import CurrentScaling
    >>> x, w = torch.full((6, 32), 7.0), torch.stack([torch.full((16, 32), v) for v in (0.875, 1.75, 3.5)])
    >>> grouped_linear(x, w, torch.tensor([2, 0, 3]), CurrentScaling(), weight_layout="NK")[:, 0]
    tensor([196., 196., 784., 784., 784.,   0.])

    Sources: `torch._grouped_mm`; TransformerEngine (`GroupedLinear`: scales by expert, rows padded to blocks).
    """
    recipe = as_recipe(recipe, "grouped_linear")
    check_tensor("grouped_linear", "x", x)
    if not isinstance(weights, Tensor | Sequence):
        raise TypeError(
            f"grouped_linear: weights ({quote(weights)}) are not tensors; pass one [E, N, K], or [N, K] for each expert"
        )
    weights = _in_rows(weights, weight_layout)
    whole = weights if isinstance(weights, Tensor) and not isinstance(weights, QuantizedTensor) else None
    each = [*(weights if whole is None else whole.detach().unbind())]
    for weight in each:
        check_operand("grouped_linear", weight, recipe)
    if dtype is not None:
        check_dtype("grouped_linear", "dtype", dtype)
    _check_shapes(x, each)
    check_weight_shape("grouped_linear", "weights", recipe, tuple(each[0].shape))
    seeds = _checked_seeds(seeds, recipe, len(each))
    states = None if delayed is None else len(delayed)
    advice = "a dict of DelayedScale by role for each expert" if recipe.stateful else "None"
    experts, fits = f"{len(each)} experts", states in (None, len(each))
    check_state("grouped_linear", "delayed", states, recipe, advice, layers=experts, fits=fits)
    how = _How(recipe, x.dtype if dtype is None else dtype, _checked_sizes(x, len(each), group_sizes), delayed)
    given = each if whole is None else [whole]
    y: Tensor = apply_node(_GroupedProduct, x, group_sizes.to(x.device, non_blocking=True), seeds, how, *given)
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
    return weights if layout == "NK" or weights.ndim != 3 else weights.transpose(1, 2).contiguous()


def _check_shapes(x: Tensor, weights: Sequence[Tensor]) -> None:
    shapes = list(dict.fromkeys(tuple(weight.shape) for weight in weights))
    if len(shapes) != 1 or len(shapes[0]) != 2 or x.ndim != 2 or x.shape[1] != shapes[0][1]:
        raise ValueError(
            f"grouped_linear: weights {', '.join(map(str, shapes)) or '(none)'} do not fit x {tuple(x.shape)}; pass "
            "each as [N, K], all of one shape, and x as [M, K]"
        )
    for weight in weights:
        if weight.device != x.device:
            raise ValueError(
                f"grouped_linear: weights (on {weight.device}) are not on the device of x, {x.device}; move them there"
            )


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


def _checked_sizes(x: Tensor, experts: int, group_sizes: Tensor) -> tuple[int, ...] | None:
    """Check `group_sizes`, and return them as ints if they are on the CPU."""
    if not isinstance(group_sizes, Tensor):
        raise TypeError(f"grouped_linear: group_sizes ({quote(group_sizes)}) is not a torch.Tensor; pass int32 [E]")
    if tuple(group_sizes.shape) != (experts,) or group_sizes.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"grouped_linear: group_sizes ({dtype_name(group_sizes.dtype)} {tuple(group_sizes.shape)}) is not one "
            f"int32 or int64 for each of {experts} experts; pass the number of rows of each expert"
        )
    if group_sizes.device.type == "cpu":
        sizes = tuple(group_sizes.tolist())
        if min(sizes) < 0 or sum(sizes) > x.shape[0]:
            raise ValueError(
                f"grouped_linear: group_sizes (sum {sum(sizes)}, minimum {min(sizes)}) are negative or exceed the rows "
                f"of x {tuple(x.shape)}; pass the number of rows of each expert"
            )
        return sizes
    if group_sizes.device != x.device:
        raise ValueError(
            f"grouped_linear: group_sizes (on {group_sizes.device}) are neither on the CPU nor on {x.device}, the "
            "device of x; move them there"
        )
    fits = (group_sizes >= 0).all() & (group_sizes.sum() <= x.shape[0])
    torch._assert_async(
        fits, "grouped_linear: group_sizes are negative or exceed the rows of x; pass the number of rows of each expert"
    )
    return None


class _How(NamedTuple):
    """Arguments of `_GroupedProduct` that are not tensors. `sizes` are the group sizes, if the host knows them."""

    recipe: Recipe
    dtype: torch.dtype
    sizes: tuple[int, ...] | None
    delayed: Sequence[Any] | None

    def scales(self, role: Role) -> Tensor | None:
        return None if self.delayed is None else torch.stack([states[role].scale for states in self.delayed])

    def observe(self, role: Role, amaxes: Tensor | None) -> None:
        if self.delayed is not None and amaxes is not None:
            for states, amax in zip(self.delayed, amaxes.unbind(), strict=True):
                states[role].observe(amax)


class _GroupedProduct(Node):
    """Autograd node of `grouped_linear`."""

    op, degree = "grouped_linear", 2
    instead = "multiply the rows of each expert with torch.nn.functional.linear"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sizes: Tensor, seeds: Tensor | None, how: _How, *weights: Tensor
    ) -> tuple[Tensor, list[Tensor]]:
        need_x, need_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        recipe = how.recipe
        tiles = tiles_of(recipe, x.shape[0], sizes)
        usage = Usage.BOTH if need_w else Usage.ROWWISE
        sides = _quantize_rows(x, how, usage, Role.ACTIVATION, tiles, seeds)
        ws, scales = _weights(weights, how, Usage.ROWWISE, seeds)
        stops = _stops(how, tiles)
        row, columns = Usage.ROWWISE, weights[0].shape[-2]
        y = row_product(sides[row], ws[row], row, tiles, stops, columns, how.dtype, fast=True)
        saved_x = sides[Usage.COLUMNWISE] if need_w else None
        # Codes gathered by FSDP2 are saved by reference: FSDP2 frees their memory and gathers them again.
        saved_w = (weights, scales) if need_x else None
        tensors, ctx.rest = _flat((tiles, saved_x, seeds, saved_w))
        ctx.how, ctx.x_dtype, ctx.w_dtype, ctx.w_shape = how, x.dtype, weights[0].dtype, weights[0].shape
        return tiles.gather(y), tensors

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        how: _How = ctx.how
        tiles, x, seeds, saved_w = _whole(saved, ctx.rest)
        need_x, need_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        usage = Usage.BOTH if need_x and need_w else Usage.ROWWISE if need_x else Usage.COLUMNWISE
        sides = _quantize_rows(grad, how._replace(dtype=grad.dtype), usage, Role.GRADIENT, tiles, seeds)
        grad_x, stops, columns = None, _stops(how, tiles), Usage.COLUMNWISE
        of_weights: Sequence[Tensor | None] = [None] * (len(ctx.needs_input_grad) - 4)
        if need_w:
            shape = (len(tiles.sizes), *ctx.w_shape[-2:])
            dw = expert_products(sides.pop(columns), x, tiles, stops, shape, ctx.w_dtype)
            of_weights = [dw] if len(ctx.w_shape) == 3 else dw.unbind()
        if need_x:
            plane = source(how.recipe.weight, columns)
            (w,) = _weights(saved_w[0], how, plane, seeds, saved_w)[0].values()
            row = sides.pop(Usage.ROWWISE)
            dx = row_product(row, w, columns, tiles, stops, ctx.w_shape[-1], how.dtype, fast=False)
            grad_x = tiles.gather(dx).to(ctx.x_dtype)
        return grad_x, None, None, None, *of_weights


def _stops(how: _How, tiles: Tiles) -> tuple[int, ...] | None:
    if how.sizes is None:
        return None
    return tuple(itertools.accumulate(max(1, -(-size // tiles.unit)) * tiles.unit for size in how.sizes))


def _flat(tree: Any) -> tuple[list[Tensor], Any]:
    """Split a tree into its tensors and the rest, for `save_for_backward`."""
    leaves, spec = pytree.tree_flatten(tree)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return tensors, ([None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves], spec)


def _whole(tensors: Sequence[Tensor], rest: Any) -> Any:
    leaves, spec = rest
    given = iter(tensors)
    return pytree.tree_unflatten([next(given) if leaf is None else leaf[0] for leaf in leaves], spec)


def _quantize_rows(
    x: Tensor, how: _How, usage: Usage, role: Role, tiles: Tiles, seeds: Tensor | None
) -> dict[Usage, GroupedOperand]:
    spec = operand_spec(how.recipe, role, usage)
    spec.layouts((tiles.number * tiles.unit, x.shape[1]))
    places = tiles.scatter(x.detach().to(how.dtype))
    sides, amaxes = quantize_tiles(places, spec, tiles, seeds=seeds, scale=how.scales(role))
    how.observe(role, amaxes)
    return sides


def _weights(
    weights: Sequence[Tensor],
    how: _How,
    usage: Usage,
    seeds: Tensor | None,
    saved: tuple[Any, Scales | None] | None = None,
) -> tuple[dict[Usage, GroupedOperand | Sequence[Operand]], Scales | None]:
    """Return planes of all weights, and the scales to quantize them again in the backward pass.

    `weights` are codes, one tensor per expert, or one tensor `[E, N, K]`. Codes give the planes of `usage` that all of
    them have. In the backward pass `saved` has the weights and the scales of the forward pass.
    """
    recipe = how.recipe

    def stacked(
        each: list[dict[Usage, Operand]], usages: Iterable[Usage]
    ) -> dict[Usage, GroupedOperand | Sequence[Operand]]:
        of = {usage: [planes[usage] for planes in each] for usage in usages}
        return {usage: planes if how.sizes is not None else stack_weights(planes) for usage, planes in of.items()}

    if isinstance(weights[0], QuantizedTensor):
        there = [planes_of(cast(QuantizedTensor, weight), Usage.COLUMNWISE in usage) for weight in weights]
        return stacked(there, [one for one in usage.planes if all(one in planes for planes in there)]), None
    fmt = recipe.weight
    values = weights[0].detach().unbind() if weights[0].ndim == 3 else [values_of(weight) for weight in weights]
    if how.delayed is None and fmt.gather_refusal is None:
        side, scales = _cast_at_once(values, fmt, None if saved is None else saved[1])
        return {Usage.ROWWISE: side}, scales
    operands = []
    for i, value in enumerate(values):
        given = [] if how.delayed is None else [how.delayed[i][role].scale for role in ROLES]
        quantizer = LayerQuantizer(recipe, None if seeds is None else seeds[i], scales=given)
        planes, amax = quantizer.quantize(value, Role.WEIGHT, usage)
        operands.append(planes)
        if how.delayed is not None and saved is None:
            how.delayed[i][Role.WEIGHT].observe(amax)
    return stacked(operands, usage.planes), None


def _cast_at_once(values: Sequence[Tensor], fmt: Format, scales: Scales | None) -> tuple[GroupedOperand, Scales]:
    """Quantize all weights rowwise in a constant number of launches, with the list ops of FSDP2 and ZeRO."""
    one = FlatSlice(tuple(values[0].shape), fmt, dtype_name(values[0].dtype))
    flat, whole = flat_plan((one,) * len(values), values[0].device), [value.reshape(-1) for value in values]
    if scales is None:
        (scales,) = flat.scales(flat.amaxes(whole))
    where = flat.plan.buckets[0].planes[0]
    data = torch.empty((len(values), *where.data_shape), dtype=torch.uint8, device=values[0].device)
    flat.cast([*data.unbind()], whole, [scales.scale], pieces=False)
    scale_inv = scales.scale_inv.view(len(values), *where.scale_shape)
    return make_operand(fmt, Usage.ROWWISE, Plane(data, scale_inv, scales.global_scale_inv)), scales


class GroupedLinear(nn.Module):
    """One `Linear` per expert, applied to all tokens in one call. Tokens are sorted by expert.

    Under FSDP2 call `update_scales(model)` once after `fully_shard`. Then one all-reduce of amaxes serves the whole
    model, instead of one per layer.

    Args:
      num_experts: number of experts.
      in_features: K of each expert.
      out_features: N of each expert.
      recipe: the format of each role, or its name.

    Attributes:
      experts: one `Linear` without bias per expert. Each weight is sharded by FSDP2 or ZeRO, gathered as codes, saved,
        moved and kept as codes under `convert(primary=True)`, like the weight of any `Linear`.

    Raises:
      ValueError: `num_experts` is not positive, or as for `Linear`.

    >>> from qshard.recipes import CurrentScaling
    >>> layer = GroupedLinear(3, 32, 16, recipe=CurrentScaling())
    >>> layer(torch.ones(6, 32), torch.tensor([2, 0, 3])).shape, sorted(layer.state_dict())[0]
    (torch.Size([6, 16]), 'experts.0.weight')
    """

    is_one_layer = True

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        out_features: int,
        *,
        recipe: RecipeLike,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if not hasattr(num_experts, "__index__") or num_experts < 1:
            raise ValueError(
                f"GroupedLinear: num_experts ({quote(num_experts)}) is not positive; pass an integer of at least 1"
            )
        layer = {"bias": False, "recipe": recipe, "device": device, "dtype": dtype}
        self.experts = nn.ModuleList(Linear(in_features, out_features, **layer) for _ in range(num_experts))
        for expert in self.experts:
            weight = cast(ShardedWeight, expert.weight)
            weight.scale_state.passes = Passes.of(self)  # All experts share one refresh of scales.

    @classmethod
    def of(cls, layers: Iterable[nn.Module]) -> GroupedLinear:
        """Build the layer from converted `Linear`s of one recipe and shape, without biases; else ValueError."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self.experts = nn.ModuleList(layers)
        alike = {(layer.recipe, tuple(layer.weight.shape)) for layer in self.experts if isinstance(layer, Linear)}
        plain = all(isinstance(layer, Linear) and layer.bias is None for layer in self.experts)
        if not plain or len(alike) != 1:
            raise ValueError(
                f"GroupedLinear.of: layers ({quote([*self.experts])}) are not converted Linear layers without bias, of "
                "one recipe and shape; call convert on them first"
            )
        return self

    def forward(self, input: Tensor, group_sizes: Tensor) -> Tensor:
        """Apply expert e to the rows of its group, as `grouped_linear` does. `input` is sorted by expert."""
        layers = cast(list[Linear], [*self.experts])
        called = [layer.call_operands(input) for layer in layers]
        first = called[0]
        seeds = None if first.seed is None else torch.stack([one.seed for one in called if one.seed is not None])
        delayed = None if first.delayed is None else [one.delayed for one in called]
        weights = [one.weight for one in called]
        how: dict[str, Any] = {"seeds": seeds, "delayed": delayed, "dtype": first.dtype}
        y: Tensor = grouped_linear(first.input, weights, group_sizes, layers[0].recipe, **how)
        return y

    def extra_repr(self) -> str:
        return f"num_experts={len(self.experts)}"
