"""The GPU that a program will run on, as far as tracing can tell."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
from jax import lax

from qshard import gemm_dispatch
from qshard.gemm_dispatch import Gpu
from qshard.jax._ops.mesh import mesh_of

_LIBRARY_OF_OTHERS = 120900
"""The cuBLASLt version assumed for a program that is compiled for another machine. An older one raises there."""
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Parts of device kinds with compute capability 9.0, for devices of another machine."""


class Target(NamedTuple):
    """A GPU that this machine may not have.

    Attributes:
      gpu: its properties; None: it has no products of codes.
      platform: "cuda", or "cpu" for ops that multiply codes on CPUs in place of the GPU.
    """

    gpu: Gpu | None
    platform: str = "cuda"


trace_for = jax.make_user_context(None)
"""Context `trace_for(Target(...))`: this thread traces programs for that GPU. It is in the keys of JAX's caches."""


def by_platform(by_op: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> jax.Array:
    """Compute a product by an op on the platform that has it, else by `otherwise`."""
    target: Target | None = trace_for.value
    platform = "cuda" if target is None else target.platform
    made: jax.Array = lax.platform_dependent(*operands, **{platform: by_op}, default=otherwise)
    return made


def gpu_of(x: jax.Array) -> Gpu | None:
    """Return the GPU that a program of `x` will run on; None if it has no GPU."""
    target: Target | None = trace_for.value
    if target is not None:
        return target.gpu
    device = getattr(mesh_of(x), "abstract_device", None) or SimpleNamespace(device_kind="")
    here = _gpus_here()
    if device.device_kind in here or (here and not device.device_kind):
        return here.get(device.device_kind) or next(iter(here.values()))
    if any(name in device.device_kind for name in _HOPPER):
        return Gpu((9, 0), _LIBRARY_OF_OTHERS)
    return None


@functools.cache
def _gpus_here() -> dict[str, Gpu]:
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return {}
    found = {}
    for device in devices:
        major, minor = (int(number) for number in str(device.compute_capability).split("."))
        found[device.device_kind] = gemm_dispatch.gpu_of((major, minor))
    return found
