"""What the shard of a rank is of its weight, and how it is quantized as that part, wherever ranks cut blocks.

The words are those of the glossary in `scale_state.py`. A scale needs the amax of its whole block, so ranks merge what
each knows, make all scales of the result, and each casts its shard with its part of them.

A shard of rows is a flat slice of its weight, so it takes the steps of `_core.flat_shards`, as slices of optimizers do.
So does a shard of columns under one scale, where places do not matter. Columns of blocks are the one case apart: such a
shard is a box, and its edges may split blocks (`_core.placement`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from qshard._core.flat_shards import FlatSlice
from qshard._core.placement import Box, box_amax, cast_box
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._ops.bind import dtype_name, into, ops
from qshard.torch_bridge._ops.foreach import xp
from qshard.torch_bridge._torch_internals import fsdp_groups

if TYPE_CHECKING:
    from qshard.torch_bridge._fsdp.scale_state import ScaleState


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
      slice: the flat slice that the shard is; an empty one if it is a box.
      box: where columns of blocks are in the weight; None: the shard is a slice.
      block: what shares a scale; all of it, if there are no blocks.
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
                f"fully_shard: {name} {tuple(shape)} has {ranks} shards of {width} columns, but {per_byte} codes of "
                f"{fmt} share a byte; shard its rows"
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
        self.packs_columns = fmt.element.packed and not of_rows
        self.described = (self.shape, self.dtype, of_rows, ranks)
        self.slice = FlatSlice(self.shape, fmt, self.dtype, min(rows, start) * columns if of_rows else 0)
        self.block = where.scaled_shape
        self.box: Box | None = None
        if not of_rows and not fmt.per_tensor:  # Under one scale places do not matter: any shard is a slice.
            self.box = Box(self.shape, (0, start), (rows, width))

    def note_amaxes_of_columns(self, shard: Tensor, grid: Tensor, whole: Tensor | None) -> None:
        """Writes what columns of blocks know of the amaxes of the weight, those of its blocks and its own."""
        if self.box is None or not shard.numel():
            return
        found = box_amax(ops, xp, shard, self.box, self.block, grid)
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

    def cast_columns(self, shard: Tensor, scale: Tensor, room: Tensor) -> None:
        """Casts columns of blocks. Slices are cast by `FlatPlan.cast`."""
        assert self.box is not None
        if not shard.numel():
            return
        codes, of_blocks = self.padded_in(room), scale[self.box.blocks(self.block)].contiguous()
        outer = self.box.aligned(self.block)
        made = cast_box(into(codes) if outer == self.box else ops, xp, shard, self.box, self.fmt, self.block, of_blocks)
        if outer != self.box:
            first = self.box.within(outer)[1].start // self.fmt.element.codes_per_byte
            codes.copy_(made[:, first : first + codes.shape[1]])

    def codes(self, gathered: Tensor) -> Tensor:
        """The codes of the weight: the memory that was gathered, without the padding at its end."""
        return gathered.as_strided(self.data_shape, (self.data_shape[1], 1))


def set_padded_shape(state: ScaleState, padded: Tensor) -> Callable[[], None]:
    """Lets FSDP2 take shards of a weight to have the shape of `padded`, until what this returns is called.

    FSDP2 joins columns of ranks by the shape that it stores of the shard; 4-bit codes have half as many columns. It can
    be told only by a private attribute, which has the same name in torch 2.11 to 2.15.
    """
    param = _fsdp_param(state)
    shape, param.padded_sharded_param_size = param.padded_sharded_param_size, padded.shape
    return lambda: setattr(param, "padded_sharded_param_size", shape)


def _fsdp_param(state: ScaleState) -> Any:
    """The `FSDPParam` of the weight."""
    for group in groups_of(state.passes.root):
        for param in group.fsdp_params:
            if getattr(local_of(param.sharded_param), "scale_state", None) is state:
                return param
    raise NotImplementedError(
        f"fully_shard: {state.name} ({state.fmt}) is sharded by columns, but its model is unknown; call "
        "update_scales(model) once after fully_shard, or shard its rows"
    )


def check_reshards(model: nn.Module | None) -> None:
    """Raises where weights of ours are to be resharded to fewer ranks after forward, on every rank alike.

    FSDP2 makes a parameter with a gradient of its part of the gathered memory, which codes do not allow, and gathers it
    without the hooks of the weight.

    Raises:
      NotImplementedError: `reshard_after_forward` of a module is a number of ranks.
    """
    for group in groups_of(model):
        if group.post_forward_mesh_info in (None, group.mesh_info):
            continue
        for parameter in group.fsdp_params:
            known = getattr(local_of(parameter.sharded_param), "scale_state", None)
            if known is not None:
                raise NotImplementedError(
                    f"fully_shard: {known.name} (reshard_after_forward={group.post_forward_mesh_info.shard_mesh_size}) "
                    "is gathered as codes, which FSDP2 cannot reshard to fewer ranks; pass reshard_after_forward=True "
                    "or False"
                )


def groups_of(model: nn.Module | None) -> Iterator[Any]:
    """The groups of parameters that FSDP2 gathers together: its `FSDPParamGroup`s."""
    for module in () if model is None else model.modules():
        if isinstance(module, FSDPModule):
            yield from fsdp_groups(module)
