"""Weights for a serving engine as named tensors, shared by the `stream_weights` of both front ends.

A quantized weight of the trainer becomes one or more weights of the engine: layers that the trainer fuses, such as gate
and up, are rows of one weight here and two weights there. Codes are never computed again.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from qshard._core.serialization import Description
from qshard._core.validation import closest, quote
from qshard._files.engine_formats import ENGINE_FORMATS, STORED, EngineTensor, engine_tensors
from qshard.formats import Format, Usage
from qshard.layout import PlaneLayout, plane

QSHARD = "qshard"
STREAM_FORMATS = (*ENGINE_FORMATS, QSHARD)
DEFAULT_BUCKET = 2**28  # bytes of codes that are gathered at a time
MERGED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
"""Layers of one module that vLLM multiplies as one weight, by their names in checkpoints."""


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


def stream_tensors(format: str, weight: EngineWeight, what: Description, op: str) -> tuple[EngineTensor, ...]:
    """Plan the tensors of a weight of the engine. Their names are what follows the name of the weight.

    Args:
      format: one of `STREAM_FORMATS`.
      weight: the weight of the engine.
      what: description of the weight of the trainer, with a rowwise plane.
      op: name of the operation in errors.

    Raises:
      ValueError: the engine's format cannot hold the weight, or its rows split blocks. No data is needed, so all ranks
        raise alike.

    >>> import numpy as np
    >>> from qshard._core.quantize_steps import Plane
    >>> from qshard.formats import FP8_128x128
    >>> what = Description(format=FP8_128x128, shape=(256, 128), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> w13 = Plane(np.zeros((256, 128), np.uint8), np.ones((2, 1), np.float32))
    >>> up = EngineWeight("up_proj.weight", (128, 256))
    >>> tensors = stream_tensors("deepseek", up, what, "stream_weights")
    >>> [(each.name, each.dtype, each.contents(w13, np).shape) for each in tensors]
    [('', 'F8_E4M3', (128, 128)), ('_scale_inv', 'F32', (1, 1))]
    """
    where = plane(what.format, what.shape, Usage.ROWWISE, op=op, name=weight.name)
    rows: dict[str, tuple[int, int]] = {}
    part = what
    if weight.rows is not None:
        part, rows = _rows_of(what, where, weight, op)
    if format == QSHARD:
        tensors = tuple(
            EngineTensor(name=f".{key}", part=key.rpartition(".")[2], dtype=STORED[dtype], shape=size, part_shape=size)
            for key, (dtype, size) in part.arrays().items()
        )
    else:
        tensors = engine_tensors(format, weight.name, part, op=op)
    return tuple(
        dataclasses.replace(each, name=each.name.removeprefix(weight.name), rows=rows.get(each.part))
        for each in tensors
    )


def merged_weights(formats: Mapping[str, Format]) -> list[list[str]]:
    """Return the weights, by name, that engines merge although each has a global scale: they take one of the scales.

    >>> from qshard.formats import NVFP4
    >>> merged_weights(dict.fromkeys(["mlp.up_proj.weight", "mlp.down_proj.weight", "mlp.gate_proj.weight"], NVFP4))
    [['mlp.up_proj.weight', 'mlp.gate_proj.weight']]
    """
    found: dict[tuple[object, ...], list[str]] = {}
    for name, fmt in formats.items():
        prefix, _, layer = name.removesuffix(".weight").rpartition(".")
        layers = next((layers for layers in MERGED if layer in layers), None)
        if layers is not None and fmt.tensor_scaled and not fmt.per_tensor:
            found.setdefault((prefix, layers, fmt), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def shared_weights(
    format: str, formats: Mapping[str, Format], may_share: Callable[[list[str]], bool], op: str, stacklevel: int = 3
) -> list[list[str]]:
    """Return the weights of a stream that get one global scale, of the largest amax, because engines merge them.

    `formats` has the weights by name. `may_share` tells whether merged weights can be quantized with one scale. Codes
    cannot: the engine reads them with a wrong global scale, and a warning says so.
    """
    groups = [] if format == QSHARD else merged_weights(formats)
    found = [names for names in groups if may_share(names)]
    if apart := [names for names in groups if names not in found]:
        warnings.warn(
            f"{op}: {' and '.join(apart[0])} ({formats[apart[0][0]]}) have a global scale each, but vLLM takes one "
            "for all, so its values are wrong; stream values instead of codes, or a format without a global scale "
            "(MXFP8)",
            stacklevel=stacklevel,
        )
    return found


def _rows_of(
    what: Description, where: PlaneLayout, weight: EngineWeight, op: str
) -> tuple[Description, dict[str, tuple[int, int]]]:
    """Return the description of the rows of a weight, and their place in each array that has rows.

    Raises ValueError if the edges of the rows split blocks.
    """
    assert weight.rows is not None
    start, stop = weight.rows
    rows = where.scaled_shape[0]
    if where.scale_shape and (start % rows or (stop % rows and stop != what.shape[0])):
        raise ValueError(
            f"{op}: {weight.name} is rows {start} to {stop} of a weight {what.shape} whose blocks have {rows} rows "
            f"({what.format}); use sizes that are multiples of it, or a format with 1-D blocks"
        )
    places = {"data": (start, stop)}
    if where.scale_shape:
        places["scale_inv"] = (start // rows, -(-stop // rows))
    if where.global_scale_shape:
        places["global_scale_inv"] = (start, stop)
    return dataclasses.replace(what, shape=(stop - start, *what.shape[1:])), places


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
