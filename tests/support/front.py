"""What a test may ask of a front end, so that it states a property once: `def test_x(front): ...`; and comparisons.

The two front ends are in support/fronts.py. They take and give NumPy arrays. Values keep their ml_dtypes dtype; codes
(one-byte dtypes) come back as uint8, since bits are what tests compare.
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
"""Of a master weight: its format, which plane is cast, its shape."""
Products = tuple[np.ndarray, np.ndarray, np.ndarray]
"""y, dx and dw of a linear layer."""
States = dict[Role, tuple[Any, Any]]
"""(scale, amax_history) of each tensor of a layer."""
Arrays = Mapping[str, np.ndarray]
Trained = tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray | None]], np.ndarray | None]
"""A parameter, the codes and scales of each moment, and the master, if there is one."""
PLANES = ("rowwise", "columnwise")
PARTS = ("global_scale_inv", "scale_inv", "data")
"""In the order in which they are compared: wrong scales make all codes wrong."""


class Front(Protocol):
    """What a test may ask of a front end.

    Attributes:
      name: "jax" or "torch".
      device: "cpu" or "cuda", where arrays are put.
      qshard: the front end's module, `qshard.jax` or `qshard.torch_bridge`.
      examples: how many cases of a product a test looks at: a call in JAX is compiled for each shape.
      result_roundings: how often a sum is rounded to the dtype of a product.
    """

    name: str
    device: str
    qshard: Any
    examples: int
    result_roundings: int

    def __init__(self, device: str) -> None: ...

    def devices(self) -> int:
        """How many devices, or ranks, there are."""

    def array(self, x: np.ndarray) -> Any:
        """The framework's array of `x`, on the device, with the same dtype and bits."""

    def numpy(self, array: Any) -> np.ndarray:
        """The NumPy array of `array`, with the same bits; one-byte dtypes as uint8."""

    def quantize(self, x: np.ndarray, fmt: Any, **options: Any) -> Any:
        """The front end's quantized object of `x`; `options` such as `usage` are passed on."""

    def dequantize(self, quantized: Any, dtype: Any = None, **options: Any) -> np.ndarray:
        """The values of a quantized object in a NumPy dtype; `options` such as `usage` are passed on."""

    def linear(self, x: np.ndarray, w: np.ndarray, dy: np.ndarray, recipe: Recipe, *, seed: int = 0) -> Products:
        """y, and the gradients of x and w where that of y is `dy`."""

    def gradients(
        self, function: Callable[..., Any], operands: Sequence[np.ndarray], grad: np.ndarray, *, exact: bool = True
    ) -> list[np.ndarray]:
        """The result of a function of the front end's arrays, and the gradients of operands for that of the result.

        `exact`: compiled and eager calls have the same bits. Products of XLA may add up in another order.
        """

    def operand_rounding(self, recipe: Recipe) -> float:
        """What a product may lose of the sum of its terms' magnitudes because operands are rounded."""

    def delayed_step(
        self, batches: Sequence[Products], recipe: Recipe, states: States
    ) -> tuple[list[Products], dict[Role, np.ndarray], States]:
        """A step of one layer over microbatches (x, w, dy): their products, the merged amaxes, and the states after."""

    def shapes_to_cut(self, fmt: Format, shards: int) -> list[tuple[int, int]]:
        """Weights whose rows ranks can cut, into uneven shards and parts of blocks too; none if `fmt` is refused."""

    def assert_law(self, weights: Sequence[np.ndarray], fmt: Format, shards: int) -> None:
        """Every one of `shards` ranks gathers the bits of each whole weight, or learns at once that it cannot."""

    def adam(
        self, params: Arrays, grads: Sequence[Arrays], moments: tuple[str, str], masters: bool, **options: float
    ) -> dict[str, Trained]:
        """Parameters after a step of AdamW for each of `grads`, with moments of these dtypes."""

    def cast_slices(
        self,
        planes: Sequence[SlicedPlane],
        masters: Sequence[np.ndarray],
        starts: Sequence[int],
        seeds: Sequence[int],
        rounded_to: str | None = None,
    ) -> list[list[np.ndarray | None]]:
        """The codes and scales of a slice of each master weight, on one device that knows of no other."""

    def assert_cut_masters(
        self,
        planes: Sequence[SlicedPlane],
        weights: Sequence[np.ndarray],
        cuts: Sequence[Sequence[int]],
        rounded_to: str | None = None,
    ) -> None:
        """Slices that ranks cast, `cuts[i][rank]` to `cuts[i][rank + 1]`, are gathered as whole weights."""


def some(front: Front, cases: Sequence[T], key: str) -> Sequence[T]:
    """As many of `cases` as the front end is to look at: the same in every run, and others for another key."""
    return random.Random(key).sample(cases, min(front.examples, len(cases)))


def assert_quantized(front: Front, actual: Any, expected: Any) -> None:
    """Both planes, which of them there are, their dtypes and every bit are those of `expected`, of the reference."""
    __tracebackhide__ = True
    fmt = actual.format
    assert (fmt, dtype_name(actual)) == (expected.format, str(expected.dtype))
    assert (actual.global_scale_inv is None) == (expected.global_scale_inv is None)
    # A columnwise plane without elements does not tell how the rows were shaped.
    assert tuple(actual.shape) == expected.shape or (actual.rowwise is None and 0 in expected.shape)
    for name in PLANES:
        plane = getattr(actual, name)
        assert_plane(front, plane, getattr(expected, name), f"{fmt} {name}")
        if plane is not None:
            assert (dtype_name(plane.data), dtype_name(plane.scale_inv)) == (fmt.data_dtype, fmt.scale_dtype)


def assert_plane(front: Front, actual: Any, expected: Any, name: str = "plane") -> None:
    """Codes and scales have the bits of the reference's, or there are none in both."""
    __tracebackhide__ = True
    assert (actual is None) == (expected is None), name
    for part in PARTS:
        got, want = getattr(actual, part, None), getattr(expected, part, None)
        assert (got is None) == (want is None), f"{name}.{part}"
        if got is not None:
            assert_bits_equal(front.numpy(got), want, f"{name}.{part}")


def dtype_name(array: Any) -> str:
    """The dtype's name, the same in every framework."""
    return str(array.dtype).removeprefix("torch.")


def words(numbers: Sequence[int]) -> np.ndarray:
    """`[n, 2]` uint32, the low words first."""
    return np.array([[n & 0xFFFFFFFF, n >> 32] for n in numbers], np.uint32).reshape(-1, 2)


def codes(x: np.ndarray) -> np.ndarray:
    """`x`, with a one-byte dtype viewed as uint8."""
    return x.view(np.uint8) if x.dtype.itemsize == 1 else x


def sliced(planes: Sequence[SlicedPlane], weights: Sequence[np.ndarray], rounded_to: str | None) -> list[Any]:
    """The planes of whole weights that slices are to be gathered as, seeded by their places."""
    with np.errstate(over="ignore"):
        rounded = [w if rounded_to is None else w.astype(rounded_to) for w in weights]
    return [
        getattr(reference.quantize(w, fmt, usage, seed=seed), usage.name.lower())
        for seed, (w, (fmt, usage, _)) in enumerate(zip(rounded, planes, strict=True))
    ]
