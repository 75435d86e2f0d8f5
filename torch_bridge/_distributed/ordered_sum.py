"""Sums of gradients over ranks: sent in 16 or 8 bits by an all-to-all, added in float32 in the order of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from qshard._core.operands import OperandSpec
from qshard._core.quantize_steps import Plane
from qshard._core.validation import as_wire_format
from qshard.formats import Format, Usage
from qshard.layout import whole_units
from qshard.torch_bridge._ops.bind import into
from qshard.torch_bridge._quantized.plane_programs import dequantize, quantize_operand
from qshard.torch_bridge._quantized.validation import check_dtype

WireType = torch.dtype | Format | str
"""The dtype of gradients on the wire, or the format (or its name) of their codes."""


@dataclass(frozen=True)
class GradientWire:
    """The encoding of gradients on the wire: values of `dtype`, or codes of `format` if that is not None."""

    dtype: torch.dtype | None
    format: Format | None = None

    @classmethod
    def of(cls, op: str, name: str, given: WireType) -> GradientWire:
        """Check the argument `name` of `op`. Raises TypeError, or ValueError for a format that is not sent."""
        if isinstance(given, str | Format):
            return cls(None, as_wire_format(given, op, name))
        check_dtype(op, name, given)
        return cls(given)

    @property
    def unit(self) -> int:
        """Number of elements that each rank's part of a message is a multiple of."""
        return 1 if self.format is None else whole_units(self.format, Usage.ROWWISE)[1]

    def padded(self, length: int) -> int:
        return -(-length // self.unit) * self.unit

    def sum_in_order(
        self,
        values: Tensor,
        lengths: Sequence[int],
        total: Tensor,
        group: dist.ProcessGroup | None,
        *,
        fresh: bool,
        mean: bool = False,
        asynchronous: bool = False,
    ) -> Iterator[dist.Work | None]:
        """Send each rank its part of `values`, and add what all ranks send to this one. Yields each collective.

            total = (0 or total) + (decode(sent_0) + decode(sent_1) + ...) / (1 or ranks)

        Args:
          values: float dtype, flat: the parts for the ranks of `group`, one after another.
          lengths: elements of each part, a multiple of `unit`.
          total: float32 `[n]`; this rank's part without its padding, n at most its length.
          group: the ranks; None: this one alone.
          fresh: True overwrites `total`.
          mean: True divides the sum of the ranks by their number.
          asynchronous: True yields running collectives, False waits for each.
        """
        size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
        own, received = lengths[rank], []
        for array, per in self._encode(values):
            there = array
            if size > 1:
                there = array.new_empty(size * own // per)
                parts = [length // per for length in lengths]
                yield dist.all_to_all_single(
                    there, array, [own // per] * size, parts, group=group, async_op=asynchronous
                )
            received.append(there)
        added = self._decode(received, size, own)
        if own == total.numel():
            into(total).add_ranks(added, total, fresh=fresh, mean=mean)
        else:
            padded = F.pad(total, (0, own - total.numel()))
            into(padded).add_ranks(added, padded, fresh=fresh, mean=mean)
            total.copy_(padded[: total.numel()])

    def _encode(self, values: Tensor) -> Sequence[tuple[Tensor, int]]:
        """Return flat arrays to send, each with the number of values that an element is for."""
        if self.format is None:
            return [(values.to(self.dtype), 1)]
        planes, _ = quantize_operand(values.view(-1, self.unit), OperandSpec(self.format, Usage.ROWWISE))
        data, scale_inv, _ = planes[Usage.ROWWISE]
        return [(data.view(torch.uint8).view(-1), 1), (scale_inv.view(torch.uint8).view(-1), self.unit)]

    def _decode(self, received: Sequence[Tensor], size: int, own: int) -> Tensor:
        """Return `[size, own]`, one row for each rank. Codes become bfloat16, which has their values from 2^-126 up."""
        if self.format is None:
            return received[0].view(size, own)
        shape = size * own // self.unit, self.unit
        data = received[0].view(shape).view(getattr(torch, self.format.element.name))
        scale_inv = received[1].view(shape[0], 1).view(torch.float8_e8m0fnu)
        values = dequantize(Plane(data, scale_inv, None), self.format, Usage.ROWWISE, torch.bfloat16)
        return values.view(size, own)
