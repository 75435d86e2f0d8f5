"""Quantized operands of `linear`: planes of x, the weight and the gradient of y, in the format of each role."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.operands import OperandSpec, check_weight_format, takes_frozen
from qshard._core.quantize_steps import Philox, plane_rows
from qshard._core.validation import quote
from qshard.formats import Format, Usage
from qshard.recipes import Recipe, Role
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.programs import Memo
from qshard.torch_bridge._ops.uint64 import constant_uint64, xor_uint64
from qshard.torch_bridge._quantized.gemm import Operand, Values
from qshard.torch_bridge._quantized.plane_programs import quantize_operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor, format_of
from qshard.torch_bridge._quantized.validation import check_tensor

# Dynamo of torch 2.11 cannot iterate over an enum on Python 3.12.
ROLES = tuple(Role)
OPERANDS = {Role.WEIGHT: "weight", Role.ACTIVATION: "x", Role.GRADIENT: "the gradient of y"}
"""Names of the operands in error messages."""


def matrix_of(x: Tensor, dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """Flatten `[*lead, K]` to a contiguous matrix `[M, K]` in `dtype`."""
    if x.ndim == 2 and x.dtype == dtype and columns in (None, x.shape[1]) and x.is_contiguous():
        return x.detach() if x.requires_grad else x
    columns = x.shape[-1] if columns is None else columns
    rows = x.shape[:-1].numel() if columns == x.shape[-1] else x.numel() // columns  # Also for a shard without columns.
    return x.detach().to(dtype).reshape(rows, columns).contiguous()


def values_of(weight: Tensor) -> Tensor:
    return weight.shard if isinstance(weight, ShardedWeight) else weight.detach()


def planes_of_weight(weight: QuantizedTensor, columnwise: bool, recipe: Recipe | None = None) -> dict[Usage, Operand]:
    """Return the planes of a quantized weight.

    Raise if the rowwise plane, or a required `columnwise` one, is missing. A frozen weight with 1-D blocks has none.
    """
    fmt, parts, others = weight.format, weight.parts(Usage.ROWWISE), weight.parts(Usage.COLUMNWISE)
    if parts is None:
        raise ValueError("linear: weight (columnwise) has no rowwise plane; quantize it with usage=Usage.BOTH")
    there = {Usage.ROWWISE: Operand(fmt, parts)}
    if others is not None:
        there[Usage.COLUMNWISE] = Operand(fmt, others, Usage.COLUMNWISE)
    elif columnwise and not fmt.shares_codes and (recipe is None or not takes_frozen(fmt, recipe)):
        raise ValueError(
            f"linear: weight ({fmt}, rowwise) has no columnwise plane, which cannot be derived from the rowwise one; "
            "quantize it with usage=Usage.BOTH"
        )
    return there


def operand_spec(recipe: Recipe, role: Role, usage: Usage, rows: int = 0) -> OperandSpec:
    return OperandSpec.of(recipe, role, usage, rows, name=OPERANDS[role])


class LayerQuantizer(NamedTuple):
    """Quantizes the operands of one call of a layer, or with no `recipe` rounds them to bfloat16.

    `parts` has the sharding of each operand under tensor parallelism. `scales` are delayed scales in the order of
    `ROLES`.
    """

    recipe: Recipe | None
    seed: Tensor | None = None
    parts: Mapping[Role, ShardSpec] = MappingProxyType({})
    scales: Sequence[Tensor] = ()

    def quantize(
        self, x: Tensor, role: Role, usage: Usage, amax: Tensor | None = None, *, whole: Tensor | None = None
    ) -> tuple[dict[Usage, Any], Tensor | None]:
        """Quantize a matrix `[M, K]` to an `Operand` for each usage. Padding rows are removed from the rowwise plane.

        Without a recipe, the operands are `Values`.
        `role` selects the format, the delayed scale and the Philox key. `amax` is the amax of x, if it is known, and
        `whole` the amax of the whole tensor, if x is a shard. Also returns the amax of x under delayed scaling.
        """
        if self.recipe is None:
            matrix = x.to(torch.bfloat16)
            return {one: Values(matrix, one) for one in usage.planes}, None
        rows, part = x.shape[0], self.parts.get(role)
        spec = operand_spec(self.recipe, role, usage, rows)
        if spec.added_rows:
            x = torch.nn.functional.pad(x, (0, 0, 0, spec.added_rows))
        scale = self.scales[ROLES.index(role)] if self.scales else None
        philox, reduce_max = philox_of(spec, self.seed, x.device), None
        if part is not None:
            philox = None if philox is None else part.philox(philox.seed)
            by_row = spec.format.row_scaled
            if whole is None and part.axes(by_row=by_row):
                reduce_max = functools.partial(part.merge_amax, by_row=by_row)
        global_amaxes = () if whole is None else (whole,)
        planes, observed = quantize_operand(
            x, spec, scale=scale, philox=philox, amax=amax, global_amaxes=global_amaxes, reduce_max=reduce_max
        )
        if spec.added_rows and Usage.ROWWISE in planes:
            planes[Usage.ROWWISE] = plane_rows(planes[Usage.ROWWISE], spec.format, Usage.ROWWISE, 0, rows)
        return {one: Operand(spec.format, plane, one) for one, plane in planes.items()}, observed


def philox_of(spec: OperandSpec, seed: Tensor | None, device: torch.device) -> Philox | None:
    """Return the Philox key and offset of a matrix, from the seed of its layer; None without stochastic rounding."""
    seed = spec.seed_of(seed, xor_uint64)
    return None if seed is None else Philox(seed, constant_uint64(0, device))


def check_operand(op: str, weight: Tensor, recipe: Recipe, *, frozen: bool = False) -> None:
    """Raise unless `weight` is a gathered tensor, or codes in the recipe's weight format, if `frozen` also in 1-D.

    Callers make values contiguous: transposed, expanded and computed weights are not.
    """
    if isinstance(weight, QuantizedTensor):
        fmt = format_of(weight)
        if not recipe.has_one_weight:
            check_weight_format(op, "weight", fmt, recipe, frozen=frozen)
        elif not is_compiling() and fmt is not recipe.weight:  # Equal formats need not be identical.
            _check_format(op, fmt, recipe, frozen)
    else:
        check_tensor(op, "weight", weight, sharded=_NOT_GATHERED)


@Memo
def _check_format(op: str, fmt: Format, recipe: Recipe, frozen: bool) -> None:
    """Check a format once: naming and comparing two formats takes longer than a small product."""
    check_weight_format(op, "weight", fmt, recipe, frozen=frozen)


def check_gathered(weight: Tensor, op: str = "linear") -> None:
    if isinstance(weight, ShardedWeight) and weight.scale_state.primary is not None:
        raise ValueError(
            f"{op}: {weight.scale_state.name} (primary) is not gathered; call fully_shard(model) after "
            "convert(primary=True), even on one rank"
        )


def check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None, is_kn: bool = False) -> None:
    layout = "[K, N]" if is_kn else "[N, K]"
    if weight.ndim != 2:
        raise ValueError(f"linear: weight {tuple(weight.shape)} does not have two axes; pass weight as {layout}")
    if x.ndim < 1 or x.shape[-1] != weight.shape[0 if is_kn else 1]:
        raise ValueError(
            f"linear: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; pass weight as {layout} and x as "
            "[*lead, K]"
        )
    if bias is not None:
        if not isinstance(bias, Tensor):
            raise TypeError(f"linear: bias ({quote(bias)}) is not a torch.Tensor or None; pass a tensor of [N]")
        if isinstance(weight, DTensor) and not isinstance(bias, DTensor):
            raise TypeError("linear: bias is not a DTensor, but weight is; pass both as DTensors, or neither")
        if tuple(bias.shape) != (weight.shape[1 if is_kn else 0],):
            raise ValueError(
                f"linear: bias {tuple(bias.shape)} does not fit weight {tuple(weight.shape)}; pass bias as [N]"
            )
    if weight.device != x.device:
        raise ValueError(f"linear: weight (on {weight.device}) is not on the device of x, {x.device}; move it there")


_NOT_GATHERED = (
    "call the module that fully_shard wraps, which gathers it; under tensor parallelism, pass x as a DTensor of the "
    "same mesh"
)
