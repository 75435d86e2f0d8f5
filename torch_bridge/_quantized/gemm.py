"""GEMM of two planes, `a @ b.T`: each linear layer runs it three times.

On NVIDIA GPUs, tensor cores multiply the codes directly where the hardware supports the two formats
(`qshard.gemm_dispatch`): per-tensor FP8 from compute capability 8.9, and on Hopper FP8 with 1x128 blocks, where one
operand may have 128x128 blocks. The op calls cuBLASLt. In all other cases, and always on the CPU, the operands are
dequantized first. PyTorch multiplies them in float32 for per-tensor formats and on the CPU, which dequantizes a large
weight by panels of rows if few rows are multiplied, as in generation. On GPUs, formats with blocks are multiplied in
bfloat16, by an op again. All sum in float32, each in an order of its own, so results agree up to rounding, not in bits.

Rounding to bfloat16 is exact if scales are powers of two (MXFP8, and FP8 blocks by default), because bfloat16 holds
every code times such a scale. Each element of NVFP4 is rounded once, by a relative 2^-8, while its own steps are 2^-2.
A product without formats (`NVFP4(wgrad="bf16")`) multiplies `Values`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qshard import gemm_dispatch
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import Gpu, Kind, ProductPlan, Sizes
from qshard.layout import block_alignment, multiplies_codes
from qshard.torch_bridge._ops.bind import into, ops
from qshard.torch_bridge._ops.eager import is_compiling, may_skip_dispatcher, without_autocast
from qshard.torch_bridge._ops.programs import Memo
from qshard.torch_bridge._quantized.plane_programs import dequantize, multiply_planes
from qshard.torch_bridge._quantized.target_gpu import Target, target_of

PANEL = 2**18
"""Elements of a panel, rows of a weight that the CPU dequantizes at a time: 1 MiB of float32 stays in the cache."""

PANELS = 2**22, 64
"""Elements of a weight above which, and rows of x up to which, the CPU dequantizes by panels.

With 2 threads and AVX-512 a 4096 x 4096 weight takes 7 to 19 ms so, for 1 to 64 rows, and 24 to 43 ms as a whole, in
fresh memory. A 2048 x 2048 weight takes as long either way, and smaller ones up to 50 % longer.
"""


class Operand(NamedTuple):
    """One plane of a GEMM operand: a matrix `[rows, K]` for `ROWWISE`, `[K, rows]` for `COLUMNWISE`.

    `is_transposed`: the product contracts the other axis, across blocks, so it multiplies dequantized values.
    """

    format: Format
    parts: Plane
    usage: Usage = Usage.ROWWISE
    is_transposed: bool = False

    @property
    def rows(self) -> int:
        return _sizes(self.format, self.usage, self.parts.data.shape)[self.is_transposed]

    @property
    def in_order(self) -> bool:
        return gemm_dispatch.contracts_last(self.format, self.usage) is not self.is_transposed

    def stored_values(self, dtype: torch.dtype) -> Tensor:
        return dequantize(self.parts, self.format, self.usage, dtype)

    def values(self, dtype: torch.dtype) -> Tensor:
        return self.stored_values(dtype) if self.in_order else self.stored_values(dtype).t()


class Values(NamedTuple):
    """An operand of a product without formats: a bfloat16 matrix `[rows, K]` for `ROWWISE`, `[K, rows]` otherwise."""

    matrix: Tensor
    usage: Usage = Usage.ROWWISE

    @property
    def format(self) -> None:
        return None

    @property
    def parts(self) -> tuple[Tensor]:
        return (self.matrix,)


def matmul(a: Operand | Values, b: Operand | Values, dtype: torch.dtype, *, fast: bool = False) -> Tensor:
    """Compute `a @ b.T`, `[M, N]`. `fast` lets FP8 tensor cores accumulate with fewer bits, as in forward passes."""
    if isinstance(a, Values) or isinstance(b, Values):
        x, y = (one.parts[0] if one.usage is Usage.ROWWISE else one.parts[0].t() for one in (a, b))
        return _multiply_bfloat16(x, y.t(), dtype)
    device, (plan, at_once) = a.parts.data.device, _plan(a, b, dtype)
    if plan is not None and at_once:
        return multiply_planes(a.parts, b.parts, dtype, fast, plan)
    exact = device.type != "cuda" or multiplies_codes(a.format, b.format)
    # Values take several times the bytes of codes. If the caller passed its last reference, `del` frees the codes here.
    kind = plan.values if plan is not None else torch.float32 if exact else torch.bfloat16
    in_order = a.in_order, b.in_order
    x = a.stored_values(kind)
    if _goes_by_panels(a, b):
        return _multiply_by_panels(x, b, dtype)
    del a
    y = b.stored_values(kind)
    del b
    if plan is not None:
        result: Tensor = gemm_dispatch.multiply_values(
            ops, x, in_order[0], y, in_order[1], dtype=dtype, workspace=plan.workspace
        )
        return result
    x, y = x if in_order[0] else x.t(), y.t() if in_order[1] else y
    # Autocast would round the operands again.
    with without_autocast(device):
        if not exact and dtype == torch.float32 and x.numel() and y.numel():
            return torch.mm(x, y, out_dtype=dtype)
        product = torch.mm(x, y)
    del x, y
    return product.to(dtype)


def _multiply_bfloat16(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute `a @ b` of bfloat16 matrices, with sums in float32, rounded once to `dtype`."""
    device = a.device
    # Autocast would change the dtype of the result.
    with without_autocast(device):
        if dtype == torch.bfloat16:
            return torch.mm(a, b)
        if device.type == "cuda" and a.numel() and b.numel():
            return torch.mm(a, b, out_dtype=torch.float32).to(dtype)
        return torch.mm(a.float(), b.float()).to(dtype)


