"""Statistics of the error that a format makes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qshard import reference
from qshard.formats import FORMATS, Format, Usage
from qshard.layout import Shape, plane


@dataclass(frozen=True, kw_only=True)
class Stats:
    """What one plane of one format does to `x`, with `value` for what is stored.

    Errors are over the elements whose `x` and `value` are finite; shares are of all elements. An empty array has an
    SQNR of infinity, as nothing is lost, and zeros elsewhere.

    Attributes:
      format, usage, shape: what was measured. A rotated plane is compared with the rotated tensor.
      sqnr_db: signal to quantization noise, `10 * log10(sum(x**2) / sum((value - x)**2))`; infinity without noise.
      max_relative_error: the largest `|value - x| / |x|` over `x != 0`. A zero that was made counts as 1.
      mean_relative_error: the mean of the same.
      zeros_made: share with `x != 0` and `value == 0`.
      saturated: share that is too large for its scale, beyond what rounding explains: it is stored as the largest
        element although `|x| > (max + step / 2) * scale`, where `step` is the distance to the element before `max`.
      subnormal: share whose code is a subnormal of the element format, which has fewer significant bits.
      nonfinite_made: share with `x` finite and `value` not, for example because a NaN shares its block.
      bits_per_element: of data and all scales.
      scale_histogram: `floor(log2(scale))` -> number of blocks; `scale` is all that the elements of the block are
        multiplied by. A scale of 0, infinity or NaN has no exponent and is left out.
      error_by_exponent: `floor(log2(|x|))` -> mean relative error of the elements of that size.
    """

    format: Format
    usage: Usage
    shape: Shape
    sqnr_db: float
    max_relative_error: float
    mean_relative_error: float
    zeros_made: float
    saturated: float
    subnormal: float
    nonfinite_made: float
    bits_per_element: float
    scale_histogram: Mapping[int, int]
    error_by_exponent: Mapping[int, float]


@np.errstate(all="ignore")
def stats(x: Any, fmt: Format, usage: Usage = Usage.ROWWISE, *, seed: int = 0) -> Stats:
    """Quantize `x` and measure what it costs. `Stats` has the formulas.

    Args:
      x: `[*lead, K]`, an array of NumPy, JAX or PyTorch on any device, whatever has DLPack, or nested lists. All but
        bfloat16 and float16 is rounded to float32 first, and is compared as such.
      fmt: the format.
      usage: `ROWWISE` or `COLUMNWISE`.
      seed: of stochastic rounding.

    Returns:
      The statistics.

    Raises:
      TypeError: `x` does not hold real numbers.
      ValueError: `fmt` has no such plane of `x`, or `usage` is not one plane.

    Works on the host: a sharded JAX array comes there whole, and of a sharded torch tensor give the local part or the
    full one. Formats whose scales are of blocks alone give the error of a shard whatever the other shards hold.

    >>> from qshard.formats import FP8_E4M3
    >>> s = stats([448.0, 1.0, 17.0, 0.0009], FP8_E4M3)  # the scale is 1: 17 becomes 16, and 0.0009 becomes 0
    >>> s.zeros_made, s.max_relative_error, round(s.sqnr_db, 2), s.scale_histogram
    (0.25, 1.0, 53.03, {0: 1})

    Sources: those of each format are in `qshard.formats`.
    """
    array = as_float(x, "stats")
    plane(fmt, array.shape, usage, op="stats")
    quantized = reference.quantize(array, fmt, usage, seed=seed)
    stored = quantized.rowwise if usage is Usage.ROWWISE else quantized.columnwise
    assert stored is not None
    given = reference.what_is_stored(array, fmt, usage).astype(np.float64)
    value = quantized.dequantize(np.float32, usage=usage).astype(np.float64)
    element = np.abs(quantized.elements(usage).astype(np.float64))
    scale = quantized.scales(usage).astype(np.float64)
    of_blocks = quantized.block_scales(usage)
    size, top = np.abs(given), fmt.element.max
    step = 2.0 ** (fmt.element.max_exponent - fmt.element.mantissa_bits)
    finite = np.isfinite(given) & np.isfinite(value)
    error, counted = np.abs(value - given), finite & (given != 0)
    relative = error[counted] / size[counted]
    noise = float(np.sum(error[finite] ** 2))
    bits = sum(8 * part.nbytes for part in (stored.data, stored.scale_inv, stored.global_scale_inv) if part is not None)
    exponents, errors, counts = _group(_exponent(size[counted]), relative)
    scale_exponents, _, scale_counts = _group(_exponent(of_blocks[np.isfinite(of_blocks) & (of_blocks > 0)]))
    return Stats(
        format=fmt,
        usage=usage,
        shape=array.shape,
        sqnr_db=10 * math.log10(float(np.sum(given[finite] ** 2)) / noise) if noise else math.inf,
        max_relative_error=float(np.max(relative, initial=0)),
        mean_relative_error=float(np.mean(relative)) if relative.size else 0.0,
        zeros_made=_share((given != 0) & (value == 0)),
        saturated=_share((element == top) & (scale > 0) & (size > (top + step / 2) * scale)),
        subnormal=_share((element > 0) & (element < 2.0 ** (1 - fmt.element.bias))),
        nonfinite_made=_share(np.isfinite(given) & ~np.isfinite(value)),
        bits_per_element=bits / array.size if array.size else 0.0,
        scale_histogram=dict(zip(scale_exponents, scale_counts, strict=True)),
        error_by_exponent={e: total / n for e, total, n in zip(exponents, errors, counts, strict=True)},
    )


def compare(
    x: Any, formats: Iterable[Format] | None = None, usage: Usage = Usage.ROWWISE, *, seed: int = 0
) -> list[Stats]:
    """`stats` of several formats.

    Args:
      x, usage, seed: as for `stats`.
      formats: in this order; by default, every format of `qshard.formats.FORMATS` that can hold `x`.

    Raises:
      TypeError, ValueError: as for `stats`, for formats that were asked for.

    Sharded arrays: as for `stats`.

    >>> [f"{s.format}: {s.bits_per_element}" for s in compare(np.ones((16, 48)))][-2:]
    ['NVFP4: 4.541666666666667', 'NVFP4_16x16: 4.072916666666667']
    """
    array = as_float(x, "compare")
    if formats is None:
        formats, _ = fitting(array.shape, usage)
    return [stats(array, fmt, usage, seed=seed) for fmt in formats]


def fitting(shape: Shape, usage: Usage) -> tuple[list[Format], dict[str, str]]:
    """The formats that can hold this plane, and by name why the others cannot."""
    plane(FORMATS["FP8_E4M3"], shape, usage)  # It holds any shape, so this raises if `usage` is not one plane.
    left_out = {}
    for name, fmt in FORMATS.items():
        try:
            plane(fmt, shape, usage, op=name)
        except ValueError as error:
            left_out[name] = str(error)
    return [fmt for name, fmt in FORMATS.items() if name not in left_out], left_out


def as_float(x: Any, op: str) -> NDArray[Any]:
    """`x` in NumPy, as a dtype that `reference.quantize` takes."""
    if hasattr(x, "detach"):  # torch. NumPy has no bfloat16 of torch, and float32 holds its numbers exactly.
        x = x.detach().cpu().float()
    array = np.from_dlpack(x) if hasattr(x, "__dlpack__") and not hasattr(x, "__array__") else np.asarray(x)
    if array.dtype.kind in "cOSUMm" or array.dtype.names:
        raise TypeError(f"{op}: x ({array.dtype}) is not an array of real numbers; take its parts")
    if array.dtype.name in ("float32", "bfloat16", "float16"):
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32)


def _exponent(x: NDArray[Any]) -> NDArray[Any]:
    """floor(log2(x)), exactly."""
    return np.asarray(np.frexp(x)[1]) - 1


def _group(keys: NDArray[Any], values: NDArray[Any] | None = None) -> tuple[list[int], list[float], list[int]]:
    """The different keys, ascending, with the sum of the values and the number of each."""
    if not keys.size:
        return [], [], []
    first = int(keys.min())
    counts = np.bincount(keys.reshape(-1) - first)
    sums = counts if values is None else np.bincount(keys.reshape(-1) - first, values.reshape(-1))
    present = np.flatnonzero(counts)
    return (present + first).tolist(), sums[present].tolist(), counts[present].tolist()


def _share(mask: NDArray[Any]) -> float:
    return float(np.mean(mask)) if mask.size else 0.0
