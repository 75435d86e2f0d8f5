"""SwiGLU and RMSNorm, computed by kernels that also return the amax of each result.

A per-tensor scale needs the amax of the whole tensor. Computing it in the kernel that writes the tensor saves a later
read: of h or y in the forward pass, and of both SwiGLU gradients in the backward pass. The amax is cached on the result
(`module_calls.py`), and `Linear` uses it if it receives that same tensor object.

Autograd saves only gate and up for `swiglu`. `F.silu(gate) * up` also saves `silu(gate)`. The layer that consumes h
recomputes it from gate and up (`saved_input.py`).

The kernels do not write codes directly. A per-tensor scale is known only after a full pass, so h would be computed
twice from two operands: four reads and one write, as many as writing h, reading it and writing codes.

Under a compiler both functions are PyTorch's expressions, which the compiler fuses with neighboring ops.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.layers import SUM_ROWS, check_norm, check_pair
from qshard._core.operands import OperandSpec
from qshard._core.validation import FormatLike, as_format, as_usage
from qshard.formats import Usage
from qshard.torch_bridge._nn.module_calls import cache_amax, pass_row_amaxes
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name, ops
from qshard.torch_bridge._ops.eager import are_plain, is_compiling
from qshard.torch_bridge._quantized.plane_programs import quantize_operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_tensor


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up` in fp32, rounded once to the dtype of the inputs. Differentiable.

    Args:
      gate: float32, bfloat16 or float16, of any shape.
      up: a tensor with the shape and dtype of `gate`.

    Returns:
      A tensor of the same shape and dtype. For DTensors and under `torch.compile` it is PyTorch's expression, which may
      also round `silu(gate)`.

    Raises:
      TypeError: an argument is not a tensor of such a dtype.
      ValueError: the inputs differ in shape or dtype.

    Local shards need no communication, whatever axes are sharded.

    >>> gate = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    >>> h = swiglu(gate, torch.ones(3))
    >>> h.detach(), torch.autograd.grad(h.sum(), gate)[0]
    (tensor([-0.2689,  0.0000,  1.7616]), tensor([0.0723, 0.5000, 1.0908]))

    Source: arXiv:2002.05202.
    """
    if isinstance(gate, DTensor) and isinstance(up, DTensor):
        return F.silu(gate) * up
    h, amax = _swiglu("swiglu", gate, up)
    if amax is not None:
        cache_amax(h, amax)
    return h


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute `x / sqrt(mean(x^2) + eps) * weight` over the last axis, in fp32 and rounded once. Differentiable.

    Args:
      x: float32, bfloat16 or float16, `[*lead, K]`.
      weight: `[K]`, any of these dtypes.
      eps: 0 or more.

    Returns:
      `[*lead, K]` in the dtype of `x`. For DTensors and under `torch.compile` it is PyTorch's `rms_norm`, which sums in
      another order.

    Raises:
      TypeError: an argument is not a tensor of such a dtype.
      ValueError: shapes do not match, or `eps` is negative.

    If rows are sharded over ranks, the gradient of weight is the sum over the local rows only.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    tensor([[0.8485, 2.2627]])

    Source: arXiv:1910.07467.
    """
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    y, amax = _rms_norm("rms_norm", x, weight, eps)
    if amax is not None:
        cache_amax(y, amax)
    return y


def swiglu_quantize(gate: Tensor, up: Tensor, fmt: FormatLike, *, usage: Usage = Usage.ROWWISE) -> QuantizedTensor:
    """Compute `quantize(swiglu(gate, up), fmt)` without a second read of the activations for their amax.

    Per-tensor formats and NVFP4 take the amax from the pass that computes `h = swiglu(gate, up)`; other formats run the
    two calls. Not differentiable: for training, pass `swiglu(gate, up)` to `Linear`.

    Args:
      gate: as for `swiglu`, but not a DTensor.
      up: a tensor with the shape and dtype of `gate`.
      fmt: the format of the result, or its name. Formats with stochastic rounding need a seed and are not accepted:
        call `swiglu` and `quantize` for those.
      usage: the planes to compute.

    Returns:
      A `QuantizedTensor` with the bits of the two calls.

    Raises:
      TypeError: an argument is not a tensor of such a dtype, or has the wrong type.
      ValueError: the inputs differ in shape or dtype, or `fmt` does not fit them or needs a seed.

    A local shard is quantized as a tensor of its own.

    >>> swiglu_quantize(torch.ones(2, 4), torch.ones(2, 4), "FP8_E4M3").dequantize()[0, 0]
    tensor(0.7311)

    Source: arXiv:2002.05202.
    """
    op = "swiglu_quantize"
    with torch.no_grad():
        return _quantize(op, *_swiglu(op, gate, up), fmt, usage)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, fmt: FormatLike, *, usage: Usage = Usage.ROWWISE
) -> QuantizedTensor:
    """Compute `quantize(rms_norm(x, weight, eps), fmt)` without a second read of the result for its amax.

    Per-tensor formats and NVFP4 take the amax from the pass that computes `y = rms_norm(x, weight, eps)`; other formats
    run the two calls. Not differentiable: for training, pass `rms_norm(x, weight, eps)` to `Linear`.

    Args:
      x: as for `rms_norm`, but not a DTensor.
      weight: as for `rms_norm`, but not a DTensor.
      eps: 0 or more.
      fmt: the format of the result, or its name; as for `swiglu_quantize`.
      usage: the planes to compute.

    Returns:
      A `QuantizedTensor` with the bits of the two calls.

    Raises:
      TypeError: an argument is not a tensor of such a dtype, or has the wrong type.
      ValueError: shapes do not match, `eps` is negative, or `fmt` does not fit x or needs a seed.

    A local shard is quantized as a tensor of its own.

    >>> rms_norm_quantize(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0, "FP8_E4M3").rowwise.data.shape
    torch.Size([1, 2])

    Source: arXiv:1910.07467.
    """
    op = "rms_norm_quantize"
    with torch.no_grad():
        return _quantize(op, *_rms_norm(op, x, weight, eps), fmt, usage)


def _swiglu(op: str, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
    for name, x in (("gate", gate), ("up", up)):
        check_tensor(op, name, x)
    check_pair(op, gate.shape, dtype_name(gate.dtype), up.shape, dtype_name(up.dtype))
    if not are_plain(gate, up):
        return F.silu(gate) * up, None
    amaxes: list[Tensor] = []
    h: Tensor = apply_node(_SwiGlu, gate, up, amaxes)
    return h, amaxes[0]


def _rms_norm(op: str, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    for name, tensor in (("x", x), ("weight", weight)):
        check_tensor(op, name, tensor)
    check_norm(op, x.shape, weight.shape, eps)
    if not are_plain(x, weight):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps), None
    amaxes: list[Tensor] = []
    y: Tensor = apply_node(_RmsNorm, x, weight, eps, amaxes)
    return y, amaxes[0]


def _quantize(op: str, x: Tensor, amax: Tensor | None, fmt: FormatLike, usage: Usage) -> QuantizedTensor:
    fmt, usage = as_format(fmt, op), as_usage(usage, op)
    spec = OperandSpec(fmt, usage, op=op)
    spec.layouts(tuple(x.shape))
    planes, _ = quantize_operand(x, spec, amax=amax)
    rowwise, columnwise = planes.get(Usage.ROWWISE), planes.get(Usage.COLUMNWISE)
    return QuantizedTensor(fmt, tuple(x.shape), x.dtype, rowwise=rowwise, columnwise=columnwise)


# `Source.again` of `saved_input.py` receives all saved tensors. The last one may be the amax.
def recompute_swiglu(gate: Tensor, up: Tensor, _amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return ops.swiglu(gate, up, lead=0)  # type: ignore[no-any-return]


class _SwiGlu(Node):
    op, instead = "swiglu", "use torch.nn.functional.silu(gate) * up"

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, amaxes: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        gate, up = gate.contiguous(), up.contiguous()
        h, amax = ops.swiglu(gate, up, lead=0)
        amaxes.append(amax)
        return h, (gate, up)

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = saved
        *both, gate_amax, up_amax = ops.swiglu_grad(gate, up, grad.to(gate.dtype).contiguous(), lead=0)
        for x, amax in zip(both, (gate_amax, up_amax), strict=True):
            cache_amax(x, amax)
        return *(x if need else None for x, need in zip(both, ctx.needs_input_grad, strict=False)), None


SWIGLU_NODE = f"{_SwiGlu.__name__}Backward"
"""Autograd's name for the node of `swiglu`, whose saved tensors are gate and up."""


