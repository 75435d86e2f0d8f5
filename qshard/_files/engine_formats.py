"""Tensors of a quantized weight in the files of serving engines: names, dtypes, shapes, and the direction of scales.

`engine_tensors` maps the weight `NAME` `[*lead, N, K]` to its tensors in a format. They hold the arrays of its
rowwise plane, so codes are never computed again: they change names, and scales are repeated, reshaped or inverted.

| format | quantized as | tensors |
| --- | --- | --- |
| deepseek | FP8, 128 x 128 | `NAME` F8_E4M3; `NAME_scale_inv` F32 `[N / 128, K / 128]` |
| compressed-tensors | FP8 | `NAME` F8_E4M3; `NAME_scale` F32 `[N, 1]` or `[N / 128, K / 128]` |
| | MXFP8 | `NAME` F8_E4M3; `NAME_scale` U8 `[N, K / 32]` |
| | MXFP4 | `NAME_packed` U8 `[N, K / 2]`; `NAME_scale` U8 `[N, K / 32]` |
| | NVFP4 | `NAME_packed` U8 `[N, K / 2]`; `NAME_scale` F8_E4M3 `[N, K / 16]`; `NAME_global_scale` F32 `[1]` |
| modelopt | FP8 | `NAME` F8_E4M3; `NAME_scale` F32 `[N]`, or `[N / 128, 1, K / 128, 1]` |
| | MXFP8 | `NAME` F8_E4M3; `NAME_scale` U8 `[N, K / 32]` |
| | NVFP4 | `NAME` U8 `[N, K / 2]`; `NAME_scale` F8_E4M3 `[N, K / 16]`; `NAME_scale_2` F32 `[]` |

All scales decode, `value = code * scale`, except `NAME_global_scale`, which encodes: `value = code * scale /
global_scale`. All formats pack the even element of two 4-bit codes in the low nibble, as qshard does. E8M0 scales are
stored as their bytes. 2-D blocks of MX and NVFP4 weights have one scale for 32 or 16 rows; the formats have one scale a
row, so it is repeated. The scale of a whole FP8 weight is repeated for each row, too: vLLM multiplies q, k and v as one
weight, and would quantize them again for one scale. In modelopt the format with one scale also needs calibrated scales
of activations.

Sources: DeepSeek-V3, inference/kernel.py `weight_dequant` and inference/fp8_cast_bf16.py; compressed-tensors 0.20,
compressors/{naive_quantized,mxfp8,mxfp4,nvfp4}/base.py; nvidia-modelopt 0.47, torch/export/quant_utils.py and
torch/quantization/qtensor/{nvfp4,mxfp8}_tensor.py; vLLM, layers/quantization/modelopt.py (the shapes that it loads).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description
from qshard._core.validation import closest, join_names, quote
from qshard.formats import E2M1, E4M3, E8M0, Usage
from qshard.layout import Shape, matrix_shape, plane

Array = Any
STORED = {"uint8": "U8", "float32": "F32"}  # safetensors dtypes of the arrays of a plane
FLOAT_MAX = float.fromhex("0x1.fffffep127")  # largest finite float32


class Scheme(enum.StrEnum):
    """Dtypes of codes and scales, and the elements that share a scale: the part of a format that engines distinguish.

    Its value names a format of the scheme, for errors.
    """

    FP8_TENSOR = "FP8_E4M3"
    FP8_CHANNEL = "FP8_E4M3 with a scale a row"
    FP8_BLOCK = "FP8_128x128"
    MXFP8 = "MXFP8_E4M3"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"


@dataclass(frozen=True)
class _Field:
    """One tensor of a weight: suffix of its name, its array in a plane, safetensors dtype, shape from `[*lead, N, K]`.

    `reciprocal` is true if the tensor is 1 / the array.
    """

    suffix: str
    part: str
    dtype: str
    shape: Callable[[Shape], Shape]
    reciprocal: bool = False


def _blocks(rows: int, cols: int) -> Callable[[Shape], Shape]:
    return lambda shape: (*shape[:-2], -(-shape[-2] // rows), -(-shape[-1] // cols))


def _spread_blocks(shape: Shape) -> Shape:
    *lead, rows, cols = _blocks(128, 128)(shape)
    return (*lead, rows, 1, cols, 1)


_FP8 = _Field("", "data", "F8_E4M3", lambda shape: shape)
_ROW_SCALE = _Field("_scale", "scale_inv", "F32", lambda shape: (*shape[:-1], 1))
_MX_SCALE = _Field("_scale", "scale_inv", "U8", _blocks(1, 32))
_NV_SCALE = _Field("_scale", "scale_inv", "F8_E4M3", _blocks(1, 16))
_PACKED = _Field("_packed", "data", "U8", _blocks(1, 2))

_FIELDS: dict[str, dict[Scheme, tuple[_Field, ...]]] = {
    "deepseek": {
        Scheme.FP8_BLOCK: (_FP8, _Field("_scale_inv", "scale_inv", "F32", _blocks(128, 128))),
    },
    "compressed-tensors": {
        Scheme.FP8_TENSOR: (_FP8, _ROW_SCALE),
        Scheme.FP8_CHANNEL: (_FP8, _ROW_SCALE),
        Scheme.FP8_BLOCK: (_FP8, _Field("_scale", "scale_inv", "F32", _blocks(128, 128))),
        Scheme.MXFP8: (_FP8, _MX_SCALE),
        Scheme.MXFP4: (_PACKED, _MX_SCALE),
        Scheme.NVFP4: (
            _PACKED,
            _NV_SCALE,
            _Field("_global_scale", "global_scale_inv", "F32", lambda _: (1,), reciprocal=True),
        ),
    },
    "modelopt": {
        Scheme.FP8_TENSOR: (_FP8, _Field("_scale", "scale_inv", "F32", lambda shape: shape[:-1])),
        Scheme.FP8_CHANNEL: (_FP8, _Field("_scale", "scale_inv", "F32", lambda shape: shape[:-1])),
        Scheme.FP8_BLOCK: (_FP8, _Field("_scale", "scale_inv", "F32", _spread_blocks)),
        Scheme.MXFP8: (_FP8, _MX_SCALE),
        Scheme.NVFP4: (
            _Field("", "data", "U8", _blocks(1, 2)),
            _NV_SCALE,
            _Field("_scale_2", "global_scale_inv", "F32", lambda _: ()),
        ),
    },
}
ENGINE_FORMATS = tuple(_FIELDS)


@dataclass(frozen=True, kw_only=True)
class EngineTensor:
    """One tensor of a weight in the files of an engine.

    Attributes:
      name: name in the file.
      part: array of the weight's rowwise plane that it holds: `data`, `scale_inv` or `global_scale_inv`.
      dtype: safetensors dtype: "F8_E4M3", "U8" or "F32".
      shape: shape in the file.
      part_shape: shape of the array in the plane.
      repeats: (rows, cols) of the tensor for each element of the array.
      reciprocal: whether the tensor holds 1 / the array.
      rows: first and last row of the array in a plane of more rows; None: all of them.
    """

    name: str
    part: str
    dtype: str
    shape: Shape
    part_shape: Shape
    repeats: tuple[int, int] = (1, 1)
    reciprocal: bool = False
    rows: tuple[int, int] | None = None

    def contents(self, whole: Plane, xp: Any) -> Array:
        """Return `encode` of the array of a rowwise plane, or of its `rows`."""
        array = getattr(whole, self.part)
        return self.encode(array if self.rows is None else array[slice(*self.rows)], xp)

    def encode(self, array: Array, xp: Any) -> Array:
        """Return the contents of the tensor, as uint8 for one-byte dtypes, or float32.

        Args:
          array: the array of the plane, `part_shape`: codes and one-byte scales as uint8, other scales as float32.
          xp: the module of the array, numpy or torch.

        The result may share memory with `array`.
        """
        if self.reciprocal:
            array = _invert(array).clip(max=FLOAT_MAX)
        if self.repeats != (1, 1):
            (rows, cols), (down, across) = matrix_shape(self.part_shape), self.repeats
            array = xp.broadcast_to(array.reshape(rows, 1, cols, 1), (rows, down, cols, across))
        return array if array.shape == self.shape else array.reshape(self.shape)

    def decode(self, array: Array) -> Array:
        """Return the array of the plane from the contents of the tensor: the inverse of `encode`.

        Of repeated scales the first is taken; `encode` of the result tells whether all are equal. 1 / (1 / x) may
        differ from x in its last bit, but 1 / (1 / (1 / x)) is 1 / x, so values never differ.
        """
        if self.repeats != (1, 1):
            (rows, cols), (down, across) = matrix_shape(self.part_shape), self.repeats
            array = array.reshape(rows, down, cols, across)[:, 0, :, 0]
        array = array.reshape(self.part_shape)
        return _invert(array) if self.reciprocal else array


def _invert(array: Array) -> Array:
    """Return 1 / array. The inverse of 0, or of a subnormal number, may be infinite, which NumPy would warn of."""
    with np.errstate(over="ignore", divide="ignore"):
        return 1 / array


def scheme_of(what: Description) -> Scheme | None:
    """Return the scheme of a quantized weight, or None if no engine has it.

    >>> from qshard.formats import FP8_128x128, MXFP6_E2M3, NVFP4_16x16
    >>> of = lambda fmt: Description(format=fmt, shape=(128, 128), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> [str(scheme_of(of(fmt))) for fmt in (FP8_128x128, NVFP4_16x16, MXFP6_E2M3)]
    ['FP8_128x128', 'NVFP4', 'None']
    """
    fmt, where = what.format, plane(what.format, what.shape, Usage.ROWWISE)
    if (fmt.element, fmt.scaling.dtype) == (E4M3, "float32"):
        if fmt.per_tensor:
            return Scheme.FP8_TENSOR
        units = {(1, matrix_shape(what.shape)[1]): Scheme.FP8_CHANNEL, (128, 128): Scheme.FP8_BLOCK}
        return units.get(where.scaled_shape)
    if where.global_scale_shape not in (None, ()):
        return None
    schemes = {(E4M3, E8M0.name): Scheme.MXFP8, (E2M1, E8M0.name): Scheme.MXFP4, (E2M1, E4M3.name): Scheme.NVFP4}
    return schemes.get((fmt.element, fmt.scaling.dtype))


def engine_tensors(engine: str, name: str, what: Description, *, op: str = "to_engine") -> tuple[EngineTensor, ...]:
    """Return the tensors of a weight in the files of an engine.

    Args:
      engine: one of `ENGINE_FORMATS`.
      name: name of the weight, such as `model.layers.0.mlp.up_proj.weight`.
      what: its description, with a rowwise plane.
      op: name of the operation in errors.

    Raises:
      ValueError: the engine's format is unknown, or cannot hold this format or shape.

    >>> from qshard.formats import NVFP4_16x16
    >>> of_w = Description(format=NVFP4_16x16, shape=(32, 64), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> for each in engine_tensors("compressed-tensors", "up.weight", of_w):
    ...     print(each.name, each.part, each.dtype, each.shape, each.repeats)
    up.weight_packed data U8 (32, 32) (1, 1)
    up.weight_scale scale_inv F8_E4M3 (32, 4) (16, 1)
    up.weight_global_scale global_scale_inv F32 (1,) (1, 1)
    """
    if engine not in _FIELDS:
        raise ValueError(f"{op}: format ({quote(engine)}) is unknown; {closest(engine, ENGINE_FORMATS, 'the formats')}")
    if Usage.ROWWISE not in what.planes or len(what.shape) < 2:
        need = "no rowwise plane" if Usage.ROWWISE not in what.planes else f"fewer than two axes {what.shape}"
        raise ValueError(f"{op}: {name} has {need}, which {engine} needs; quantize a matrix with usage=ROWWISE")
    scheme = scheme_of(what)
    if scheme is None or scheme not in _FIELDS[engine]:
        others = [other for other in ENGINE_FORMATS if scheme in _FIELDS[other]]
        instead = f"write {others[0]}, or " if others else ""
        raise ValueError(
            f"{op}: {name} ({what.format}) has no form in {engine}; {instead}quantize to {join_names(_FIELDS[engine])}"
        )
    where = plane(what.format, what.shape, Usage.ROWWISE, op=op, name=name)
    parts = {"data": where.data_shape, "scale_inv": where.scale_shape, "global_scale_inv": where.global_scale_shape}
    found = []
    for each in _FIELDS[engine][scheme]:
        part_shape, shape = parts[each.part], each.shape(what.shape)
        assert part_shape is not None
        found.append(
            EngineTensor(
                name=name + each.suffix,
                part=each.part,
                dtype=each.dtype,
                shape=shape,
                part_shape=part_shape,
                repeats=_repeats(part_shape, shape, what, op=op, name=name, engine=engine),
                reciprocal=each.reciprocal,
            )
        )
    return tuple(found)


def _repeats(part: Shape, stored: Shape, what: Description, *, op: str, name: str, engine: str) -> tuple[int, int]:
    """Return how often a tensor has each element of an array of a plane: once, or once for each row of a block."""
    times, rest = divmod(math.prod(stored), math.prod(part))
    rows = plane(what.format, what.shape, Usage.ROWWISE).scaled_shape[0]
    many = math.prod(what.shape[:-2]) > 1 and math.prod(stored) > 1
    if rest or (times == 1 and many and what.shape[-2] % rows):
        raise ValueError(
            f"{op}: blocks of {name} {what.shape} span matrices that {engine} scales apart; split it first"
        )
    return times, 1
