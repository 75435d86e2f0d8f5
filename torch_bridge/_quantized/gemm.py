"""The one matrix product that a linear layer is made of, three times: `a @ b.T` of two planes.

On NVIDIA GPUs it runs on tensor cores as it is, by an op of qshard over cuBLASLt, where the hardware multiplies codes
of the two formats (`qshard.gemm_dispatch`): per-tensor FP8 from compute capability 8.9 on, and on Hopper FP8 in
blocks of 1x128, one of which may be of 128x128. In all other cases, so always on the CPU, the operands are dequantized
and multiplied: in float32 for per-tensor formats and on the CPU, by PyTorch; in bfloat16 on GPUs if blocks are
involved, by an op again. All sum in float32, in an order of their own: results agree to rounding, not in bits.

What bfloat16 costs: nothing where scales are powers of two (MXFP8, and FP8 blocks by default), as it holds every code
times such a scale exactly; one rounding by 2^-8 of itself for each element of NVFP4, whose own steps are 2^-2.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from qshard import gemm_dispatch
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import Gpu, Kind, Sizes, Way
from qshard.layout import multiplies_codes
from qshard.torch_bridge._ops.bind import into, ops
from qshard.torch_bridge._ops.eager import is_compiling
from qshard.torch_bridge._ops.programs import Memo
from qshard.torch_bridge._quantized.plane_programs import dequantize, multiply

PLATFORM = "cuda"
"""Where ops make products. Tests have the CPU do it."""

LARGE = 2**24
"""Elements of the largest operand from which on kernels take longer than the host: on an H200 a GEMM of 4096 x 4096 x
4096 takes 0.2 ms, and the calls of a layer half of that."""


class Operand(NamedTuple):
    """A plane of a matrix `[rows, K]` for `ROWWISE`, or `[K, rows]` for `COLUMNWISE`, K being contracted."""

    format: Format
    parts: Plane
    usage: Usage = Usage.ROWWISE

    @property
    def rows(self) -> int:
        return _sizes(self.format, self.usage, self.parts.data.shape)[0]

    @property
    def in_order(self) -> bool:
        """Whether it is stored as `[rows, K]`."""
        return gemm_dispatch.contracts_last(self.format, self.usage)

    def stored_values(self, dtype: torch.dtype) -> Tensor:
        """As they are stored, rounded to `dtype`."""
        return dequantize(self.parts, self.format, self.usage, dtype)

    def values(self, dtype: torch.dtype) -> Tensor:
        """`[rows, K]`, rounded to `dtype`."""
        return self.stored_values(dtype) if self.in_order else self.stored_values(dtype).t()


def matmul(a: Operand, b: Operand, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """`a @ b.T`, contracted over the axis that blocks run along: `[M, N]`, in float32, bfloat16 or float16.

    `fast` lets tensor cores keep fewer bits while they sum, as is usual in the forward pass.
    """
    device, way = a.parts.data.device, None
    if device.type == PLATFORM:
        sides = a.format, a.usage, a.parts.data.shape, b.format, b.usage, b.parts.data.shape
        way, at_once = (_way_of_shapes if is_compiling() else _ways)(*sides, device, dtype)
        if way is not None and at_once:
            return multiply(a.parts, b.parts, dtype, fast, way)
    exact = device.type != "cuda" or multiplies_codes(a.format, b.format)
    # Values take several times the bytes of codes. Who passes an operand that is of no more use lets its codes go here.
    kind = way.values if way is not None else torch.float32 if exact else torch.bfloat16
    in_order = a.in_order, b.in_order
    x = a.stored_values(kind)
    del a
    y = b.stored_values(kind)
    del b
    if way is not None:
        made: Tensor = gemm_dispatch.multiply_values(
            ops, x, in_order[0], y, in_order[1], dtype=dtype, workspace=way.workspace
        )
        return made
    x, y = x if in_order[0] else x.t(), y.t() if in_order[1] else y
    # Autocast would round the operands once more.
    with torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext():
        if not exact and dtype == torch.float32 and x.numel() and y.numel():
            return torch.mm(x, y, out_dtype=dtype)
        product = torch.mm(x, y)
    del x, y
    return product.to(dtype)


def matmul_into(a: Operand, b: Operand, out: Tensor, *, fast: bool = False) -> None:
    """`matmul`, into contiguous memory that is there."""
    device = out.device
    if device.type == PLATFORM:
        sides = a.format, a.usage, a.parts.data.shape, b.format, b.usage, b.parts.data.shape
        way, _ = _ways(*sides, device, out.dtype)
        if way is not None and way.values is None:
            workspace = torch.empty(way.workspace, dtype=torch.uint8, device=device)
            way.product(into(out, workspace), a.parts, b.parts, dtype=out.dtype, fast=fast)
            return
    out.copy_(matmul(a, b, out.dtype, fast=fast))


def way_of(
    a: Format, a_usage: Usage, b: Format, b_usage: Usage, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Way | None:
    """How an op makes the product of two planes in `dtype`; None: PyTorch does, of values."""
    if device.type != PLATFORM:
        return None
    planes = (a, a_usage), (b, b_usage)
    kind = gemm_dispatch.kind_of(a, b)
    in_order = gemm_dispatch.contracts_last(*planes[0]) and gemm_dispatch.contracts_last(*planes[1])
    if kind is not None and in_order and gemm_dispatch.fits(kind, sizes) and _runs_on(kind, device.index):
        return Way(*planes, gemm_dispatch.workspace_size(a, b, sizes))
    # cuBLASLt gives no float16 of bfloat16 values, and PyTorch says how float32 ones are multiplied.
    if multiplies_codes(a, b) or dtype == torch.float16 or not _runs_on("values", device.index):
        return None
    return Way(*planes, gemm_dispatch.LIBRARY_BYTES, torch.bfloat16)


def _way_of_shapes(
    a: Format,
    a_usage: Usage,
    a_shape: tuple[int, int],
    b: Format,
    b_usage: Usage,
    b_shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[Way | None, bool]:
    """`way_of` planes whose codes have these shapes, and whether to dequantize and multiply in one call."""
    (m, k), (n, _) = _sizes(a, a_usage, a_shape), _sizes(b, b_usage, b_shape)
    way = way_of(a, a_usage, b, b_usage, (m, n, k), device, dtype)
    if way is None or way.values is None or is_compiling():  # Whose graph is the same either way.
        return way, True
    return way, max(m * k, n * k, m * n) <= LARGE


_ways = Memo(_way_of_shapes)


def _sizes(fmt: Format, usage: Usage, shape: tuple[int, int]) -> tuple[int, int]:
    """Rows and K of a plane whose codes have a shape."""
    first, last = shape
    last *= fmt.element.codes_per_byte
    return (first, last) if gemm_dispatch.contracts_last(fmt, usage) else (last, first)


@torch.compiler.assume_constant_result
def _runs_on(kind: Kind, device: int) -> bool:
    return gemm_dispatch.runs_on(kind, _gpu(device))


@functools.cache
def _gpu(device: int) -> Gpu:
    return Gpu(torch.cuda.get_device_capability(device), gemm_dispatch.library_version())
