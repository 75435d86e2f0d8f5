"""SwiGLU and RMSNorm for layers that quantize what they give: each from one read, with the amax of what it makes.

A scale of a whole tensor comes of its amax. Taken as the tensor is made, it saves the read that only looks for it:
forward that of y, or h, and backward those of both gradients of SwiGLU. `Linear` finds it where the very tensor is
passed on, in the call of a module that made it or in the same backward pass (`module_calls.py`).

What they give is also less work by itself. Of SwiGLU autograd keeps gate and up alone, where `F.silu(gate) * up` keeps
`silu(gate)` too; the layer that takes h makes it again (`saved_input.py`).

Codes are not written at once. A scale of a tensor needs the whole of it first, so h would be worked out twice, of two
operands each time: four reads and a write, as many as to write h, read it and write codes.

While a compiler traces, both are the plain expressions, which it fuses with what is around them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard._core.operands import OperandSpec
from qshard._core.validation import FormatLike, as_format, as_usage, quote
from qshard.formats import FLOATS, Usage
from qshard.op_table import table
from qshard.torch_bridge._nn.class_swap import Extends
from qshard.torch_bridge._nn.module_calls import cache_amax
from qshard.torch_bridge._ops.autograd_node import Node, apply_node
from qshard.torch_bridge._ops.bind import dtype_name, ops
from qshard.torch_bridge._ops.eager import are_plain
from qshard.torch_bridge._quantized.plane_programs import quantize_operand
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_tensor

_SUM_ROWS = int(table()["rms_norm_grad"].attributes["rows"][1][0])
"""Rows of x in a part of the gradient of the weight: the one number that the op takes."""


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, rounded once.

    Args:
      gate, up: float32, bfloat16 or float16, of one shape and dtype.

    Returns:
      Of the same shape and dtype. Under `torch.compile`, and of DTensors, it is PyTorch's own expression, which may
      round silu(gate) by itself.

    Raises:
      TypeError, ValueError: the two are not such tensors.

    >>> gate = torch.tensor([-1.0, 0.0, 2.0], requires_grad=True)
    >>> h = swiglu(gate, torch.ones(3))
    >>> h.detach(), torch.autograd.grad(h.sum(), gate)[0]
    (tensor([-0.2689,  0.0000,  1.7616]), tensor([0.0723, 0.5000, 1.0908]))

    Source: arXiv:2002.05202.
    """
    h, amax = _swiglu(gate, up)
    if amax is not None:
        cache_amax(h, amax)
    return h


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x / sqrt(mean(x^2) + eps) * weight`, over the last axis, in fp32 and rounded once.

    Args:
      x: float32, bfloat16 or float16, `[..., K]`.
      weight: any of these dtypes, `[K]`.
      eps: not negative.

    Returns:
      `[..., K]` of the dtype of x. Under `torch.compile`, and of DTensors, it is PyTorch's `rms_norm`, whose sums are
      in another order.

    Raises:
      TypeError, ValueError: these are not such arguments.

    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0)
    tensor([[0.8485, 2.2627]])

    Source: arXiv:1910.07467.
    """
    y, amax = _rms_norm(x, weight, eps)
    if amax is not None:
        cache_amax(y, amax)
    return y


def swiglu_quantize(gate: Tensor, up: Tensor, fmt: FormatLike, *, usage: Usage = Usage.ROWWISE) -> QuantizedTensor:
    """`quantize(swiglu(gate, up), fmt)`, which does not read h for the amax of it.

    Args:
      gate, up: as for `swiglu`, not DTensors.
      fmt, usage: as for `quantize`. Not a format that rounds stochastically: it needs a seed, so call the two.

    Returns:
      A `QuantizedTensor` of the shape and dtype of gate, in the bits of the two calls.

    Raises:
      TypeError, ValueError: as `swiglu` and `quantize` do.

    A format with an amax of the tensor takes that of the pass that makes h; with others it is the two calls. Not
    differentiable: to train, give `swiglu(gate, up)` to `Linear`. Of a shard of rows it is the tensor by itself.

    >>> swiglu_quantize(torch.ones(2, 4), torch.ones(2, 4), "FP8_E4M3").dequantize()[0, 0]
    tensor(0.7311)

    Source: arXiv:2002.05202.
    """
    check_tensor("swiglu_quantize", "gate", gate)
    check_tensor("swiglu_quantize", "up", up)
    with torch.no_grad():
        return _quantize("swiglu_quantize", *_swiglu(gate, up), fmt, usage)


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, fmt: FormatLike, *, usage: Usage = Usage.ROWWISE
) -> QuantizedTensor:
    """`quantize(rms_norm(x, weight, eps), fmt)`, which does not read y for the amax of it.

    Args:
      x, weight, eps: as for `rms_norm`, not DTensors.
      fmt, usage: as for `swiglu_quantize`.

    Returns:
      A `QuantizedTensor` of the shape and dtype of x, in the bits of the two calls.

    Raises:
      TypeError, ValueError: as `rms_norm` and `quantize` do.

    As `swiglu_quantize`: not differentiable, and of a shard of rows the tensor by itself.

    >>> rms_norm_quantize(torch.tensor([[3.0, 4.0]]), torch.ones(2), 0.0, "FP8_E4M3").rowwise.data.shape
    torch.Size([1, 2])

    Source: arXiv:1910.07467.
    """
    check_tensor("rms_norm_quantize", "x", x)
    check_tensor("rms_norm_quantize", "weight", weight)
    with torch.no_grad():
        return _quantize("rms_norm_quantize", *_rms_norm(x, weight, eps), fmt, usage)


def _swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor | None]:
    """`swiglu`, and the amax of its result where a kernel computes both."""
    if isinstance(gate, DTensor) and isinstance(up, DTensor):
        return F.silu(gate) * up, None
    for name, x in (("gate", gate), ("up", up)):
        check_tensor("swiglu", name, x)
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(
            f"swiglu: up ({dtype_name(up.dtype)} {tuple(up.shape)}) does not match gate ({dtype_name(gate.dtype)} "
            f"{tuple(gate.shape)}); pass two tensors of one shape and dtype"
        )
    if not are_plain(gate, up):
        return F.silu(gate) * up, None
    amaxes: list[Tensor] = []
    h: Tensor = apply_node(_SwiGlu, gate, up, amaxes)
    return h, amaxes[0]


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor | None]:
    """`rms_norm`, and the amax of its result where a kernel computes both."""
    if isinstance(x, DTensor) and isinstance(weight, DTensor):
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps), None
    for name, tensor in (("x", x), ("weight", weight)):
        check_tensor("rms_norm", name, tensor)
    if weight.ndim != 1 or x.ndim < 1 or x.shape[-1] != weight.shape[0]:
        raise ValueError(
            f"rms_norm: weight {tuple(weight.shape)} does not fit x {tuple(x.shape)}; pass weight as [K] and x as "
            "[*lead, K]"
        )
    if not eps >= 0:
        raise ValueError(f"rms_norm: eps ({quote(eps)}) must be a small number of at least 0, such as 1e-5")
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


class SwiGLU(nn.Module):
    """`swiglu` as a module, of gate and up. It has no state.

    >>> SwiGLU()(torch.tensor([2.0]), torch.tensor([3.0]))
    tensor([5.2848])
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return swiglu(gate, up)


class RMSNorm(Extends, nn.RMSNorm):
    """`nn.RMSNorm` by `rms_norm`, for layers that quantize its result. `convert(fuse=True)` makes these of those.

    It is PyTorch's own where `rms_norm` is, under autocast, and without a weight.

    >>> layer = RMSNorm(2, eps=0.0)
    >>> layer(torch.tensor([[3.0, 4.0]])).detach(), list(layer.state_dict())
    (tensor([[0.8485, 1.1314]]), ['weight'])
    """

    _of = nn.RMSNorm

    def forward(self, input: Tensor) -> Tensor:
        weight: Any = self.weight
        given: Any = input
        axes = len(self.normalized_shape)
        if weight is None or not isinstance(given, Tensor) or not are_plain(input, weight):
            return nn.RMSNorm.forward(self, input)
        if torch.is_autocast_enabled(input.device.type) or dtype_name(input.dtype) not in FLOATS:
            return nn.RMSNorm.forward(self, input)
        if input.shape[-axes:] != self.normalized_shape or weight.device != input.device:
            return nn.RMSNorm.forward(self, input)  # Its errors.
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps  # Of what PyTorch computes in.
        if axes == 1:  # The very tensor, of which an amax is noted.
            return rms_norm(input, weight, eps)
        return rms_norm(input.flatten(-axes), weight.flatten(), eps).view(input.shape)


def swiglu_again(gate: Tensor, up: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """h of what autograd keeps of it, and its amax."""
    h, made = ops.swiglu(gate, up, lead=0)
    return h, made


class _SwiGlu(Node):
    op, instead = "swiglu", "use torch.nn.functional.silu(gate) * up"

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, noted: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        gate, up = gate.contiguous(), up.contiguous()
        h, amax = ops.swiglu(gate, up, lead=0)
        noted.append(amax)
        return h, (gate, up)

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = saved
        *both, gate_amax, up_amax = ops.swiglu_grad(gate, up, grad.to(gate.dtype).contiguous(), lead=0)
        for x, amax in zip(both, (gate_amax, up_amax), strict=True):
            cache_amax(x, amax)
        return *(x if need else None for x, need in zip(both, ctx.needs_input_grad, strict=False)), None


SWIGLU_NODE = f"{_SwiGlu.__name__}Backward"
"""What autograd calls the node of `swiglu`, whose saved tensors are gate and up."""


class _RmsNorm(Node):
    op, instead = "rms_norm", "use torch.nn.functional.rms_norm, which convert leaves in place with fuse=False"

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, eps: float, noted: list[Tensor]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, weight = x.contiguous(), weight.contiguous()
        y, rstd, amax = ops.rms_norm(x, weight, eps=eps, lead=0)
        noted.append(amax)
        return y, (x, weight, rstd)

    @staticmethod
    def gradients(ctx: Any, saved: list[Tensor], grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = saved
        rows = (rstd.numel(), weight.shape[0])
        grad = grad.to(x.dtype).contiguous().view(rows)
        dx, dweight, _ = ops.rms_norm_grad(x.view(rows), weight, rstd.view(-1), grad, lead=0, rows=_SUM_ROWS)
        return dx.view(x.shape), dweight.to(weight.dtype), None, None
