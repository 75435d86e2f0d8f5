"""Weights for a serving engine as named tensors, shared by the `stream_weights` of both front ends.

A quantized weight of the trainer becomes one or more weights of the engine: layers that the trainer fuses, such as gate
and up, are rows of one weight here and two weights there. Codes are never computed again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description, flat, key_of
from qshard._core.validation import closest, quote
from qshard._files.engine_formats import ENGINE_FORMATS, engine_tensors
from qshard.formats import Usage
from qshard.layout import plane

QSHARD = "qshard"
STREAM_FORMATS = (*ENGINE_FORMATS, QSHARD)
DEFAULT_BUCKET = 2**28  # bytes of codes that are gathered at a time


class EngineWeight(NamedTuple):
    """A weight of the engine: its name, and its rows in the weight of the trainer; None: all of them."""

    name: str
    rows: tuple[int, int] | None = None


def check_stream(format: Any, bucket_bytes: Any, op: str) -> None:
    """Raise ValueError unless `format` is a name of `STREAM_FORMATS` and `bucket_bytes` a positive integer."""
    if format not in STREAM_FORMATS:
        like = closest(str(format), STREAM_FORMATS, "the formats")
        raise ValueError(f"{op}: format ({quote(format)}) is unknown; {like}")
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise ValueError(f"{op}: bucket_bytes ({quote(bucket_bytes)}) is not a positive integer; pass a size in bytes")


def check_weight(format: str, weight: EngineWeight, what: Description, op: str) -> None:
    """Raise ValueError if an engine's format cannot hold a weight. It needs no data, so all ranks raise alike."""
    part = _rows_of(what, weight, op)
    if format != QSHARD:
        engine_tensors(format, weight.name, part, op=op)


def named_tensors(
    format: str, weight: EngineWeight, what: Description, whole: Plane, xp: Any, op: str
) -> Iterator[tuple[str, str, Any]]:
    """Yield name, safetensors dtype and contents of the tensors of a weight.

    Args:
      format: one of `STREAM_FORMATS`.
      weight: the weight of the engine.
      what: description of the weight of the trainer.
      whole: its rowwise plane; codes and one-byte scales as uint8.
      xp: the module of its arrays, as for `EngineTensor.encode`.
      op: name of the operation in errors.

    Contents of one-byte dtypes are uint8. They may share memory with `whole`.

    >>> import numpy as np
    >>> from qshard.formats import FP8_128x128
    >>> what = Description(format=FP8_128x128, shape=(256, 128), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> w13 = Plane(np.zeros((256, 128), np.uint8), np.ones((2, 1), np.float32))
    >>> up = EngineWeight("up_proj.weight", (128, 256))
    >>> [(name, dtype, x.shape) for name, dtype, x in named_tensors("deepseek", up, what, w13, np, "stream_weights")]
    [('up_proj.weight', 'F8_E4M3', (128, 128)), ('up_proj.weight_scale_inv', 'F32', (1, 1))]
    """
    part = _rows_of(what, weight, op)
    parts = whole if weight.rows is None else _slice(whole, what, *weight.rows)
    if format == QSHARD:
        dtypes = {"float32": "F32", "uint8": "U8"}
        for key, array in flat({Usage.ROWWISE: parts}).items():
            yield key_of(weight.name, key), dtypes[part.arrays()[key][0]], array
        return
    for each in engine_tensors(format, weight.name, part, op=op):
        yield each.name, each.dtype, each.encode(getattr(parts, each.part), xp)


def _rows_of(what: Description, weight: EngineWeight, op: str) -> Description:
    """Return the description of the rows of a weight. Raises ValueError if their edges split blocks."""
    if weight.rows is None:
        return what
    start, stop = weight.rows
    where = plane(what.format, what.shape, Usage.ROWWISE, op=op, name=weight.name)
    rows = where.scaled_shape[0]
    if where.scale_shape and (start % rows or (stop % rows and stop != what.shape[0])):
        raise ValueError(
            f"{op}: {weight.name} is rows {start} to {stop} of a weight {what.shape} whose blocks have {rows} rows "
            f"({what.format}); use sizes that are multiples of it, or a format with 1-D blocks"
        )
    return dataclasses.replace(what, shape=(stop - start, *what.shape[1:]))


def _slice(whole: Plane, what: Description, start: int, stop: int) -> Plane:
    """Return the plane of some rows, which split no block."""
    where = plane(what.format, what.shape, Usage.ROWWISE)
    scale, of_rows = whole.scale_inv, whole.global_scale_inv
    if where.scale_shape:
        rows = where.scaled_shape[0]
        scale = scale[start // rows : -(-stop // rows)]
    if of_rows is not None and where.global_scale_shape:
        of_rows = of_rows[start:stop]
    return Plane(whole.data[start:stop], scale, of_rows)


def buckets(sizes: Sequence[int], most: int) -> Iterator[range]:
    """Group consecutive indices into buckets of at most `most` bytes, or of one item.

    >>> list(buckets([3, 3, 9, 1], 6))
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    start = total = 0
    for i, size in enumerate(sizes):
        if i > start and total + size > most:
            yield range(start, i)
            start, total = i, 0
        total += size
    if sizes:
        yield range(start, len(sizes))
