"""What this rank holds of a tensor that may be a DTensor, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_module

from qshard.torch_bridge._torch_internals import TensorMeta, local_tensor, spec_of


def local_of(tensor: Tensor) -> Tensor:
    """The tensor of this rank: the very object, to which attributes may belong."""
    return local_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def wrapped_like(tensor: Tensor, local: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """`local` as what this rank holds of a tensor that is cut as `tensor` is; `local` itself if that is no DTensor.

    `shape` is that of the whole, if it is not that of `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return local
    size, stride = tensor.shape, tensor.stride()
    if shape is not None:
        size = torch.Size(shape)
        stride = torch.empty(size, device="meta").stride()
    if local.device.type != tensor.device_mesh.device_type:  # Offloaded: `from_local` would move it to the mesh's.
        meta = TensorMeta(size, stride, local.dtype)
        # As FSDP2 makes its own.
        return DTensor(local, dataclasses.replace(spec_of(tensor), tensor_meta=meta), requires_grad=False)
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, run_check=False, shape=size, stride=stride)


def places_tensors(hook: Callable[..., Any]) -> bool:
    """Whether a hook of a module is one by which `distribute_module`, and so `parallelize_module`, places tensors."""
    name = getattr(hook, "__qualname__", "")
    # Not by `__module__`: PyTorch renames that of public functions.
    is_there = getattr(hook, "__globals__", None) is distribute_module.__globals__
    return is_there and name.startswith(f"{distribute_module.__qualname__}.")
