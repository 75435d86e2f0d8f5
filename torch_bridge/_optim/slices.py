"""Flat slices of quantized weights on this rank, and the all-gather that joins them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.flat_shards import piece_bytes
from qshard._core.quantize_steps import Plane
from qshard._core.validation import FormatLike, as_format
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, slice_plane
from qshard.torch_bridge._ops.collectives import all_gather
from qshard.torch_bridge._quantized.stack import QuantizedStack
from qshard.torch_bridge._quantized.tensor import QuantizedTensor


@dataclass(eq=False)
class QuantizedSlice:
    """This rank's part of a quantized weight: the codes of its flat slice, and the scales of the whole weight.

    Attributes:
      format: the format of the weight.
      shape: shape of the whole weight.
      dtype: dtype of the whole weight.
      data: uint8, the codes from the byte with the first element of the slice on; `_core.flat_shards.piece_bytes` long.
        Half a byte that belongs to another rank is 0.
      scale_inv: scales of the whole weight, in the shape of `layout.plane`; scales of one byte are uint8.
      global_scale_inv: float32, the second scale of NVFP4; None for other formats.
      usage: the plane, `ROWWISE`, or `COLUMNWISE` for MXFP8 with 1-D blocks.
      is_stack: whether the weight is a stack of matrices with their own scales, as of a `QuantizedStack`.

    >>> slice_ = QuantizedSlice.empty("MXFP8_E4M3", (4, 64), 100)
    >>> slice_.data.shape, slice_.scale_inv.shape
    (torch.Size([100]), torch.Size([4, 2]))
    """

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: Tensor
    scale_inv: Tensor
    global_scale_inv: Tensor | None = None
    usage: Usage = Usage.ROWWISE
    is_stack: bool = False

    @classmethod
    def empty(
        cls,
        fmt: FormatLike,
        shape: tuple[int, ...],
        length: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        usage: Usage = Usage.ROWWISE,
        is_stack: bool = False,
        device: torch.device | str | None = None,
    ) -> QuantizedSlice:
        """Allocate a slice of `length` elements of a weight, with zero codes and scales, for `cast_master` to write to.

        Raises:
          ValueError: `fmt` does not fit `shape`, the shape of the whole weight.
        """
        fmt = as_format(fmt, "QuantizedSlice.empty")
        where = slice_plane(fmt, shape, usage, op="QuantizedSlice.empty", is_stack=is_stack)
        data = torch.zeros(piece_bytes(fmt, length), dtype=torch.uint8, device=device)
        return cls(fmt, shape, dtype, data, *empty_scales(fmt, where, device), usage, is_stack)

    @property
    def parts(self) -> Plane:
        return Plane(self.data, self.scale_inv, self.global_scale_inv)


def empty_scales(fmt: Format, where: PlaneLayout, device: torch.device | str | None) -> tuple[Tensor, Tensor | None]:
    """Allocate the scales of a plane as bytes: `scale_inv` and `global_scale_inv`, zeros."""
    scale_inv = torch.zeros(where.scale_shape, dtype=getattr(torch, fmt.stored_scale_dtype), device=device)
    whole = where.global_scale_shape
    return scale_inv, None if whole is None else torch.zeros(whole, dtype=torch.float32, device=device)


def gather_slices(
    slices: Sequence[QuantizedSlice], shards: Sequence[Sequence[tuple[int, int]]], group: dist.ProcessGroup
) -> list[QuantizedTensor]:
    """All-gather weights from the slices of all ranks, with one all-gather of bytes for all weights.

    Args:
      slices: this rank's slice of each weight.
      shards: for each weight, start and stop of the slice of each rank, from `plan_shards` or elsewhere.
      group: the ranks.

    Returns:
      The whole weights, bit for bit `quantize` of the whole masters.

    Raises:
      ValueError: `slices` and `shards` differ in length.

    Collective, also on ranks without elements, which send padding.

    >>> from qshard._core.flat_shards import plan_shards
    >>> from qshard.torch_bridge import cast_master
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> slice_ = QuantizedSlice.empty("FP8_E4M3", (2, 2), 4)
    >>> cast_master([slice_], [torch.tensor([1.0, 2.0, 4.0, 7.0])], [0], dist.group.WORLD, parity="master")
    >>> gather_slices([slice_], plan_shards([(2, 2)], "FP8_E4M3", 1), dist.group.WORLD)[0].dequantize()
    tensor([[1., 2.],
            [4., 7.]], dtype=torch.bfloat16)
    >>> dist.destroy_process_group()
    """
    if not slices:
        return []
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [
        [piece_bytes(s.format, of[r][1] - of[r][0]) for s, of in zip(slices, shards, strict=True)] for r in range(world)
    ]
    own = torch.cat([s.data[:size] for s, size in zip(slices, sizes[rank], strict=True)])
    parts = gather_parts(own, [sum(of_rank) for of_rank in sizes], group)
    pieces = [part.split(of_rank) for part, of_rank in zip(parts, sizes, strict=True)]
    weights = []
    for i, s in enumerate(slices):
        where = slice_plane(s.format, s.shape, s.usage, op="gather_slices", is_stack=s.is_stack)
        starts = [start for start, _ in shards[i]]
        data = join_pieces([pieces[r][i] for r in range(world)], starts, s.format, where.data_shape)
        planes = {s.usage: s.parts._replace(data=data)}
        rowwise, columnwise = planes.get(Usage.ROWWISE), planes.get(Usage.COLUMNWISE)
        kind = QuantizedStack if s.is_stack else QuantizedTensor
        weights.append(kind(s.format, s.shape, s.dtype, rowwise=rowwise, columnwise=columnwise))
    return weights


def gather_parts(own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """Gather flat tensors of any length from all ranks, with one all-gather of the longest length. Collective."""
    longest = max(lengths)
    received = own.new_empty(len(lengths) * longest)
    all_gather(received, torch.nn.functional.pad(own, (0, longest - own.numel())), group=group)
    return [received[r * longest : r * longest + length] for r, length in enumerate(lengths)]


def join_pieces(
    pieces: Sequence[Tensor], starts: Sequence[int], fmt: FormatLike, data_shape: tuple[int, ...]
) -> Tensor:
    """Join the codes of slices to the codes of a weight. Two halves of a shared byte are combined by OR.

    `pieces` are uint8, as in `QuantizedSlice.data`; longer ones are truncated at the end of the weight. `starts` has
    the index of the first element of each slice. No communication: `gather_slices` gathers and joins.

    >>> first, second = torch.tensor([[0x21, 0x03], [0x40, 0]], dtype=torch.uint8)
    >>> join_pieces([first, second[:1]], [0, 3], "NVFP4", (1, 2)).tolist() == [[0x21, 0x43]]
    True
    """
    fmt = as_format(fmt, "join_pieces")
    data = pieces[0].new_zeros(data_shape)
    flat = data.view(-1)
    for piece, start in zip(pieces, starts, strict=True):
        first = start // fmt.element.codes_per_byte
        there = flat[first : first + piece.numel()]
        there |= piece[: there.numel()]
    return data
