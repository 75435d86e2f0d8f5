"""Shape, position and casts of the local shard of a weight. `scale_state.py` has the glossary."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from qshard._core.flat_shards import FlatSlice
from qshard._core.placement import Box, box_amax, cast_box, chunk_range
from qshard.formats import Format, Usage
from qshard.layout import plane, splits_stack, stack_plane
from qshard.torch_bridge._distributed.tensor_shards import ShardSpec
from qshard.torch_bridge._ops.bind import dtype_name, into, ops
from qshard.torch_bridge._ops.flat_plan import xp


class ShardPlan:
    """Shape, position and casts of the local shard of one weight. Computed once for each weight and sharding.

    A scale needs the amax of its whole block, and shard boundaries may split blocks. So ranks merge their amaxes,
    compute all scales from the result, and each casts its shard with its part of the scales.

    A shard of rows is a flat slice and takes the steps of `_core.flat_shards`, as the slices of optimizers do. So does
    a shard of columns of a per-tensor format, where positions do not matter. A shard of columns of a block format is a
    box, and its edges may split blocks (`_core.placement`). FSDP2 shards columns into equal parts.

    A weight with three axes is a stack of matrices with their own scales. A shard of whole matrices is a flat slice. A
    shard of rows or columns of every matrix is a slice of a stack of smaller matrices if a scale serves a whole matrix,
    and a box of three axes otherwise. So is any shard of a stack if blocks of the flat weight would join rows of two
    matrices.

    Attributes:
      device: where ranks compute. An offloaded shard is elsewhere.
      group: ranks with the other shards; None if this rank has the whole weight.
      dim: the axis of the weight that is sharded.
      is_stack: True for a stack of matrices.
      buffer_size: bytes of a buffer to cast into. With 4-bit codes one byte more than the padded codes, because a flat
        slice may start in the middle of a byte; a shard of whole rows leaves it unused.
      splits_blocks: True if a boundary of shards of rows splits a block, or shards have different sizes.
      packs_shards: True if 4-bit codes are sharded on another axis than the first: FSDP2, which concatenates shards
        there, must then be told that there are half as many columns.
      box: the position of a shard that is not a slice; None if the shard is a slice.
      block: the elements that share a scale; the whole matrix for per-tensor formats.
      part: the sharding of a larger tensor by tensor parallelism, if the weight is one shard of it; else None. None for
        stacks: expert parallelism shards them between experts, which have their own scales.
      is_delayed: True if the scales come from earlier steps.

    Raises:
      ValueError: the format does not support the shape.
      NotImplementedError: two ranks would share a byte. All of them raise.
    """

    def __init__(
        self,
        op: str,
        name: str,
        fmt: Format,
        shard: Tensor,
        shape: tuple[int, ...],
        mesh: DeviceMesh | None,
        mesh_dim: int | None,
        part: ShardSpec | None,
        is_delayed: bool,
    ):
        """Plan a shard of a weight over an axis of a mesh. `mesh_dim` None: this rank has the whole weight.

        Errors name the caller `op` and the weight `name`.
        """
        shape = tuple(shape)
        sizes = zip(shape, shard.shape, strict=True)
        self.dim = next((dim for dim, (whole, own) in enumerate(sizes) if dim and own != whole), 0)
        self.is_stack = len(shape) > 2
        self._rows = shard.shape[0]
        ranks, rank = 1, 0
        self.group: Any = None
        if mesh is not None and mesh_dim is not None:
            ranks, rank, self.group = mesh.size(mesh_dim), mesh.get_local_rank(mesh_dim), mesh.get_group(mesh_dim)
        layout = stack_plane if self.is_stack else plane
        self.layout = where = layout(fmt, shape, Usage.ROWWISE, op=op, name=name)
        width, per_byte = shard.shape[-1], fmt.element.codes_per_byte
        if width % per_byte:
            raise NotImplementedError(
                f"{op}: {name} {shape} has {ranks} shards of {width} columns, but {per_byte} codes of "
                f"{fmt} share a byte; shard its rows"
            )
        _, longest = chunk_range(shape[self.dim], ranks, 0)
        start, _ = chunk_range(shape[self.dim], ranks, rank)
        self.device = compute_device(mesh, shard)
        self.fmt, self.shape, self.dtype, self.is_delayed = fmt, shape, dtype_name(shard.dtype), is_delayed
        padded = [longest if dim == self.dim else size for dim, size in enumerate(shape)]
        self.padded_shape = (*padded[:-1], width // per_byte)
        self.buffer_size = math.prod(self.padded_shape) + per_byte - 1
        self.packs_shards = fmt.element.packed and self.dim != 0
        self.part = None if self.is_stack else part
        self.facts = (str(fmt), self.shape, self.dtype, self.dim, ranks, part and part.placements)
        splits_rows = bool(where.scale_shape) and ranks > 1 and longest % where.scaled_shape[0] != 0
        self.splits_blocks = splits_rows or longest * ranks != shape[self.dim]
        self.block = (1,) * (len(shape) - 2) + where.scaled_shape
        self.box: Box | None = None
        is_slice = fmt.per_tensor or (self.dim == 0 and not (self.is_stack and splits_stack(fmt, shape)))
        first = start * math.prod(shape[1:]) if self.dim == 0 and is_slice else 0
        sliced = shape
        if self.is_stack and self.dim:
            # With one scale for a matrix, its part on this rank is a matrix too, and their amaxes are merged.
            sliced = tuple(shard.shape) if fmt.per_tensor else shape
        self.slice = FlatSlice(sliced, fmt, self.dtype, first, is_stack=self.is_stack)
        if not is_slice:
            starts = tuple(start if dim == self.dim else 0 for dim in range(len(shape)))
            self.box = Box(shape, starts, tuple(shard.shape))

    @property
    def local_matrices(self) -> slice | EllipsisType:
        """The matrices of a stack that the shard has parts of, as an index of `[E]`; `...` for one matrix."""
        if not self.is_stack:
            return ...
        first = self.slice.start // math.prod(self.shape[1:])
        return slice(first, first + self._rows) if self.dim == 0 else slice(None)

    @property
    def gather_key(self) -> tuple[Any, ...]:
        """Equal for weights that one `CodeGather` gathers."""
        of_part = None if self.part is None else (id(self.part.mesh), self.part.placements)
        return id(self.group), self.splits_blocks, self.is_delayed, of_part

    @property
    def cast_slice(self) -> FlatSlice:
        """The rows to cast without the amaxes of other ranks: a matrix of their own, unless a block is split."""
        rows = (self._rows, *self.shape[1:])
        return self.slice if self.splits_blocks else FlatSlice(rows, self.fmt, self.dtype)

    def write_box_amaxes(self, shard: Tensor, grid: Tensor, whole: Tensor | None) -> None:
        """Write the amaxes of a box.

        `grid` has one entry for each block of the weight; blocks outside the box stay 0. `whole` is the amax of the
        shard, or of its part of each matrix, for formats with a global scale.
        """
        if self.box is None or not shard.numel():
            return
        found = box_amax(ops, xp, shard, self.box, self.block, grid)
        if whole is None:
            return
        if self.is_stack:
            whole = whole[self.box.start[0] : self.box.stop[0]]
        whole.copy_(ops.amax_tensor(found, lead=int(self.is_stack)))

    def buffer_in(self, part: Tensor) -> Tensor:
        """Return a buffer to cast into at the start of `part`, shaped like the padded codes if it has no extra byte."""
        if self.buffer_size == math.prod(self.padded_shape):
            return part.as_strided(self.padded_shape, self._padded_strides)
        return part[: self.buffer_size]

    def padded_view(self, buffer: Tensor) -> Tensor:
        is_padded = buffer.shape == self.padded_shape
        return buffer if is_padded else buffer.as_strided(self.padded_shape, self._padded_strides)

    def cast_box(self, shard: Tensor, scale: Tensor, buffer: Tensor) -> None:
        """Cast a box into a buffer. `FlatPlan.cast` casts slices."""
        assert self.box is not None
        if not shard.numel():
            return
        codes, of_blocks = self.padded_view(buffer)[: shard.shape[0]], scale[self.box.blocks(self.block)].contiguous()
        outer = self.box.aligned(self.block)
        cast = cast_box(into(codes) if outer == self.box else ops, xp, shard, self.box, self.fmt, self.block, of_blocks)
        if outer != self.box:
            *rows, columns = self.box.within(outer)
            first = columns.start // self.fmt.element.codes_per_byte
            codes.copy_(cast[(*rows, slice(first, first + codes.shape[-1]))])

    def codes(self, gathered: Tensor) -> Tensor:
        """Return the codes of the weight: a view of the gathered memory without the padding at its end."""
        return gathered.as_strided(self.layout.data_shape, self._data_strides)

    @functools.cached_property
    def _padded_strides(self) -> tuple[int, ...]:
        return _strides_of(self.padded_shape)

    @functools.cached_property
    def _data_strides(self) -> tuple[int, ...]:
        return _strides_of(self.layout.data_shape)


def compute_device(mesh: DeviceMesh | None, shard: Tensor) -> torch.device:
    """Return the device where the ranks of a mesh compute, which an offloaded shard is not on."""
    if mesh is None:
        return shard.device
    kind = mesh.device_type
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a row-major array."""
    return tuple(itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1))[::-1]
