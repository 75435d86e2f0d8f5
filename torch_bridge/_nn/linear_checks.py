"""Checks of the operands of `linear`."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.recipe_checks import check_weight_format
from qshard._core.validation import quote
from qshard.recipes import Recipe
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_contiguous, check_tensor


def check_operand(op: str, weight: Tensor, recipe: Recipe, *, frozen: bool = False) -> None:
    """Raise unless `weight` is a gathered tensor, or codes in the recipe's weight format, if `frozen` also in 1-D."""
    if isinstance(weight, QuantizedTensor):
        if not recipe.has_one_weight or (weight.format is not recipe.weight and not is_compiling()):
            check_weight_format(op, "weight", weight.format, recipe, frozen=frozen)
    else:
        check_tensor(op, "weight", weight, sharded=_NOT_GATHERED)
        check_contiguous(op, "weight", weight)


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