def _goes_by_panels(a: Operand, b: Operand) -> bool:
    """Return whether to dequantize `b` by panels: on the CPU, if `b` is large and `a` has few rows (`PANELS`)."""
    data = b.parts.data
    if data.device.type != "cpu" or (a.usage, b.usage) != (Usage.ROWWISE, Usage.ROWWISE) or b.is_transposed:
        return False
    elements, rows = PANELS
    is_large = data.numel() * b.format.element.codes_per_byte > elements
    return is_large and a.rows <= rows and may_skip_dispatcher((a.parts.data, data))


def _multiply_by_panels(x: Tensor, b: Operand, dtype: torch.dtype) -> Tensor:
    """Compute `x @ b.T` in float32. Values of `b` never reach memory: each panel of rows has the same buffer."""
    unit = block_alignment(b.format)
    (m, k), n = x.shape, b.rows
    step = max(unit, PANEL // k // unit * unit)
    values, result = x.new_empty(min(step, n), k), x.new_empty(m, n)
    with torch.no_grad(), without_autocast(x.device):
        for start in range(0, n, step):
            stop = min(start + step, n)
            panel = values[: stop - start]
            parts = quantize_steps.plane_rows(b.parts, b.format, b.usage, start, stop)
            quantize_steps.dequantize(into(panel), parts, b.format, b.usage, panel.dtype)
            torch.mm(x, panel.t(), out=result[:, start:stop])
    return result.to(dtype)


def matmul_into(a: Operand, b: Operand, out: Tensor, *, fast: bool = False) -> None:
    plan, _ = _plan(a, b, out.dtype)
    if plan is not None and plan.values is None:
        workspace = torch.empty(plan.workspace, dtype=torch.uint8, device=out.device)
        plan.multiply(into(out, workspace), a.parts, b.parts, dtype=out.dtype, fast=fast)
    else:
        out.copy_(matmul(a, b, out.dtype, fast=fast))


def _plan(a: Operand, b: Operand, dtype: torch.dtype) -> tuple[ProductPlan | None, bool]:
    """Return the op that multiplies two operands, or None, and whether one call dequantizes and multiplies."""
    target = None if b.is_transposed else target_of(a.parts.data.device)
    if target is None:
        return None, False
    sides = a.format, a.usage, a.parts.data.shape, b.format, b.usage, b.parts.data.shape
    return (_plan_product_of_codes if is_compiling() else _cached_plan)(*sides, target, dtype)


def plan_product(
    a: Format, a_usage: Usage, b: Format, b_usage: Usage, sizes: Sizes, gpu: Gpu, dtype: torch.dtype
) -> ProductPlan | None:
    """Plan the op that multiplies two planes into `dtype`. None if PyTorch multiplies dequantized values."""
    planes = (a, a_usage), (b, b_usage)
    kind = gemm_dispatch.kind_of(a, b)
    in_order = gemm_dispatch.contracts_last(*planes[0]) and gemm_dispatch.contracts_last(*planes[1])
    if kind is not None and in_order and gemm_dispatch.fits(kind, sizes) and gemm_dispatch.runs_on(kind, gpu):
        return ProductPlan(*planes, gemm_dispatch.workspace_size(a, b, sizes))
    # cuBLASLt has no GEMM from bfloat16 to float16. PyTorch's settings decide how float32 values are multiplied.
    if multiplies_codes(a, b) or dtype == torch.float16 or not gemm_dispatch.runs_on("values", gpu):
        return None
    return ProductPlan(*planes, gemm_dispatch.LIBRARY_BYTES, torch.bfloat16)


def _plan_product_of_codes(
    a: Format,
    a_usage: Usage,
    a_shape: tuple[int, int],
    b: Format,
    b_usage: Usage,
    b_shape: tuple[int, int],
    target: Target,
    dtype: torch.dtype,
) -> tuple[ProductPlan | None, bool]:
    """Plan the product of planes with codes of these shapes, and whether to dequantize and multiply in one call."""
    (m, k), (n, _) = _sizes(a, a_usage, a_shape), _sizes(b, b_usage, b_shape)
    plan = plan_product(a, a_usage, b, b_usage, (m, n, k), target.gpu, dtype)
    # The compiled graph is the same either way.
    if plan is None or plan.values is None or is_compiling():
        return plan, True
    return plan, max(m * k, n * k, m * n) <= target.large


_cached_plan = Memo(_plan_product_of_codes)


def _sizes(fmt: Format, usage: Usage, shape: tuple[int, int]) -> tuple[int, int]:
    """Return rows and K of a plane, from the shape of its codes."""
    first, last = shape
    last *= fmt.element.codes_per_byte
    return (first, last) if gemm_dispatch.contracts_last(fmt, usage) else (last, first)


@torch.compiler.assume_constant_result
def grouped_runs_on(kind: Kind, device: torch.device) -> bool:
    """Return whether an op computes grouped products of a kind on a device.

    On a CPU values of MXFP8 and NVFP4 are multiplied, as on GPUs that lack the products of codes.
    """
    if (target := target_of(device)) is not None:
        return gemm_dispatch.grouped_runs_on(kind, target.gpu)
    return device.type == "cpu" and kind not in ("mxfp8", "nvfp4")
