"""Local shards of tensors that may be DTensors, and DTensors from local shards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_module

from qshard._core.placement import Box
from qshard.torch_bridge._torch_internals import (
    TensorMeta,
    compute_local_shape_and_global_offset,
    local_tensor,
    spec_of,
)


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, or the tensor itself: the stored object, which may have attributes."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def local_box(tensor: Tensor) -> Box:
    """Return the position of the local shard of a DTensor in the whole tensor. A plain tensor is whole.

    >>> local_box(torch.ones(2, 3))
    Box(global_shape=(2, 3), start=(0, 0), size=(2, 3))
    """
    shape = tuple(tensor.shape)
    size, start = shape, (0,) * tensor.ndim
    if isinstance(tensor, DTensor):
        with torch.device("cpu"):  # Within `torch.device("meta")` it fails.
            size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(shape, tuple(start), tuple(size))


def wrapped_like(tensor: Tensor, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Wrap a local shard as a DTensor with the sharding of `tensor`. Return `local` itself if `tensor` is plain.

    The shard stays on its device. The whole has the shape `shape`, by default the shape of `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return local
    size, stride = tensor.shape, tensor.stride()
    if shape is not None:
        size = torch.Size(shape)
        stride = torch.empty(size, device="meta").stride()
    if local.device.type != tensor.device_mesh.device_type:  # Offloaded: `from_local` would move it to the mesh.
        meta = TensorMeta(size, stride, local.dtype)
        # FSDP2 creates its DTensors in this way.
        return DTensor(local, dataclasses.replace(spec_of(tensor), tensor_meta=meta), requires_grad=False)
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=size, stride=stride)


def places_tensors(hook: Callable[..., Any]) -> bool:
    """Return True if a module hook was registered by `distribute_module`, and so by `parallelize_module`."""
    name = getattr(hook, "__qualname__", "")
    # PyTorch changes `__module__` of public functions, so compare globals.
    is_there = getattr(hook, "__globals__", None) is distribute_module.__globals__
    return is_there and name.startswith(f"{distribute_module.__qualname__}.")
