"""The one matrix product that a linear layer is made of, three times: `a @ b.T` of two planes.

On NVIDIA GPUs from compute capability 8.9 on it runs on the FP8 tensor cores (`torch._scaled_mm`), which need both
dimensions of both matrices to be multiples of 16, and not two E5M2 operands. In all other cases, so always on the
CPU, the operands are dequantized and multiplied in float32. Both sum in float32, in an order of their own: results
agree to rounding, not in bits.

Sources: cuBLAS documentation, "8-bit Floating Point Data Types Usage" (the operands that it takes).
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qshard.formats import E5M2, Format
from qshard.torch_bridge import _pipeline

__all__ = ["Operand", "matmul"]

Operand = tuple[Format, Tensor, Tensor]  # format, codes [rows, K] as uint8, scale_inv


def matmul(a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`a @ b.T`, with the contracted axis the last of both.

    Args:
      a: `[M, K]`.
      b: `[N, K]`.
      dtype: of the result: float32, bfloat16 or float16.
      fast: let tensor cores keep fewer bits while they sum, as is usual in the forward pass. It changes nothing
        elsewhere.

    Returns:
      `[M, N]`.
    """
    (a_format, a_codes, a_scale), (b_format, b_codes, b_scale) = a, b
    if _runs_on_tensor_cores(a, b):
        return torch._scaled_mm(
            _pipeline.as_element(a_codes, a_format),
            _pipeline.as_element(b_codes, b_format).t(),
            scale_a=a_scale,
            scale_b=b_scale,
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    a_values = _pipeline.dequantize(a_format, a_codes, a_scale, torch.float32)
    b_values = _pipeline.dequantize(b_format, b_codes, b_scale, torch.float32)
    with torch.autocast(a_codes.device.type, enabled=False):  # It would round the operands once more.
        return torch.mm(a_values, b_values.t()).to(dtype)


def _runs_on_tensor_cores(a: Operand, b: Operand) -> bool:
    (a_format, a_codes, _), (b_format, b_codes, _) = a, b
    if a_codes.device.type != "cuda" or (a_format.element == E5M2 and b_format.element == E5M2):
        return False
    sizes = (*a_codes.shape, *b_codes.shape)
    return all(size > 0 and size % 16 == 0 for size in sizes) and _has_fp8(a_codes.device.index)


@torch.compiler.assume_constant_result
def _has_fp8(device: int) -> bool:
    return _capability(device) >= (8, 9)


@functools.cache
def _capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
