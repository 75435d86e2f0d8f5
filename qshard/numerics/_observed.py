"""What a step of training does to one tensor: sums over arrays of any front end, on the device where they are.

Written once, over `xp`: `torch` or `jax.numpy`. Sums are in float32, of elements divided by the largest, so that no
square of a small gradient is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from qshard.formats import ElementFormat


class Seen(NamedTuple):
    """Arrays without axes, of one tensor or a part of it.

    Attributes:
      amax: the largest finite magnitude.
      signal, noise: sums of `(x / amax)**2` and `((value - x) / amax)**2`, where both are finite.
      scale_low, scale_high: of the elements that are not 0, what they are multiplied by; infinity and 0 of none.
      zeros_made, subnormal, saturated, nonfinite_given, nonfinite_made: numbers of elements, as `Stats` has them.
    """

    amax: Any
    signal: Any
    noise: Any
    scale_low: Any
    scale_high: Any
    zeros_made: Any
    subnormal: Any
    saturated: Any
    nonfinite_given: Any
    nonfinite_made: Any


COUNTS = Seen._fields[5:]


def seen_of(xp: Any, x: Any, value: Any, scale: Any, element: ElementFormat, count: Callable[[Any], Any]) -> Seen:
    """The sums of what is not empty.

    Args:
      xp: the module of array functions.
      x, value, scale: float32, of one shape: what was given, what is stored, and what codes are multiplied by.
      count: how many of a mask are true.
    """
    size, given, made = xp.abs(x), xp.isfinite(x), xp.isfinite(value)
    counted, nonzero = given & made, x != 0
    amax = xp.amax(xp.where(given, size, 0.0))
    unit = xp.where(amax > 0, amax, 1.0)
    step = 2.0 ** (element.max_exponent - element.mantissa_bits)
    stored, least = xp.abs(value), 2.0 ** (1 - element.bias)
    scaled = nonzero & (scale > 0) & xp.isfinite(scale)
    return Seen(
        amax=amax,
        signal=xp.sum(xp.square(xp.where(counted, x, 0.0) / unit)),
        noise=xp.sum(xp.square(xp.where(counted, value - x, 0.0) / unit)),
        scale_low=xp.amin(xp.where(scaled, scale, math.inf)),
        scale_high=xp.amax(xp.where(scaled, scale, 0.0)),
        zeros_made=count(nonzero & (value == 0)),
        subnormal=count((stored > 0) & (stored < least * scale)),
        saturated=count(made & (scale > 0) & (size > (element.max + step / 2) * scale)),
        nonfinite_given=count(~given),
        nonfinite_made=count(given & ~made),
    )


@dataclass
class Totals:
    """`Seen` of several calls, or parts, together, on the host: sums of squares are of `x` itself."""

    amax: float = 0.0
    signal: float = 0.0
    noise: float = 0.0
    scale_low: float = math.inf
    scale_high: float = 0.0
    zeros_made: int = 0
    subnormal: int = 0
    saturated: int = 0
    nonfinite_given: int = 0
    nonfinite_made: int = 0
    elements: int = 0
    calls: int = 0

    def __iadd__(self, other: Totals) -> Totals:
        for name in (field.name for field in fields(self)):
            merge = {"amax": max, "scale_high": max, "scale_low": min}.get(name, lambda a, b: a + b)
            setattr(self, name, merge(getattr(self, name), getattr(other, name)))
        return self
