"""The steps from values to codes and back, for each structure of scales: amax, scales, cast, transpose, dequantize.

Everything above this file handles planes and grids of scales without knowing how many elements share one. Which ops
make them depends on the structure of the format (one scale for the tensor; blocks), never on its name. So far: one
scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from qshard.formats import Format
from qshard.torch_bridge import _ops

__all__ = [
    "Scales",
    "as_element",
    "cast",
    "cast_both",
    "dequantize",
    "max_over_ranks",
    "require_supported",
    "scales_of",
]

ops = torch.ops.qshard


class Scales(NamedTuple):
    """`scale` encodes (`x * scale`), `scale_inv` decodes. For one scale a tensor both have no axes."""

    scale: Tensor
    scale_inv: Tensor


def require_supported(op: str, *formats: Format) -> None:
    """Raises NotImplementedError for formats that this front end cannot make yet."""
    for fmt in formats:
        if fmt.block is not None:
            raise NotImplementedError(
                f"{op}: format ({fmt}) is not one that PyTorch can make yet, as its scales are of blocks; "
                "use FP8_E4M3 or FP8_E5M2, which have one scale a tensor"
            )


def as_element(codes: Tensor, fmt: Format) -> Tensor:
    """Codes in their own dtype, the same memory."""
    return codes.view(getattr(torch, fmt.data_dtype))


def amax_into(fmt: Format, x: Tensor, out: Tensor) -> None:
    """Writes the amaxes of what one rank holds of a tensor, as fp32, for `max_over_ranks`. An empty `x` gives zeros."""
    _ops.call_into("amax_tensor", (x,), (out,), {})


def max_over_ranks(amax: Tensor, group: dist.ProcessGroup | None) -> None:
    """Replaces amaxes by their maximum over the ranks of `group`, in place.

    Positive floats order as their bits do, and NaN above all of them, so an integer maximum is exact and keeps NaN,
    which a floating-point collective may drop.
    """
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(amax.view(torch.int32), op=dist.ReduceOp.MAX, group=group)


def scales_of(fmt: Format, amax: Tensor) -> Scales:
    """The scales that amaxes of any shape make, by the formula of the format."""
    return Scales(*ops.scale_from_amax(amax, element=fmt.element.name, eps=_eps(fmt), pow2=fmt.pow2))


def _eps(fmt: Format) -> float:
    return fmt.eps


if torch.__version__ >= "2.13":  # Compares versions, not strings.
    # Under `torch.compile(dynamic=True)` this float becomes a symbol. Dynamo of torch 2.13 fails on one in an
    # autograd.Function, unless it is told that it is a constant; that of 2.11 cannot be told, and does not fail.
    _eps = torch.compiler.assume_constant_result(_eps)


def cast_into(fmt: Format, x: Tensor, scales: Scales, codes: Tensor) -> None:
    """Writes the codes of the rows `x` of a tensor whose scales are `scales`."""
    _ops.call_into("cast_tensor", (x, scales.scale), (codes,), {"element": fmt.element.name})


def cast(fmt: Format, x: Tensor, scales: Scales) -> Tensor:
    """The codes of the rowwise plane, shape of `x`, uint8."""
    codes: Tensor = ops.cast_tensor(x, scales.scale, element=fmt.element.name)
    return codes


def cast_both(fmt: Format, x: Tensor, scales: Scales) -> Sequence[Tensor]:
    """The codes of the rowwise and the columnwise plane of a matrix, uint8, from one read of it."""
    codes: Sequence[Tensor] = ops.cast_transpose(x, scales.scale, element=fmt.element.name, batch=0)
    return codes


def amax_of(fmt: Format, x: Tensor) -> Tensor:
    """The amaxes of a whole tensor, of the shape of its scales."""
    amax: Tensor = ops.amax_tensor(x, lead=0)
    return amax


def dequantize(fmt: Format, codes: Tensor, scale_inv: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of a plane."""
    values: Tensor = ops.dequantize(codes, scale_inv, element=fmt.element.name, dtype=dtype)
    return values
