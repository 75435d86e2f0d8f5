"""A process group, and a parameter of which each of its ranks owns a slice."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qshard._core.flat_shards import piece_bytes
from qshard.formats import Format
from qshard.torch_bridge._delayed_scaling import DelayedScale
from qshard.torch_bridge._optim.slices import QuantizedSlice
from qshard.torch_bridge._zero.placeholders import TakenGradient


class Ranks(NamedTuple):
    """A process group, or one process without any."""

    group: dist.ProcessGroup | None
    size: int
    rank: int

    @classmethod
    def of(cls, group: dist.ProcessGroup | None) -> Ranks:
        if group is None and not dist.is_initialized():
            return cls(None, 1, 0)
        group = group or dist.group.WORLD
        return cls(group, dist.get_world_size(group), dist.get_rank(group))


@dataclass(eq=False)
class Weight:
    """A parameter of the model, and the slice of it that this rank owns.

    Attributes:
      parameter: as it was, then as layers see it.
      sliced: what stands for it where only the slice of this rank is meant.
      shown: what others see between uses: `sliced` of sharded weights, else the parameter.
      owners: the modules that have it, and under which name.
      fmt: what it is gathered as; None: values of its dtype.
      first, start: its first byte in the buffer, and the first element of the slice.
      master: of the slice, float32, a view of the flat one: `[1, n]`, a row that states have scales along, or `[n]` of
        a weight with less than two axes.
      quantized: where the codes of the slice and the scales of the whole go; None if it is gathered as values,
      values: which then go here.
      cuts: the slices of all ranks.
      where, version: of values that users see, as they were published; to find out what was done to them.
    """

    name: str
    parameter: nn.Parameter
    owners: list[tuple[nn.Module, str]]
    fmt: Format | None = None
    delayed: DelayedScale | None = None
    first: int = 0
    start: int = 0
    master: nn.Parameter = field(init=False)
    cuts: list[tuple[int, int]] = field(init=False)
    sliced: nn.Parameter = field(init=False)
    shown: nn.Parameter = field(init=False)
    taken: TakenGradient = field(init=False)
    quantized: QuantizedSlice | None = None
    values: Tensor | None = None
    where: tuple[int, torch.dtype] | None = None
    version: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.parameter.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.bytes_of(self.size)

    @property
    def room(self) -> int:
        """With that for half a byte that a cut may leave of 4-bit codes: ours leave none, but ops want it."""
        return self.bytes if self.fmt is None else piece_bytes(self.fmt, self.size)

    def bytes_of(self, elements: int) -> int:
        """How long its first elements are in the buffer. No cut is amid a byte."""
        return elements * self.dtype.itemsize if self.fmt is None else elements // self.fmt.element.codes_per_byte

    def first_elements(self, end: int) -> int:
        """How many of its elements are before byte `end` of the buffer."""
        end = min(max(end - self.first, 0), self.bytes)
        return end // self.dtype.itemsize if self.fmt is None else end * self.fmt.element.codes_per_byte