def swiglu_gate_up(gate_up: Tensor) -> Tensor:
    """Compute `swiglu` of rows `[..., 2 I]`, gate then up, as one product gives them. It copies neither half.

    Grouped products take amaxes of rows: the product that reads h from the forward pass, and the product that computed
    `gate_up` from the backward pass.
    """
    amaxes: list[Tensor] = []
    h: Tensor = apply_node(_SwiGluGateUp, gate_up, None if is_compiling() else amaxes)
    if amaxes:
        pass_row_amaxes(h, amaxes[0])
    return h


def gate_up_and_amaxes(gate_up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `swiglu_gate_up`, the amax of each row of the result, fp32, and the tensor to save for the gradient."""
    halves = gate_up.contiguous().unflatten(-1, (2, -1))
    h, amaxes = ops.swiglu_gate_up(halves, lead=halves.ndim - 2)
    return h, amaxes, halves


def gate_up_grad_and_amaxes(halves: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradient of `swiglu_gate_up`, and the amax of each of its rows, fp32."""
    d_gate_up, amaxes = ops.swiglu_gate_up_grad(halves, grad.to(halves.dtype).contiguous(), lead=halves.ndim - 2)
    return d_gate_up.flatten(-2), amaxes


class _SwiGluGateUp(Node):
    op, instead = "swiglu", "use torch.nn.functional.silu(gate) * up"

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, amaxes: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        h, of_rows, halves = gate_up_and_amaxes(gate_up)
        if amaxes is not None:
            amaxes.append(of_rows)
        return h, [halves]

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        d_gate_up, of_rows = gate_up_grad_and_amaxes(saved[0], grad)
        pass_row_amaxes(d_gate_up, of_rows)
        return d_gate_up, None


class _RmsNorm(Node):
    op, instead = "rms_norm", "use torch.nn.functional.rms_norm, which convert leaves in place with fuse=False"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, amaxes: list[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, weight = x.contiguous(), weight.contiguous()
        y, rstd, amax = ops.rms_norm(x, weight, eps=eps, lead=0)
        amaxes.append(amax)
        return y, (x, weight, rstd)

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = saved
        rows = (rstd.numel(), weight.shape[0])
        grad = grad.to(x.dtype).contiguous().view(rows)
        dx, dweight, _ = ops.rms_norm_grad(x.view(rows), weight, rstd.view(-1), grad, lead=0, rows=SUM_ROWS)
        return dx.view(x.shape), dweight.to(weight.dtype), None, None
