"""Quantized weights of a checkpoint as single entries, with their values and their codes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard._cli.errors import Misuse
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import KEY
from qshard._files.checkpoint import MOST_AXES, Checkpoint, Entry
from qshard._files.names import count_of, quote
from qshard._files.recognition import RecognizedWeight
from qshard._files.regrid import regrid
from qshard.formats import Format, Usage
from qshard.layout import matrix_shape
from qshard.numerics import _kernels as kernels


@dataclass(frozen=True, slots=True)
class QuantizedEntry(Entry):
    """A weight with codes and scales in several tensors. `dtype` is the name of its format, `shape` of its values.

    Attributes:
      weight: the weight as `recognize` found it.
      parts: entries of its tensors, in the order of `weight.tensors`.
    """

    weight: RecognizedWeight
    parts: tuple[Entry, ...]

    @property
    def bits(self) -> int:
        return self.weight.description.format.element.bits

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @property
    def kernel_dtype(self) -> str:
        return self.weight.description.dtype

    @property
    def refusal(self) -> str | None:
        return f"{len(self.shape)} axes: more than {MOST_AXES}" if len(self.shape) > MOST_AXES else None

    @property
    def tensors(self) -> tuple[Entry, ...]:
        return self.parts

    def read_plane(self, *, scales_only: bool = False) -> Plane:
        """Read the rowwise plane. With `scales_only` its data is empty."""
        arrays = {}
        for part, tensor in zip(self.parts, self.weight.tensors, strict=True):
            is_left_out = scales_only and tensor.part == "data"
            arrays[part.name] = np.broadcast_to(np.uint8(0), part.nbytes) if is_left_out else part.read_bytes()
        return self.weight.plane(arrays)

    def read(self) -> NDArray[Any]:
        """Read the values as float32, `fl(code * scale)`."""
        fmt = self.weight.description.format
        plane = _matrix(self.read_plane(), fmt)
        values: NDArray[Any] = quantize_steps.dequantize(kernels.ops, plane, fmt, Usage.ROWWISE, "float32")
        return values.reshape(self.shape)

    def format_as(self, fmt: Format, usages: tuple[Usage, ...]) -> Format | None:
        """Return the format that the codes have with the blocks of `fmt`, or None if they are not codes of `fmt`.

        Also None if `usages` has a plane that cannot be derived from the rowwise plane.
        """
        if usages != (Usage.ROWWISE,) and not fmt.shares_codes:
            return None
        found = regrid(self.read_plane(scales_only=True), self.weight.description, fmt)
        return None if found is None else found[1]

    def planes_as(self, fmt: Format, usages: tuple[Usage, ...]) -> dict[Usage, Plane] | None:
        """Return the codes as planes of `fmt`, or None as in `format_as`."""
        if usages != (Usage.ROWWISE,) and not fmt.shares_codes:
            return None
        found = regrid(self.read_plane(), self.weight.description, fmt)
        if found is None:
            return None
        planes = {Usage.ROWWISE: found[0]}
        if Usage.COLUMNWISE in usages:
            planes[Usage.COLUMNWISE] = quantize_steps.transpose_plane(kernels.ops, _matrix(found[0], fmt), fmt)
        return {usage: planes[usage] for usage in usages}


def _matrix(plane: Plane, fmt: Format) -> Plane:
    """Fold the leading axes of a plane into rows."""
    data = np.ascontiguousarray(plane.data.reshape(matrix_shape(plane.data.shape)))
    if fmt.per_tensor:
        return plane._replace(data=data)
    return Plane(data, plane.scale_inv.reshape(matrix_shape(plane.scale_inv.shape)), plane.global_scale_inv)


def with_quantized(checkpoint: Checkpoint) -> Checkpoint:
    """Replace the tensors of each quantized weight that is recognized by one entry, and add a note about them.

    Raises Misuse if `qshard convert` wrote the checkpoint: its scales would be taken for layers.
    """
    if KEY in checkpoint.metadata:
        path = quote(checkpoint.path)
        raise Misuse(f"{path} is already quantized by qshard; use the checkpoint that it was made from")
    found = checkpoint.quantized_weights()
    if not found:
        return checkpoint
    by_tensor = {tensor.name: weight for weight in found.values() for tensor in weight.tensors}
    entries: dict[str, Entry] = {}
    for name, entry in checkpoint.entries.items():
        weight = by_tensor.get(name)
        if weight is None:
            entries[name] = entry
        elif weight.name not in entries:
            parts = tuple(checkpoint.entries[tensor.name] for tensor in weight.tensors)
            what, first = weight.description, parts[0]
            entries[weight.name] = QuantizedEntry(
                weight.name, str(what.format), what.shape, first.file, first.offset, weight, parts
            )
    kinds = ", ".join(dict.fromkeys(entry.dtype for entry in entries.values() if isinstance(entry, QuantizedEntry)))
    note = f"{count_of(len(found), 'weight')} already quantized, read with their scales: {kinds}"
    return dataclasses.replace(checkpoint, entries=entries, notes=[*checkpoint.notes, note])
