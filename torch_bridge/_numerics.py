"""Conversion of tensors for `qshard.numerics`. For a DTensor each rank measures its shard."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from qshard.numerics._arrays import ShardedArray, of_floats, of_shards
from qshard.numerics._reductions import as_float
from qshard.numerics._sensitivity import Outputs, call_with_batch, leaves
from qshard.torch_bridge._distributed.dtensor import local_box
from qshard.torch_bridge._fsdp.weight import ShardedWeight, memory_of
from qshard.torch_bridge._ops.collectives import max_over_ranks
from qshard.torch_bridge._quantized.validation import check_model

T = TypeVar("T")


class RankReductions:
    """Reductions of `qshard.numerics` over one group per mesh axis: together, all ranks with a part of a tensor."""

    def __init__(self, groups: Sequence[dist.ProcessGroup], device: torch.device):
        self.groups, self.device = groups, device

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> RankReductions:
        kind = mesh.device_type
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        return cls([mesh.get_group(axis) for axis in range(mesh.ndim)], device)

    def maximum(self, bits: NDArray[np.int32]) -> NDArray[np.int32]:
        merged = max_over_ranks(torch.from_numpy(bits.copy()).view(torch.float32).to(self.device), self.groups)
        result: NDArray[np.int32] = merged.cpu().view(torch.int32).numpy()
        return result

    def gathered(self, own: T) -> list[T]:
        parts = [own]
        for group in self.groups:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, parts, group=group)
            parts = [part for each in found for part in each]
        return parts


@torch.no_grad()
def as_sharded(x: Tensor, op: str) -> ShardedArray:
    """Describe a tensor for `qshard.numerics`: shape, dtype and local shards.

    A weight of a converted model is measured by its values, not by its codes. For a DTensor, call it on every rank of
    the mesh. A shard that is replicated over a mesh axis is measured on the first rank of that axis.

    Raises:
      TypeError: `x` does not hold real numbers.
      ValueError: `x` has a pending sum over ranks, or this rank has no part of it.
    """
    local, dtype = memory_of(x), str(x.dtype)
    if not isinstance(x, DTensor):
        return of_floats(as_float(local, op), dtype)
    if any(isinstance(placement, Partial) for placement in x.placements):
        raise ValueError(f"{op}: x {tuple(x.shape)} is a DTensor with Partial placement; redistribute it first")
    mesh, coordinate = x.device_mesh, x.device_mesh.get_coordinate()
    if coordinate is None:
        raise ValueError(f"{op}: x {tuple(x.shape)} is on a mesh without this rank; call it on the ranks of that mesh")
    is_first = not any(
        place for place, placement in zip(coordinate, x.placements, strict=True) if placement.is_replicate()
    )
    box = local_box(x)._replace(size=tuple(local.shape))  # `DTensor.from_local` does not check shapes.
    shards = [(local, box)] if is_first else []
    as_float(local[:0] if local.ndim else local, op)  # On replicas too, so that all ranks raise the same error.
    return of_shards(tuple(x.shape), dtype, shards, RankReductions.of_mesh(mesh), op)


class OfModule:
    """Access to the weights of a module for `sensitivity`, which replaces them one by one."""

    def __init__(self, model: nn.Module, op: str):
        check_model(op, model)
        self._model, self._weights = model, {}
        for name, weight in model.named_parameters():
            kind = "DTensor" if isinstance(weight, DTensor) else "of a converted layer"
            if isinstance(weight, DTensor | ShardedWeight):
                raise ValueError(
                    f"{op}: {name} ({kind}) is not a plain weight; pass the model before it is converted or sharded"
                )
            if weight.ndim > 1 and weight.is_floating_point():
                self._weights[name] = weight

    def names(self) -> list[str]:
        return list(self._weights)

    def weight(self, name: str) -> NDArray[Any]:
        return as_float(self._weights[name], "sensitivity").array

    @contextlib.contextmanager
    def replaced(self, name: str, value: NDArray[np.float32]) -> Iterator[None]:
        weight = self._weights[name]
        with torch.no_grad():
            before = weight.detach().clone()
            try:
                weight.copy_(torch.from_numpy(value))
                yield
            finally:
                weight.copy_(before)

    @torch.no_grad()
    def run(self, batch: Any) -> Outputs:
        outputs = call_with_batch(self._model, batch)
        return [np.asarray(as_float(leaf, "sensitivity").array, np.float64) for _, leaf in leaves(outputs)]
