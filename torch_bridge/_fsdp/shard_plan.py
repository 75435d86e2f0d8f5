"""What the shard of a rank is of its weight, and how it is quantized as that part, wherever ranks cut blocks.

The words are those of the glossary in `scale_state.py`. A scale needs the amax of its whole block, so ranks merge what
each knows, make all scales of the result, and each casts its shard with its part of them.

A shard of rows is a flat slice of its weight, so it takes the steps of `_core.flat_shards`, as slices of optimizers do.
So does a shard of columns under one scale, where places do not matter. Columns of blocks are the one case apart: such a
shard is quantized as a matrix, after zeros for what ranks before it hold of its first block.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from qshard._core import quantize_steps
from qshard._core.flat_shards import plan_master
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.torch_bridge._ops.bind import call_in_place, dtype_name, into, ops
from qshard.torch_bridge._ops.uint64 import words


class ShardPlan:
    """How one weight is cut, and which part of it the shard of this rank is. Made once, then looked up.

    Args:
      shape: of the weight, of which FSDP2 has cut the rows, or columns into even parts.
      mesh, mesh_dim: the ranks that it is cut over are one axis of it.

    Attributes:
      group, device: of the ranks; where they compute. An offloaded shard is elsewhere.
      data_shape: of the codes of the weight.
      padded_shape: of the padded codes.
      room: bytes to cast into: 4-bit codes need one more than there are, for half a byte that no cut of rows leaves.
      packs_columns: whether FSDP2, which joins columns, must be told that codes have fewer than the weight.
      start: the first element of the slice; `starts`: the same as an operand, on the device of the shard.
      columns: of a shard that is no slice, the columns of the grid of blocks that it has a part in; None: it is one.
      before: how many columns of its first block other ranks hold.
      block: what shares a scale; all of it, if there are no blocks.
      cast_attributes: of the op that casts the slice.
      described: what all ranks must have in common.

    Raises:
      NotImplementedError: ranks share a byte. All of them raise.
    """

    def __init__(self, name: str, fmt: Format, shape: tuple[int, ...], shard: Tensor, mesh: DeviceMesh, mesh_dim: int):
        rows, columns = shape
        width = shard.shape[1]
        of_rows, ranks, per_byte = width == columns, mesh.size(mesh_dim), fmt.element.codes_per_byte
        if width % per_byte:
            raise NotImplementedError(
                f"fully_shard: {name} {tuple(shape)} is cut into {ranks} shards of {width} columns, but "
                f"{per_byte} codes of {fmt} share a byte; cut its rows"
            )
        where = plane(fmt, shape, Usage.ROWWISE, op="fully_shard")
        longest = -(-(rows if of_rows else columns) // ranks)  # As FSDP2 and `torch.chunk` cut.
        start = longest * mesh.get_local_rank(mesh_dim)
        self.group, kind = mesh.get_group(mesh_dim), mesh.device_type
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.fmt, self.shape, self.dtype = fmt, (rows, columns), dtype_name(shard.dtype)
        self.data_shape = where.data_shape
        self.padded_shape = (longest if of_rows else rows, width // per_byte)
        self.room = math.prod(self.padded_shape) + per_byte - 1
        self.packs_columns = per_byte > 1 and not of_rows
        self.described = (self.shape, self.dtype, of_rows, ranks)
        self.start = min(rows, start) * columns if of_rows else 0
        self.starts = words("fully_shard", "start", [self.start], shard.device, 1)
        self.columns, self.before = None, 0
        self.block = where.block or self.shape
        if not of_rows and where.block is not None:  # Under one scale places do not matter: any shard is a slice.
            first, self.before = divmod(start, self.block[1])
            self.columns = slice(first, -(-(start + width) // self.block[1]))
        (bucket,) = plan_master([self.shape], fmt, dtype=self.dtype).buckets
        options = {"element": fmt.element.name, "nonfinite": fmt.nonfinite, "pieces": True}
        self.cast_attributes = {**bucket.attributes, **options}

    def note_amaxes_of_columns(self, shard: Tensor, grid: Tensor, whole: Tensor | None) -> None:
        """Writes what columns of blocks know of the amaxes of the weight, those of its blocks and its own."""
        if self.columns is None or not shard.numel():
            return
        found = quantize_steps.block_amax(ops, self._from_its_block_on(shard), self.block)
        grid[:, self.columns] = found
        if whole is not None:
            whole.copy_(ops.amax_tensor(found))

    def room_in(self, part: Tensor) -> Tensor:
        """Room to cast into, at the beginning of some bytes: where codes have a byte each, as padded codes."""
        if self.room == self.padded_shape[0] * self.padded_shape[1]:
            return part.as_strided(self.padded_shape, (self.padded_shape[1], 1))
        return part[: self.room]

    def padded_in(self, room: Tensor) -> Tensor:
        if room.shape == self.padded_shape:
            return room
        return room.as_strided(self.padded_shape, (self.padded_shape[1], 1))

    def cast(self, shard: Tensor, scale: Tensor, room: Tensor) -> None:
        if self.columns is None:
            lists = (self.starts, scale.view(-1), [shard.view(-1)], [room])
            call_in_place("cast_slices", lists, self.cast_attributes)
        elif shard.numel():
            codes, of_blocks = self.padded_in(room), scale[:, self.columns].contiguous()
            target = ops if self.before else into(codes)
            made = quantize_steps.cast(target, self._from_its_block_on(shard), self.fmt, of_blocks, self.block)
            if self.before:
                codes.copy_(made[:, -codes.shape[1] :])

    def _from_its_block_on(self, shard: Tensor) -> Tensor:
        """Columns, from where their first block begins."""
        return torch.nn.functional.pad(shard, (self.before, 0)) if self.before else shard

    def codes(self, gathered: Tensor) -> Tensor:
        """The codes of the weight: the memory that was gathered, without the padding at its end."""
        return gathered.as_strided(self.data_shape, (self.data_shape[1], 1))
