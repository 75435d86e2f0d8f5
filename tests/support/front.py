"""Interface of a front end, so that a test states a property once for both (`def test_x(front): ...`); and comparisons.

The two implementations are in support/fronts.py. They take and return NumPy arrays. Values keep their ml_dtypes dtype;
codes (one-byte dtypes) are returned as uint8, because tests compare bits.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from qshard import reference
from qshard.formats import Format, Usage
from qshard.recipes import Recipe, Role
from support.awkward import assert_bits_equal

T = TypeVar("T")
SlicedPlane = tuple[Format, Usage, tuple[int, ...]]
"""Format, usage of the plane to cast, and shape of a master weight."""
Products = tuple[np.ndarray, np.ndarray, np.ndarray]
"""y, dx and dw of a linear layer."""
States = dict[Role, tuple[Any, Any]]
"""(scale, amax_history) of each tensor of a layer."""
Arrays = Mapping[str, np.ndarray]
Trained = tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray | None]], np.ndarray | None]
"""A parameter, the codes and scales of each moment, and the master weight or None."""
PLANES = ("rowwise", "columnwise")
PARTS = ("global_scale_inv", "scale_inv", "data")
"""Order of comparison: scales first, because wrong scales make all codes wrong."""


class Front(Protocol):
    """Interface of a front end, bound to a device.

    Attributes:
      name: "jax" or "torch".
      device: "cpu" or "cuda", the device of arrays.
      qshard: the front end's module, `qshard.jax` or `qshard.torch_bridge`.
      examples: number of product cases in a test; small for JAX, which compiles a call for each shape.
      result_roundings: number of roundings of a sum to the dtype of a product.
    """

    name: str
    device: str
    qshard: Any
    examples: int
    result_roundings: int

    def __init__(self, device: str) -> None: ...

    def devices(self) -> int:
        """Return the number of devices or ranks."""

    def array(self, x: np.ndarray) -> Any:
        """Return `x` as the framework's array on the device, with the same dtype and bits."""

    def numpy(self, array: Any) -> np.ndarray:
        """Return `array` as a NumPy array with the same bits; one-byte dtypes as uint8."""

    def quantize(self, x: np.ndarray, fmt: Any, **options: Any) -> Any:
        """Quantize `x`; `options` such as `usage` are passed on."""

    def dequantize(self, quantized: Any, dtype: Any = None, **options: Any) -> np.ndarray:
        """Dequantize to a NumPy dtype; `options` such as `usage` are passed on."""

    def linear(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe: Recipe, *, seed: int = 0) -> Products:
        """Return y, and the gradients of x and w for the gradient `dy` of y."""

    def gradients(
        self, function: Callable[..., Any], operands: Sequence[np.ndarray], grad: np.ndarray, *, exact: bool = True
    ) -> list[np.ndarray]:
        """Return the result of a function, and the gradients of its operands for the result's gradient `grad`.

        `exact`: compiled and eager calls must have the same bits. XLA may sum products in another order.
        """

    def operand_rounding(self, recipe: Recipe) -> float:
        """Return a product's error bound due to rounded operands, relative to the sum of its terms' magnitudes."""

    def delayed_step(
        self, batches: Sequence[Products], recipe: Recipe, states: States
    ) -> tuple[list[Products], dict[Role, np.ndarray], States]:
        """Run one layer over microbatches (x, w, dy); return products, merged amaxes and new states."""

    def shapes_to_cut(self, fmt: Format, shards: int) -> list[tuple[int, int]]:
        """Return weight shapes for sharding by rows, also uneven and with partial blocks; none if `fmt` is rejected."""

    def assert_law(self, weights: Sequence[np.ndarray], fmt: Format, shards: int) -> None:
        """Assert that each of `shards` ranks gathers the bits of each whole weight, or that all raise immediately."""

    def adam(
        self, params: Arrays, grads: Sequence[Arrays], moments: tuple[str, str], masters: bool, **options: float
    ) -> dict[str, Trained]:
        """Run a step of AdamW for each of `grads`, with moments of these dtypes, and return the parameters."""

    def cast_slices(
        self,
        planes: Sequence[SlicedPlane],
        masters: Sequence[np.ndarray],
        starts: Sequence[int],
        seeds: Sequence[int],
        rounded_to: str | None = None,
    ) -> list[list[np.ndarray | None]]:
        """Return the codes and scales of a slice of each master weight, cast on one device without communication."""

    def assert_cut_masters(
        self,
        planes: Sequence[SlicedPlane],
        weights: Sequence[np.ndarray],
        cuts: Sequence[Sequence[int]],
        rounded_to: str | None = None,
    ) -> None:
        """Assert that slices `cuts[i][rank]` to `cuts[i][rank + 1]`, cast by each rank, gather to the whole weights."""


def some(front: Front, cases: Sequence[T], key: str) -> Sequence[T]:
    """As many of `cases` as the front end is to look at: the same in every run, and others for another key."""
    return random.Random(key).sample(cases, min(front.examples, len(cases)))


def assert_quantized(front: Front, actual: Any, expected: Any) -> None:
    """Assert that the planes of `actual` have the presence, dtypes and bits of the reference's `expected`."""
    __tracebackhide__ = True
    fmt = actual.format
    assert (fmt, dtype_name(actual)) == (expected.format, str(expected.dtype))
    assert (actual.global_scale_inv is None) == (expected.global_scale_inv is None)
    # The leading shape cannot be recovered from an empty columnwise plane.
    assert tuple(actual.shape) == expected.shape or (actual.rowwise is None and 0 in expected.shape)
    for name in PLANES:
        plane = getattr(actual, name)
        assert_plane(front, plane, getattr(expected, name), f"{fmt} {name}")
        if plane is not None:
            assert (dtype_name(plane.data), dtype_name(plane.scale_inv)) == (fmt.data_dtype, fmt.scale_dtype)


def assert_plane(front: Front, actual: Any, expected: Any, name: str = "plane") -> None:
    """Assert that codes and scales have the bits of the reference, or that both planes are None."""
    __tracebackhide__ = True
    assert (actual is None) == (expected is None), name
    for part in PARTS:
        got, want = getattr(actual, part, None), getattr(expected, part, None)
        assert (got is None) == (want is None), f"{name}.{part}"
        if got is not None:
            assert_bits_equal(front.numpy(got), want, f"{name}.{part}")


def dtype_name(array: Any) -> str:
    """Return the dtype's name without a framework prefix."""
    return str(array.dtype).removeprefix("torch.")


def words(numbers: Sequence[int]) -> np.ndarray:
    """Return uint64 numbers as `[n, 2]` uint32, the low ones first."""
    return np.array([[n & 0xFFFFFFFF, n >> 32] for n in numbers], np.uint32).reshape(-1, 2)


def codes(x: np.ndarray) -> np.ndarray:
    """Return `x`, viewed as uint8 if its dtype has one byte."""
    return x.view(np.uint8) if x.dtype.itemsize == 1 else x


def sliced(planes: Sequence[SlicedPlane], weights: Sequence[np.ndarray], rounded_to: str | None) -> list[Any]:
    """Return the reference planes of the whole weights, with the index of a weight as its seed."""
    with np.errstate(over="ignore"):
        rounded = [w if rounded_to is None else w.astype(rounded_to) for w in weights]
    return [
        getattr(reference.quantize(w, fmt, usage, seed=seed), usage.name.lower())
        for seed, (w, (fmt, usage, _)) in enumerate(zip(rounded, planes, strict=True))
    ]
