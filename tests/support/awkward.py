"""Inputs that break number formats, shapes that break layouts, and the comparison that every test ends in."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from qshard.formats import ELEMENTS, Format, Usage
from qshard.layout import plane

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT_ELEMENTS = [element.name for element in ELEMENTS.values() if element.signed]
DTYPES = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))

# Empty, one element, primes, one block of every format, whole blocks, blocks that are cut, leading axes, one axis.
SHAPES: list[tuple[int, ...]] = [
    (0, 32),
    (32, 0),
    (1, 1),
    (1, 7),
    (13, 1),
    (31, 37),
    (1, 16),
    (16, 1),
    (16, 16),
    (32, 32),
    (48, 80),
    (96, 160),
    (128, 128),
    (127, 131),
    (160, 288),
    (2, 16, 48),
    (3, 0, 32),
    (64,),
]

TAME = ("normal", "outlier", "zeros", "ties", "subnormal")
"""Kinds of row that leave the scale of a whole tensor useful for most elements."""
KINDS = (*TAME, "wide", "max", "inf", "nan")


def awkward_values(
    shape: Sequence[int],
    seed: int = 0,
    dtype: np.typing.DTypeLike = np.float32,
    *,
    kinds: Sequence[str] = KINDS,
) -> np.ndarray:
    """An array whose rows are each of one kind, in turn, from a random first. The last axis is the row.

    normal: a bell; outlier: a bell with one element 1000 times its size; zeros: +0 and -0; ties: values of some element
    format, midpoints between two, and their fp32 neighbours; subnormal: subnormals of `dtype` and around; wide: all
    exponents of `dtype`; max, inf, nan: a bell with a few of +- that, so one NaN or infinity spoils one row, and every
    scale that the row has a part in.
    """
    dtype = np.dtype(dtype)
    rng, info = np.random.default_rng(seed), ml_dtypes.finfo(dtype)
    rows, cols = int(np.prod(shape[:-1])), shape[-1]
    x = np.zeros((rows, cols), np.float64)
    first = int(rng.integers(len(kinds)))
    for i in range(min(len(kinds), rows)):
        own = x[i :: len(kinds)]
        own[:] = _rows(kinds[(first + i) % len(kinds)], own.shape, info, rng)
    with np.errstate(all="ignore"):
        return x.astype(np.float32).astype(dtype).reshape(shape)


SIGNS = np.array([-1.0, 1.0])


def _rows(kind: str, shape: tuple[int, int], info: ml_dtypes.finfo, rng: np.random.Generator) -> np.ndarray:
    rows, cols = shape
    bell = rng.standard_normal(shape)
    sign = SIGNS[rng.integers(2, size=shape)]
    if kind == "zeros":
        return 0.0 * sign
    if kind == "ties":
        lists = [ties_and_neighbours(FLOAT_ELEMENTS[i]) for i in rng.integers(len(FLOAT_ELEMENTS), size=rows)]
        return sign * np.stack([ties[rng.integers(len(ties), size=cols)] for ties in lists])
    if kind == "subnormal":
        return sign * float(info.smallest_subnormal) * rng.integers(0, 2 ** min(info.nmant + 2, 12), shape)
    if kind == "wide":
        return sign * rng.uniform(1, 2, shape) * 2.0 ** rng.integers(info.minexp - info.nmant, info.maxexp, shape)
    special = {"outlier": 1000.0, "max": float(info.max), "inf": np.inf, "nan": np.nan}.get(kind)
    if special is not None and cols:
        places = rng.integers(cols, size=(rows, 1 if kind == "outlier" else 1 + cols // 16))
        np.put_along_axis(bell, places, np.take_along_axis(sign, places, 1) * special, 1)
    return bell


@functools.cache
def ties_and_neighbours(element: str) -> np.ndarray:
    """Non-negative fp32: every value of an ml_dtypes format of a byte, every midpoint, and the fp32 next to each."""
    dtype = getattr(ml_dtypes, element)
    codes = np.arange(2 ** ELEMENTS[element].bits, dtype=np.uint8)
    values = codes.view(dtype).astype(np.float64)
    values = np.unique(np.abs(values[np.isfinite(values)]))
    points = np.concatenate([values, (values[:-1] + values[1:]) / 2]).astype(np.float32)
    below, above = (np.nextafter(points, np.float32(end)) for end in (-np.inf, np.inf))
    return np.unique(np.abs(np.concatenate([points, below, above])))


def fits(fmt: Format, shape: Sequence[int], usage: Usage) -> bool:
    """Whether `fmt` can hold a tensor of this shape, in every plane of `usage`."""
    try:
        for each in usage:
            plane(fmt, tuple(shape), each)
    except ValueError:
        return False
    return True


def shapes_of(fmt: Format, usage: Usage = Usage.ROWWISE) -> list[tuple[int, ...]]:
    """The SHAPES that `fmt` can hold."""
    return [shape for shape in SHAPES if fits(fmt, shape, usage)]


def assert_bits_equal(actual: object, expected: object, what: str = "array") -> None:
    """Two arrays have one shape, one dtype and the same bytes. A one-byte dtype counts as uint8 codes."""
    __tracebackhide__ = True
    a, b = np.asarray(actual), np.asarray(expected)
    assert a.shape == b.shape, f"{what}: shape {a.shape}, expected {b.shape}"
    codes = a.dtype.itemsize == b.dtype.itemsize == 1
    assert codes or a.dtype == b.dtype, f"{what}: dtype {a.dtype}, expected {b.dtype}"
    bits = np.dtype(f"u{a.dtype.itemsize}")
    # ascontiguousarray makes a 0-d array 1-d, so both are flat from here on.
    got, want = (np.ascontiguousarray(x).reshape(-1).view(bits) for x in (a, b))
    wrong = np.flatnonzero(got != want)
    if wrong.size:
        i = wrong[0]
        place = tuple(int(j) for j in np.unravel_index(i, a.shape))
        dtype = b.dtype if a.dtype == np.uint8 else a.dtype  # Codes as bytes have the other array's values.
        shown = [f"0x{x[i]:0{2 * bits.itemsize}X} ({_value(x[i : i + 1].view(dtype)[0])})" for x in (got, want)]
        raise AssertionError(
            f"{what}: {wrong.size} of {a.size} differ, first at {place}: {shown[0]}, expected {shown[1]}"
        )


def assert_near(actual: object, expected: object, what: str = "array", *, atol: float, rtol: float = 0.0) -> None:
    """Two arrays have one shape, one dtype, NaN in the same places, and elements that differ by no more.

    `rtol` is added to two units in the last place of the dtype.
    """
    __tracebackhide__ = True
    a, b = np.asarray(actual), np.asarray(expected)
    assert (a.shape, a.dtype) == (b.shape, b.dtype), f"{what}: {a.shape} {a.dtype}, expected {b.shape} {b.dtype}"
    unit = 2 * float(ml_dtypes.finfo(a.dtype).eps)
    got, want = a.astype(np.float64), b.astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=rtol + unit, atol=atol, equal_nan=True, err_msg=what)


def _value(x: np.generic) -> str:
    return "NaN" if x != x else str(x)


def assert_all_bits_equal(actual: Sequence[object], expected: Sequence[object], what: str) -> None:
    """As many arrays, each with the same bits. The smallest are compared first: wrong scales make all codes wrong."""
    __tracebackhide__ = True
    assert len(actual) == len(expected), f"{what}: {len(actual)} results, expected {len(expected)}"
    for i in sorted(range(len(expected)), key=lambda i: np.size(expected[i])):
        assert_bits_equal(actual[i], expected[i], f"result {i} of {what}")
