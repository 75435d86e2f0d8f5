"""The one matrix product that a linear layer is made of, three times: `a @ b.T` of two planes.

On NVIDIA GPUs it runs on tensor cores as it is, by an op of qshard over cuBLASLt, where the hardware multiplies codes
of the two formats (`qshard.products`): per-tensor FP8 from compute capability 8.9 on, and on Hopper FP8 in
blocks of 1x128, one of which may be of 128x128. In all other cases, so always on the CPU, the operands are dequantized
and multiplied: in float32 for per-tensor formats and on the CPU, in bfloat16 on GPUs if blocks are involved. All sum in
float32, in an order of their own: results agree to rounding, not in bits.

What bfloat16 costs: nothing where scales are powers of two (MXFP8, and FP8 blocks by default), as it holds every code
times such a scale exactly; one rounding of 2^-9 for each element of NVFP4, whose own steps are 2^-2.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from qshard import products
from qshard.formats import Format, Usage
from qshard.layout import is_transposed, multiplies_codes
from qshard.pipeline import Plane
from qshard.products import Gpu, Kind, Sizes
from qshard.torch_bridge.planes import dequantized, multiplied


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


def matmul(a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`a @ b.T`, contracted over the axis that blocks run along: `[M, N]`, in float32, bfloat16 or float16.

    `fast` lets tensor cores keep fewer bits while they sum, as is usual in the forward pass.
    """
    (m, k), (n, _), device = a.parts.data.shape, b.parts.data.shape, a.parts.data.device
    sizes = (m, n, k * a.format.element.codes_per_byte)
    workspace = workspace_of((a.format, a.usage), (b.format, b.usage), sizes, device) if device.type == "cuda" else None
    if workspace is not None:
        return multiplied(a.parts, a.format, b.parts, b.format, dtype, fast, workspace)
    exact = device.type != "cuda" or multiplies_codes(a.format, b.format)
    # Values take several times the bytes of codes. Who passes an operand that is of no more use lets its codes go here.
    x = a.values(torch.float32 if exact else torch.bfloat16)
    del a
    y = b.values(x.dtype).t()
    del b
    # Autocast would round the operands once more.
    with torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext():
        if not exact and dtype == torch.float32 and x.numel() and y.numel():
            return torch.mm(x, y, out_dtype=dtype)
        product = torch.mm(x, y)
    del x, y
    return product.to(dtype)


def workspace_of(a: tuple[Format, Usage], b: tuple[Format, Usage], sizes: Sizes, device: torch.device) -> int | None:
    """Bytes that the product of two planes needs, if tensor cores take their codes; None if not."""
    kind = products.kind_of(a[0], b[0]) if device.type == "cuda" else None
    if kind is None or not products.fits(kind, sizes) or not _runs_on(kind, device.index):
        return None
    in_order = products.contracts_last(*a) and products.contracts_last(*b)
    return products.workspace_size(a[0], b[0], sizes) if in_order else None


@torch.compiler.assume_constant_result
def _runs_on(kind: Kind, device: int) -> bool:
    return products.runs_on(kind, _gpu(device))


@functools.cache
def _gpu(device: int) -> Gpu:
    return Gpu(torch.cuda.get_device_capability(device), products.library_version())
