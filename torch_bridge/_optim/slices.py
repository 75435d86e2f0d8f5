"""Flat slices of quantized weights: what each rank holds of them, and the gather that makes them whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from qshard._core.flat_shards import FlatShards, piece_bytes
from qshard._core.quantize_steps import Plane
from qshard._core.validation import FormatLike, as_format
from qshard.formats import Format, Usage
from qshard.layout import plane
from qshard.torch_bridge._ops.collectives import all_gather
from qshard.torch_bridge._quantized.tensor import QuantizedTensor


@dataclass(eq=False)
class QuantizedSlice:
    """What a rank holds of a quantized weight: the codes of its flat slice, and the scales of the whole weight.

    Attributes:
      format: how it is stored.
      shape, dtype: of the whole weight.
      data: uint8, the codes from the byte of the first element of the slice on; `_core.flat_shards.piece_bytes` long.
        The half of a byte that belongs to another rank is 0.
      scale_inv, global_scale_inv: of the whole weight, in the shapes of `layout.plane`; bytes where a scale is one.
      usage: the plane: `ROWWISE`, or `COLUMNWISE` of MXFP8 vectors.
    """

    format: Format
    shape: tuple[int, ...]
    dtype: torch.dtype
    data: Tensor
    scale_inv: Tensor
    global_scale_inv: Tensor | None = None
    usage: Usage = Usage.ROWWISE

    @classmethod
    def empty(
        cls,
        fmt: FormatLike,
        shape: tuple[int, ...],
        length: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        usage: Usage = Usage.ROWWISE,
        device: torch.device | str | None = None,
    ) -> QuantizedSlice:
        """Room for a slice of `length` elements, of zeros, which `cast_master` fills.

        Raises:
          ValueError: `fmt` cannot hold `shape`.
        """
        fmt = as_format(fmt, "QuantizedSlice.empty")
        where = plane(fmt, shape, usage, op="QuantizedSlice.empty")
        scale_dtype = getattr(torch, fmt.stored_scale_dtype)
        whole = where.global_scale_shape
        return cls(
            fmt,
            shape,
            dtype,
            torch.zeros(piece_bytes(fmt, length), dtype=torch.uint8, device=device),
            torch.zeros(where.scale_shape, dtype=scale_dtype, device=device),
            None if whole is None else torch.zeros(whole, device=device),
            usage,
        )

    @property
    def parts(self) -> Plane:
        return Plane(self.data, self.scale_inv, self.global_scale_inv)


def gather_slices(
    slices: Sequence[QuantizedSlice], cuts: Sequence[FlatShards], group: dist.ProcessGroup
) -> list[QuantizedTensor]:
    """The whole weights of which each rank holds a slice, with one all-gather of bytes for all of them.

    Args:
      slices: of each weight, this rank's.
      cuts: of each weight, of all ranks: `starts` and `stops`, of `plan_shards` or any others.
      group: the ranks.

    Returns:
      The weights, bit for bit those of `quantize` of the whole. Collective: a rank without elements sends padding.
    """
    if not slices:
        return []
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    sizes = [
        [piece_bytes(s.format, cut.stops[r] - cut.starts[r]) for s, cut in zip(slices, cuts, strict=True)]
        for r in range(world)
    ]
    own = torch.cat([s.data[:size] for s, size in zip(slices, sizes[rank], strict=True)])
    parts = gather_parts(own, [sum(of_rank) for of_rank in sizes], group)
    pieces = [part.split(of_rank) for part, of_rank in zip(parts, sizes, strict=True)]
    weights = []
    for i, s in enumerate(slices):
        where = plane(s.format, s.shape, s.usage)
        data = join_pieces([pieces[r][i] for r in range(world)], cuts[i].starts, s.format, where.data_shape)
        planes = {s.usage: s.parts._replace(data=data)}
        rowwise, columnwise = planes.get(Usage.ROWWISE), planes.get(Usage.COLUMNWISE)
        weights.append(QuantizedTensor(s.format, s.shape, s.dtype, rowwise=rowwise, columnwise=columnwise))
    return weights


def gather_parts(own: Tensor, lengths: Sequence[int], group: dist.ProcessGroup) -> list[Tensor]:
    """What each rank has, flat and of any length, with one all-gather of the longest. Collective."""
    room = max(lengths)
    received = own.new_empty(len(lengths) * room)
    all_gather(received, torch.nn.functional.pad(own, (0, room - own.numel())), group=group)
    return [received[r * room : r * room + length] for r, length in enumerate(lengths)]


def join_pieces(
    pieces: Sequence[Tensor], starts: Sequence[int], fmt: FormatLike, data_shape: tuple[int, ...]
) -> Tensor:
    """The codes of a weight from those of its slices. The two halves of a byte that slices share meet by OR.

    Args:
      pieces: uint8, as in `QuantizedSlice.data`, of any length from `piece_bytes` of the slice on.
      starts: of the slices, in elements.
      fmt: the format.
      data_shape: of the codes of the whole.
    """
    fmt = as_format(fmt, "join_pieces")
    data = pieces[0].new_zeros(data_shape)
    flat = data.view(-1)
    for piece, start in zip(pieces, starts, strict=True):
        first = start // fmt.element.codes_per_byte
        there = flat[first : first + piece.numel()]
        there |= piece[: there.numel()]
    return data
