"""Modules that compute norms and SwiGLU with fused kernels: of PyTorch, and of other libraries (`convert(fuse=True)`).

A module of another library stays an instance of its class. Its own `forward` runs under autocast or a compiler, for
DTensors and other tensor subclasses, and for arguments that the kernels do not take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qshard.formats import FLOATS
from qshard.torch_bridge._modules import Extends
from qshard.torch_bridge._nn.activations import rms_norm, swiglu
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.eager import are_plain, autocast_dtype
from qshard.torch_bridge._torch_internals import has_module_hooks


class SwiGLU(nn.Module):
    """`swiglu(gate, up)` as a module, without parameters.

    >>> SwiGLU()(torch.tensor([2.0]), torch.tensor([3.0]))
    tensor([5.2848])
    """

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute `silu(gate) * up`, as `swiglu` does."""
        return swiglu(gate, up)


class RMSNorm(Extends, nn.RMSNorm):
    """`nn.RMSNorm` computed by `rms_norm`, so that a quantized layer can reuse the amax of its result.

    `convert(fuse=True)` replaces `nn.RMSNorm` by this class. PyTorch's own `forward` runs under autocast or a compiler,
    without a weight, and for DTensors and other tensor subclasses.

    >>> layer = RMSNorm(2, eps=0.0)
    >>> layer(torch.tensor([[3.0, 4.0]])).detach(), list(layer.state_dict())
    (tensor([[0.8485, 1.1314]]), ['weight'])
    """

    _of = nn.RMSNorm
    _prefix = "Fused"

    def forward(self, input: Tensor) -> Tensor:
        """Normalize `input` over the trailing axes of `normalized_shape`."""
        weight: Any = self.weight
        given: Any = input
        axes = len(self.normalized_shape)
        if weight is None or not isinstance(given, Tensor) or not are_plain(input, weight):
            return nn.RMSNorm.forward(self, input)
        if autocast_dtype(input.device) is not None or dtype_name(input.dtype) not in FLOATS:
            return nn.RMSNorm.forward(self, input)
        if input.shape[-axes:] != self.normalized_shape or weight.device != input.device:
            return nn.RMSNorm.forward(self, input)  # PyTorch raises its own errors.
        # PyTorch's default is the epsilon of its compute dtype, fp32.
        eps = torch.finfo(torch.float32).eps if self.eps is None else self.eps
        if axes == 1:  # The amax is cached on the result, which a view would lose.
            return rms_norm(input, weight, eps)
        return rms_norm(input.flatten(-axes), weight.flatten(), eps).view(input.shape)


class FusedRMSNorm(Extends):
    """An RMSNorm of another library, computed by `rms_norm`: `x / sqrt(mean(x^2) + epsilon) * weight`."""

    _of = nn.Module
    _prefix = "Fused"

    def forward(self, *given: Any, **keywords: Any) -> Any:
        """Normalize the last axis of the only argument."""
        weight: Any = self.weight
        x: Any = given[0] if given else None
        if len(given) != 1 or keywords or not _is_served(x) or not are_plain(x, weight):
            return self._extends.forward(self, *given, **keywords)
        if (x.dtype, x.device, x.shape[-1:]) != (weight.dtype, weight.device, weight.shape):
            return self._extends.forward(self, *given)
        return rms_norm(x, weight, epsilon_of(self))


def epsilon_of(norm: nn.Module) -> float:
    """Return the epsilon of an RMSNorm of another library. AttributeError if it has none."""
    found: Any = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
    return float(found)


class FusedMLP(Extends):
    """An MLP of another library, `down(silu(gate(x)) * up(x))`, computed with `swiglu`."""

    _of = nn.Module
    _prefix = "Fused"

    def forward(self, *given: Any, **keywords: Any) -> Any:
        """Apply the MLP to the only argument."""
        names = layers_of(self)
        is_hooked = any(has_module_hooks(each) for name, each in self.named_children() if name not in names)
        if len(given) != 1 or keywords or is_hooked or not _is_served(given[0]) or not are_plain(given[0]):
            return self._extends.forward(self, *given, **keywords)
        gate, up, down = (getattr(self, name) for name in names)
        return down(swiglu(gate(given[0]), up(given[0])))


_LAYERS = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
"""Names of gate, up and down: in transformers, and in the models of Meta and of torchtitan."""


def layers_of(mlp: nn.Module) -> tuple[str, ...]:
    """Return the names of the layers gate, up and down of an MLP; () if it does not have all three."""
    return next((names for names in _LAYERS if all(hasattr(mlp, name) for name in names)), ())


def _is_served(x: Any) -> bool:
    """Return True for a tensor of a dtype that the kernels take, outside autocast."""
    if not isinstance(x, Tensor) or x.ndim < 1 or dtype_name(x.dtype) not in FLOATS:
        return False
    return autocast_dtype(x.device) is None
