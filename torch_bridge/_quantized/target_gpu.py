"""The GPU that products are dispatched for: the device of the operands, or the GPU of `multiply_for`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from qshard import gemm_dispatch
from qshard.gemm_dispatch import Gpu


class Target(NamedTuple):
    """A GPU, and the size from which its kernels take longer than the host.

    Attributes:
      gpu: the properties that decide which products it supports.
      large: elements of an operand from which layers run op by op, because programs (`linear_program.py`) then save no
        time. On an H200 a 4096 x 4096 x 4096 GEMM takes 0.2 ms, and the host calls of a layer take half of that.
    """

    gpu: Gpu
    large: int = 2**24


_chosen: list[Target] = []
"""Targets of the running `multiply_for` contexts. Not in a `ContextVar`: autograd has threads of its own."""


@contextlib.contextmanager
def multiply_for(target: Target) -> Iterator[None]:
    """Dispatch products in this process for another GPU than this machine has.

    On a CPU, ops then compute the products that ops compute on that GPU. Compiled graphs keep the GPU that they were
    traced for.
    """
    _chosen.append(target)
    try:
        yield
    finally:
        _chosen.pop()


@torch.compiler.assume_constant_result
def target_of(device: torch.device) -> Target | None:
    """Return the target of products on a device; None if PyTorch multiplies dequantized values, as on a CPU."""
    if _chosen:
        return _chosen[-1]
    return _target_of_cuda(device.index) if device.type == "cuda" else None


@functools.cache
def _target_of_cuda(device: int) -> Target:
    return Target(gemm_dispatch.gpu_of(torch.cuda.get_device_capability(device)))
