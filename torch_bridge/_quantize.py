"""`quantize`: a tensor to a `QuantizedTensor`."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard import layout
from qshard.formats import Format, Usage
from qshard.torch_bridge import _pipeline
from qshard.torch_bridge._tensor import QuantizedTensor

__all__ = ["quantize"]


def quantize(
    x: Tensor, fmt: Format, *, usage: Usage = Usage.ROWWISE, group: dist.ProcessGroup | None = None
) -> QuantizedTensor:
    """Casts `x` to `fmt`.

    `x ~= code * scale_inv`, with `code = encode(fl(x * scale))`, `scale = fl(max / amax)` and
    `scale_inv = fl(1 / scale)`, for formats with one scale a tensor.

    Args:
      x: float32, bfloat16 or float16, contiguous, `[..., K]`; leading axes count as rows.
      fmt: `FP8_E4M3`, `FP8_E5M2`, or one of them with other options.
      usage: the planes to make: `ROWWISE`, `COLUMNWISE` (for matrix seen as `[M, K]`, codes `[K, M]`) or `BOTH`.
      group: `x` is what this rank holds of a tensor cut over these ranks: the amax is of all of it. Collective.

    Returns:
      A `QuantizedTensor` of the shape and dtype of `x`.

    Raises:
      ValueError: `x` is strided.
      TypeError: `x` is a DTensor or has another dtype.
      NotImplementedError: PyTorch has no ops for `fmt` yet.

    With `group`, the codes that ranks get are the rows of the codes of the whole: gathered, they are its bits. Not
    differentiable: the result holds the values of `x` as they are now. Gradients pass through `Linear`.

    >>> import torch
    >>> from qshard.formats import FP8_E4M3
    >>> q = quantize(torch.tensor([[1.0, -448.0], [0.0, 3.0]]), FP8_E4M3)
    >>> q.rowwise.data.view(torch.uint8), q.rowwise.scale_inv
    (tensor([[ 56, 254],
            [  0,  68]], dtype=torch.uint8), tensor(1.))

    Sources: arXiv:2209.05433 (per-tensor FP8).
    """
    if isinstance(x, DTensor):
        raise TypeError(
            "quantize: x (DTensor) is not a plain tensor; pass x.to_local(), with group= the ranks that its amax spans"
        )
    _pipeline.require_supported("quantize", fmt)
    shape, x = x.shape, x.detach()
    if fmt.block is not None:  # One scale for the whole tensor fits any shape.
        for one in Usage:
            if usage & one:
                layout.plane(fmt, tuple(shape), one)
    amax = _pipeline.amax_of(fmt, x)
    _pipeline.max_over_ranks(amax, group)
    scales = _pipeline.scales_of(fmt, amax)
    if usage is Usage.ROWWISE:
        codes = _pipeline.cast(fmt, x, scales)
        return QuantizedTensor(fmt, shape, x.dtype, rowwise_data=codes, scale_inv=scales.scale_inv)
    rows, columns = _pipeline.cast_both(fmt, x.view(layout.matrix_shape(tuple(shape))), scales)
    return QuantizedTensor(
        fmt,
        shape,
        x.dtype,
        rowwise_data=rows.view(shape) if usage is Usage.BOTH else None,
        columnwise_data=columns,
        scale_inv=scales.scale_inv,
    )
