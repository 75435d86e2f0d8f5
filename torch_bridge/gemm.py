"""The one matrix product that a linear layer is made of, three times: `a @ b.T` of two planes.

On NVIDIA GPUs from compute capability 8.9 on, per-tensor FP8 runs on the FP8 tensor cores (`torch._scaled_mm`), which
need both dimensions of both matrices to be multiples of 16, and not two E5M2 operands. On Hopper, with PyTorch built
for CUDA 12.9 or later, so do E4M3 operands in blocks of 1x128, one of which may be of 128x128, if K is a multiple of
512: for others cuBLASLt wants padded scales, which PyTorch did not always check. In all other cases, so always on the
CPU, the operands are dequantized and multiplied: in float32 for per-tensor formats and on the CPU, in bfloat16 on GPUs
if blocks are involved. All sum in float32, in an order of their own: results agree to rounding, not in bits.

What bfloat16 costs: nothing where scales are powers of two (MXFP8, and FP8 blocks by default), as it holds every code
times such a scale exactly; one rounding of 2^-9 for each element of NVFP4, whose own steps are 2^-2.

Sources: cuBLAS documentation, "8-bit Floating Point Data Types Usage" (the operands that it takes) and "Scaling Factors
Layouts"; pytorch/pytorch#158037 and #166752 (blocks of 128).
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from qshard.formats import E4M3, E5M2, Format, Usage
from qshard.layout import is_transposed, multiplies_codes
from qshard.pipeline import Plane
from qshard.torch_bridge.planes import dequantized


class Operand(NamedTuple):
    """A plane of a matrix `[rows, K]` for `ROWWISE`, or `[K, rows]` for `COLUMNWISE`, K being contracted."""

    format: Format
    parts: Plane
    usage: Usage = Usage.ROWWISE

    def values(self, dtype: torch.dtype) -> Tensor:
        """`[rows, K]`, rounded to `dtype`."""
        values = dequantized(self.parts, self.format, self.usage, dtype)
        in_order = self.usage is Usage.ROWWISE or is_transposed(self.format, self.usage)
        return values if in_order else values.t()

    def codes(self) -> Tensor:
        """`[rows, K]`, for planes that are stored so."""
        codes: Tensor = self.parts.data.view(getattr(torch, self.format.data_dtype))
        return codes


def matmul(a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`a @ b.T`, contracted over the axis that blocks run along: `[M, N]`, in float32, bfloat16 or float16.

    `fast` lets tensor cores keep fewer bits while they sum, as is usual in the forward pass.
    """
    if _runs_on_tensor_cores(a, b):
        return torch._scaled_mm(
            a.codes(),
            b.codes().t(),
            scale_a=a.parts.scale_inv,
            scale_b=b.parts.scale_inv,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    if _blocks_run_on_tensor_cores(a, b):
        scale_a, scale_b = _scale_of_blocks(a), _scale_of_blocks(b)
        return torch._scaled_mm(a.codes(), b.codes().t(), scale_a=scale_a, scale_b=scale_b.t(), out_dtype=dtype)
    device = a.parts.data.device.type
    exact = device != "cuda" or multiplies_codes(a.format, b.format)
    # Values take several times the bytes of codes. Who passes an operand that is of no more use lets its codes go here.
    x = a.values(torch.float32 if exact else torch.bfloat16)
    del a
    y = b.values(x.dtype).t()
    del b
    autocasts = torch.is_autocast_enabled(device)
    with (
        torch.autocast(device, enabled=False) if autocasts else nullcontext()
    ):  # It would round the operands once more.
        if not exact and dtype == torch.float32 and x.numel() and y.numel():
            return torch.mm(x, y, out_dtype=dtype)
        product = torch.mm(x, y)
    del x, y
    return product.to(dtype)


def _runs_on_tensor_cores(a: Operand, b: Operand) -> bool:
    data = a.parts.data
    if data.device.type != "cuda" or not multiplies_codes(a.format, b.format):
        return False
    if a.format.element == E5M2 and b.format.element == E5M2:
        return False
    sizes = (*data.shape, *b.parts.data.shape)
    return all(size > 0 and size % 16 == 0 for size in sizes) and _has_fp8(data.device.index)


def _blocks_run_on_tensor_cores(a: Operand, b: Operand) -> bool:
    # What cuBLASLt takes is said in blocks and dtypes.
    if a.parts.data.device.type != "cuda" or {a.format.block, b.format.block} not in _BLOCKS_OF_128:
        return False
    if not a.format.element == b.format.element == E4M3 or a.format.stored_scale_dtype != "float32":
        return False
    (m, k), (n, _) = a.parts.data.shape, b.parts.data.shape
    if 0 in (m, n, k) or k % 512 or m % 16 or n % 16 or (_IS_UNKNOWN_TO_DYNAMO and torch.compiler.is_compiling()):
        return False
    rows = (a.format.block or (1, 1))[0], (b.format.block or (1, 1))[0]  # Both have blocks by now: for mypy.
    fits: bool = m % rows[0] == n % rows[1] == 0
    return fits and _has_blocks_of_128(a.parts.data.device.index)


_IS_UNKNOWN_TO_DYNAMO = torch.__version__ < "2.13"  # Compares versions, not strings.
_BLOCKS_OF_128 = ({(1, 128)}, {(1, 128), (128, 128)})


def _scale_of_blocks(operand: Operand) -> Tensor:
    """`[rows, K / 128]` with rows next to each other in memory, or `[rows / 128, K / 128]` as it is."""
    scale_inv: Tensor = operand.parts.scale_inv
    # cuBLASLt wants the scales of vectors by columns, those of squares by rows.
    return scale_inv if operand.format.transposes else scale_inv.t().contiguous().t()


@torch.compiler.assume_constant_result
def _has_fp8(device: int) -> bool:
    return _capability(device) >= (8, 9)


@torch.compiler.assume_constant_result
def _has_blocks_of_128(device: int) -> bool:
    version = tuple(int(number) for number in (torch.version.cuda or "0").split(".")[:2])
    return _capability(device) == (9, 0) and version >= (12, 9)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
