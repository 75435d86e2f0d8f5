"""What the shard of a rank is of its weight, and how it is quantized as that part, wherever ranks cut blocks.

The words are those of the glossary in `scales.py`. A scale needs the amax of its whole block, so ranks merge what each
knows, make all scales of the result, and each casts its shard with its part of them.

A shard of rows is a flat slice of its weight, so it takes the steps of `qshard.master`, as slices of optimizers do.
So does a shard of columns under one scale, where places do not matter. Columns of blocks are the one case apart: such a
shard is quantized in parts of blocks, as wide as all ranks have whole ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.device_mesh import DeviceMesh

from qshard import pipeline
from qshard.formats import Format, Usage
from qshard.layout import plane, shard_rows
from qshard.master import plan_master
from qshard.torch_bridge.ops import call_in_place, dtype_name, into, ops
from qshard.torch_bridge.tensor import QuantizedTensor
from qshard.torch_bridge.words import words

__all__ = ["ShardPlan", "plan_shard"]


class Columns(NamedTuple):
    """A shard of columns of a weight in blocks.

    Attributes:
      part: (rows, columns) of the parts of blocks that it holds whole.
      ratio: parts in a block, side by side.
      before: parts of its first block that ranks before this one hold.
      blocks: the columns of the grid of blocks that it has a part in.
    """

    part: tuple[int, int]
    ratio: int
    before: int
    blocks: slice


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """How one weight is cut, and which part of it the shard of this rank is. Made once, then looked up.

    Attributes:
      mesh, mesh_dim: the ranks that it is cut over are one axis of it.
      fmt, dtype, shape: of the weight; what it is gathered as, and its dtype and shape in high precision.
      data_shape: of the codes of the weight.
      padded_shape: of the padded codes.
      room: bytes to cast into: 4-bit codes need one more than there are, for half a byte that no cut of rows leaves.
      wide: whether codes travel wide.
      start: the first element of the slice.
      starts: the same as an operand, on the device of the shard.
      columns: of a shard that is no slice; None: it is one.
      cast_attributes: of the op that casts the slice.
    """

    mesh: DeviceMesh
    mesh_dim: int
    fmt: Format
    dtype: str
    shape: tuple[int, int]
    data_shape: tuple[int, ...]
    padded_shape: tuple[int, int]
    room: int
    wide: bool
    start: int
    starts: Tensor
    columns: Columns | None
    cast_attributes: dict[str, Any]

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group(self.mesh_dim)

    @property
    def device(self) -> torch.device:
        """Where ranks compute; an offloaded shard is elsewhere."""
        kind = self.mesh.device_type
        return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)

    @property
    def nan_byte(self) -> int:
        """What a shard sends in place of codes that would not be those of the weight."""
        element = self.fmt.element
        return sum(element.nan_code << (element.bits * i) for i in range(element.codes_per_byte))

    def slice_of(self, shard: Tensor) -> Tensor:
        """The shard as a slice. Columns of blocks have none: there, it is empty."""
        return shard.view(-1) if self.columns is None else shard.new_empty(0)

    def note_amaxes_of_columns(self, shard: Tensor, grid: Tensor, whole: Tensor | None) -> None:
        """Writes what columns of blocks know of the amaxes of the weight, those of its blocks and its own."""
        if self.columns is None or not shard.numel():
            return
        part, ratio, before, blocks = self.columns
        found = pipeline.block_amax(ops, shard, part)
        if ratio > 1:
            after = -(before + found.shape[1]) % ratio
            found = pipeline.block_amax(ops, torch.nn.functional.pad(found, (before, after)), (1, ratio))
        grid[:, blocks] = found
        if whole is not None:
            whole.copy_(ops.amax_tensor(found))

    def padded_in(self, room: Tensor) -> Tensor:
        """The padded codes, in the memory that the shard is cast into."""
        return room[: math.prod(self.padded_shape)].view(self.padded_shape)

    def cast(self, shard: Tensor, scale: Tensor, room: Tensor) -> None:
        """Writes the codes of the shard, given the scales of the weight."""
        if self.columns is None:
            lists = (self.starts, scale.view(-1), [shard.view(-1)], [room])
            call_in_place("cast_slices", lists, self.cast_attributes)
        elif shard.numel():
            part, ratio, before, blocks = self.columns
            of_parts = scale[:, blocks].repeat_interleave(ratio, dim=1)
            count = -(-shard.shape[1] // part[1])
            codes = into(self.padded_in(room))
            pipeline.cast(codes, shard, self.fmt, of_parts[:, before : before + count].contiguous(), part)

    def codes_in(self, gathered: Tensor) -> Tensor:
        """The codes of the weight: the memory that was gathered, without the padding at its end."""
        return gathered.view(-1)[: math.prod(self.data_shape)].view(self.data_shape)

    def packed(self, gathered: Tensor, unsharded: QuantizedTensor | None) -> Tensor:
        """The codes of the weight from wide ones, in the memory that `unsharded` had for them before if there is one.

        It holds the same codes again before autograd reads them, so to autograd nothing is written.
        """
        wide = gathered.view(-1)[: math.prod(self.shape)].view(self.shape)
        before = None if unsharded is None else unsharded.parts(Usage.ROWWISE)
        codes = wide.new_empty(self.data_shape) if before is None else before.data
        with _unsafe_preserve_version_counter(codes):
            return torch.bitwise_or(wide[:, 0::2], wide[:, 1::2] << 4, out=codes)


def plan_shard(
    name: str, fmt: Format, shape: tuple[int, ...], shard: Tensor, mesh: DeviceMesh, mesh_dim: int
) -> ShardPlan:
    """The plan of a weight of which FSDP2 has cut the rows, or columns into even parts.

    Raises:
      NotImplementedError: ranks share a byte. All of them raise.
    """
    rows, columns = shape
    axis = 0 if shard.shape[1] == columns else 1
    ranks = mesh.size(mesh_dim)
    cut = shard_rows(shape[axis], ranks, mesh.get_local_rank(mesh_dim))
    per_byte = fmt.element.codes_per_byte
    if shard.shape[1] % per_byte:
        raise NotImplementedError(
            f"fully_shard: {name} {tuple(shape)} is cut into {ranks} shards of {shard.shape[1]} columns, but "
            f"{per_byte} codes of {fmt} share a byte; cut its rows"
        )
    dtype = dtype_name(shard.dtype)
    (bucket,) = plan_master([(rows, columns)], fmt, dtype=dtype).buckets
    where = plane(fmt, shape, Usage.ROWWISE, op="fully_shard")
    # Columns cut blocks, but not the one scale of a tensor, of which a shard's amax is a part like any other.
    parts = None if axis == 0 or where.block is None else _parts_of(where.block, cut.start, shard.shape[1])
    start = cut.start * columns if axis == 0 else 0
    padded_shape = (cut.padded if axis == 0 else rows, shard.shape[1] // per_byte)
    return ShardPlan(
        mesh=mesh,
        mesh_dim=mesh_dim,
        fmt=fmt,
        dtype=dtype,
        shape=(rows, columns),
        data_shape=where.data_shape,
        padded_shape=padded_shape,
        room=math.prod(padded_shape) + per_byte - 1,
        wide=per_byte > 1 and (axis == 1 or rows % ranks != 0),
        start=start,
        starts=words("fully_shard", "start", [start], shard.device, 1),
        columns=parts,
        cast_attributes={
            **bucket.attributes,
            "element": fmt.element.name,
            "nonfinite": fmt.nonfinite,
            "pieces": True,
        },
    )


def _parts_of(block: tuple[int, int], start: int, columns: int) -> Columns:
    width = math.gcd(start, block[1])
    blocks = slice(start // block[1], -(-(start + columns) // block[1]))
    return Columns((block[0], width), block[1] // width, start % block[1] // width, blocks)
