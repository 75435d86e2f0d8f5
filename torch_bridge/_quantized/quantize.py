"""`quantize`: converts a tensor to a `QuantizedTensor`."""

from __future__ import annotations

import functools

import torch.distributed as dist
from torch import Tensor

from qshard._core.operands import OperandSpec
from qshard._core.quantize_steps import Philox
from qshard._core.validation import FormatLike, as_format, as_usage
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._ops.uint64 import as_uint64
from qshard.torch_bridge._quantized.plane_programs import quantize_operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_contiguous, check_group, check_tensor


def quantize(
    x: Tensor,
    fmt: FormatLike,
    *,
    usage: Usage = Usage.ROWWISE,
    group: dist.ProcessGroup | None = None,
    seed: int | Tensor | None = None,
    offset: int | Tensor = 0,
    row_step: int | None = None,
) -> QuantizedTensor:
    """Quantize `x` to `fmt`.

    `x ~= code * scale_inv`, with `code = encode(fl(x * scale))`. Each block, or the tensor, has one scale, which maps
    its largest element to the largest code. NUMERICS.md has the formula of every format.

    Args:
      x: float32, bfloat16 or float16, contiguous, `[..., K]`; leading axes count as rows.
      fmt: a format of `qshard.formats`, also with other options, or its name, such as "MXFP8_E4M3".
      usage: the planes to compute: `ROWWISE`, `COLUMNWISE` or `BOTH`.
      group: `x` is this rank's rows of a tensor that is sharded by rows over these ranks. A per-tensor scale is then
        computed from the whole tensor, so the call is collective. Scales of rows and blocks depend on `x` alone, so
        each rank must have whole blocks. A rank that does not raises alone.
      seed: for stochastic rounding, an int or a uint64 as int32 or uint32 `[2]` on the device of `x`, low word first.
      offset: index of the first element of `x` in the whole tensor, an int or a tensor like `seed`. It is the Philox
        offset, so each element gets the same random bits on every sharding.
      row_step: number of columns of the whole tensor, if `x` has fewer.

    Returns:
      A `QuantizedTensor` with the shape and dtype of `x`. `layout.plane` gives the shapes of its planes.

    Raises:
      ValueError: `fmt` does not fit the shape of `x`, `x` is strided, or stochastic rounding has no seed.
      TypeError: `x` is not a plain tensor of a supported dtype, or another argument has the wrong type.

    With `group`, gathering the codes of all ranks gives the codes of the whole tensor, bit for bit. The result is not
    differentiable and does not follow later changes of `x`. For gradients use `Linear`.

    >>> import torch
    >>> from qshard.formats import FP8_E4M3, MXFP8_E4M3
    >>> q = quantize(torch.tensor([[1.0, -448.0], [0.0, 3.0]]), FP8_E4M3)
    >>> q.rowwise.data.view(torch.uint8), q.rowwise.scale_inv
    (tensor([[ 56, 254],
            [  0,  68]], dtype=torch.uint8), tensor(1.))
    >>> quantize(torch.ones(2, 64), MXFP8_E4M3).rowwise.scale_inv.float()
    tensor([[0.0039, 0.0039],
            [0.0039, 0.0039]])

    Sources: arXiv:2209.05433 (per-tensor FP8); arXiv:2412.19437 (blocks of 128); OCP Microscaling Formats v1.0 and
    arXiv:2506.08027 (MXFP8); arXiv:2509.25149 (NVFP4).
    """
    fmt, usage = as_format(fmt, "quantize"), as_usage(usage, "quantize")
    philox = reduce_max = None
    if group is not None:
        check_group("quantize", group)
        if not fmt.row_scaled:  # The scale of a row depends on that row only, which is local.
            reduce_max = functools.partial(max_over_ranks, group=group)
    if fmt.stochastic and seed is not None:
        _check(x, fmt, usage)
        philox = Philox(
            as_uint64("quantize", "seed", seed, x.device), as_uint64("quantize", "offset", offset, x.device), row_step
        )
    check = functools.partial(_check, x, fmt, usage)
    planes, _ = quantize_operand(x, OperandSpec(fmt, usage), philox=philox, reduce_max=reduce_max, check=check)
    rowwise, columnwise = planes.get(Usage.ROWWISE), planes.get(Usage.COLUMNWISE)
    return QuantizedTensor(fmt, tuple(x.shape), x.dtype, rowwise=rowwise, columnwise=columnwise)


def _check(x: Tensor, fmt: Format, usage: Usage) -> None:
    check_tensor("quantize", "x", x, sharded="pass x.to_local(), with group= the ranks that its amax spans")
    for one in usage.planes:
        plane(fmt, tuple(x.shape), one)
    check_contiguous("quantize", "x", x)
