"""`convert(fuse=True)`: norms and gated MLPs, also of other libraries, that then run fused kernels.

Modules of other libraries are recognized by results: a copy with random weights runs on random rows on the CPU. If it
computes the formula, the module is fused. So a norm that multiplies by `1 + weight`, as Gemma's, is left as it is, and
so is an MLP with another activation or with dropout. Only classes named `...RMSNorm`, and modules with
layers of the names in `layers_of`, are run.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qshard.torch_bridge._modules import Extends, extend_class
from qshard.torch_bridge._nn.fused_modules import FusedMLP, FusedRMSNorm, RMSNorm, epsilon_of, layers_of

_WIDTH, _HIDDEN = 8, 16  # of the random layers of an MLP
_SPREAD = (1e-3, 1.0, 30.0)  # standard deviations of rows; epsilon matters for the smallest
_UNITS = {torch.float32: 2.0**-18, torch.bfloat16: 2.0**-6}  # relative errors: products have other orders of sums


def fuse_module(module: nn.Module) -> None:
    """Change the class of a module to one with a fused kernel, if there is one."""
    kind = _fused_kind(module)
    if kind is not None:
        module.__class__ = extend_class(kind, type(module))


def _fused_kind(module: nn.Module) -> type[Extends] | None:
    if isinstance(module, Extends) or "forward" in vars(module):
        return None
    if copyreg._slotnames(type(module)):  # type: ignore[attr-defined]
        return None
    if isinstance(module, nn.RMSNorm):
        is_plain = module.weight is not None and type(module).forward is nn.RMSNorm.forward
        return RMSNorm if is_plain else None
    if _is_rms_norm(module):
        return FusedRMSNorm
    return FusedMLP if _is_gated_mlp(module) else None


def _is_rms_norm(module: nn.Module) -> bool:
    """Return True for `x / sqrt(mean(x^2) + epsilon) * weight` over the last axis."""
    if not type(module).__name__.endswith("RMSNorm") or [name for name, _ in module.named_parameters()] != ["weight"]:
        return False
    weight: Any = module.weight
    if weight.ndim != 1 or [*module.children(), *module.buffers()]:
        return False
    try:
        eps = epsilon_of(module)
    except (AttributeError, TypeError, ValueError):
        return False

    def expected(probe: nn.Module, x: Tensor) -> Tensor:
        return F.rms_norm(x, tuple(weight.shape), probe.get_parameter("weight"), eps)

    return eps >= 0 and _computes(module, expected, {"weight": (weight.numel(),)}, weight.numel())


def _is_gated_mlp(module: nn.Module) -> bool:
    """Return True for `down(silu(gate(x)) * up(x))`."""
    names = layers_of(module)
    others = [each for name, each in module.named_children() if name not in names]
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if not names or own or not all(map(_is_silu, others)):
        return False

    def expected(probe: nn.Module, x: Tensor) -> Tensor:
        gate, up, down = (getattr(probe, name) for name in names)
        return down(F.silu(gate(x)) * up(x))  # type: ignore[no-any-return]

    gate, up, down = names
    shapes = {gate: (_HIDDEN, _WIDTH), up: (_HIDDEN, _WIDTH), down: (_WIDTH, _HIDDEN)}
    return _computes(module, expected, shapes, _WIDTH)


def _is_silu(module: nn.Module) -> bool:
    """Return True for a module named SiLU without children and parameters. A fused MLP does not call it."""
    return type(module).__name__.startswith("SiLU") and not [*module.children(), *module.parameters()]


def _computes(
    module: nn.Module,
    expected: Callable[[nn.Module, Tensor], Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    width: int,
) -> bool:
    """Return True if a copy of a module with random weights of these shapes computes the expected results."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32)

    x = random(len(_SPREAD), 2, width) * torch.tensor(_SPREAD, dtype=torch.float32, device="cpu").reshape(-1, 1, 1)
    with torch.no_grad(), torch.autocast("cpu", enabled=False):
        weights = {name: random(*shape) for name, shape in shapes.items()}
        for dtype, unit in _UNITS.items():
            for training in (True, False):
                probe = _copy(module, {name: each.to(dtype) for name, each in weights.items()}, training)
                try:
                    y = type(module).forward(probe, x.to(dtype))
                except Exception:
                    return False
                want = expected(probe, x.to(dtype)).float()
                if not isinstance(y, Tensor) or y.shape != want.shape or y.dtype != dtype:
                    return False
                if not ((y.float() - want).norm(dim=-1) <= unit * want.norm(dim=-1)).all():
                    return False
    return True


def _copy(module: nn.Module, weights: dict[str, Tensor], training: bool) -> nn.Module:
    """Return a copy of a module with other weights, which shares neither parameters nor hooks with it."""
    probe: nn.Module = object.__new__(type(module))
    probe.__dict__.update(vars(module) | vars(nn.Module()) | {"training": training})
    for name, child in module.named_children():
        probe.add_module(name, child)
    for name, weight in weights.items():
        if weight.ndim == 1:
            probe.register_parameter(name, nn.Parameter(weight))
        else:
            rows, cols = weight.shape
            layer = nn.Linear(cols, rows, bias=False, device="meta")
            layer.weight = nn.Parameter(weight)
            probe.add_module(name, layer)
    return probe
