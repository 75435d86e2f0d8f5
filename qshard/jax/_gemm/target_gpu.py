"""The GPU that a program will run on, as far as tracing can tell."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
from jax import lax

from qshard import gemm_dispatch
from qshard.gemm_dispatch import Gpu
from qshard.jax._ops.mesh import mesh_of

_LIBRARY_OF_OTHERS = 120900
"""The cuBLASLt version assumed for a program that is compiled for another machine. An older one raises there."""
_HOPPER = ("H100", "H200", "H800", "H20", "GH200")
"""Parts of device kinds with compute capability 9.0, for devices of another machine."""


_chosen: list[tuple[Gpu | None, str]] = []
"""GPUs of the running `trace_for` contexts, and the platforms that multiply codes there."""


@contextlib.contextmanager
def trace_for(gpu: Gpu | None, platform: str = "cuda") -> Iterator[None]:
    """Trace programs in this context for a GPU that this machine may not have; None: for one without such products.

    Ops multiply codes on `platform`, such as the CPU, where tests compute these products. Clears JAX's caches at both
    ends, because they do not depend on the GPU.
    """
    _chosen.append((gpu, platform))
    jax.clear_caches()
    try:
        yield
    finally:
        _chosen.pop()
        jax.clear_caches()


def by_platform(by_op: Callable[..., Any], otherwise: Callable[..., Any], *operands: Any) -> jax.Array:
    """Compute a product by an op on the platform that has it, else by `otherwise`."""
    platform = _chosen[-1][1] if _chosen else "cuda"
    made: jax.Array = lax.platform_dependent(*operands, **{platform: by_op}, default=otherwise)
    return made


def gpu_of(x: jax.Array) -> Gpu | None:
    """Return the GPU that a program of `x` will run on; None if it has no GPU."""
    if _chosen:
        return _chosen[-1][0]
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
