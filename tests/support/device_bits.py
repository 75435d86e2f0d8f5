"""Random calls of every op on two devices, compared bit for bit.

One call of four has an attribute of any value. It may be one that no format has: then both devices refuse the call, or
both compute it.
"""

from __future__ import annotations

import math
import random
from typing import Any

from support import draws, op_calls
from support.awkward import assert_all_bits_equal
from support.draw_values import filled

LENGTHS = [
    draws.LENGTHS,
    (1, 2, 7, 16, 31, 128, 129, 640, 1030, 2056, 4098),
    (32, 96, 160, 384, 512, 1024, 2048),
    (1, 3, 16, 48, 4128, 4130, 8200, 16392),
]
NUMBERS = (-1, 0, 1, 2, 3, 5, 7, 16, 48, 4096, 2**31 - 1, 2**31, 2**62)
ANY_VALUE: dict[str, tuple[Any, ...]] = {
    "bool": (False, True),
    "int": NUMBERS,
    "float": (-1.0, 0.0, 1e-30, 0.5, 448.0, 1e30, math.inf, math.nan),
}
HINTS = ("transposed",)
"""Attributes that promise what the operands are: a drawn operand would break the promise."""
OPS = [name for name in draws.SPECS if name not in (*draws.IN_ANY_ORDER, *op_calls.OWN_EXPONENTIALS)]


def any_attribute(name: str, rng: random.Random) -> dict[str, Any]:
    """Return an attribute of an op with any value of its type, and in three calls of four none."""
    row = draws.SPECS[name].attributes
    attributes = {one: kind for one, (kind, *_) in row.items() if kind in ANY_VALUE and one not in HINTS}
    if not attributes or rng.random() > 0.25:
        return {}
    one = rng.choice(sorted(attributes))
    return {one: rng.choice(ANY_VALUE[attributes[one]])}


def results_on(
    device: str, name: str, number: int, lengths: tuple[int, ...], changed: dict[str, Any], way: str, is_split: bool
) -> Any:
    """Return the arrays of a drawn call; "refused" if it raises; "large" if its results are too large to compare."""
    made = filled(draws.draw(draws.SPECS[name], number, lengths=lengths), number)
    made.options |= changed
    op_calls.device = device
    try:
        if not made.spec.many and sum(math.prod(shape) for shape, _ in made.results()) > 2**24:
            return "large"
        return op_calls.run(made, way, split=bool(is_split and made.spec.splits and op_calls.bind(made).split))
    except (ValueError, RuntimeError):
        return "refused"


def compare(device: str, calls: int, seed: int) -> list[str]:
    """Compare `calls` random calls, and return a line for each that differs."""
    rng, differ = random.Random(seed), []
    for _ in range(calls):
        name, number, is_split = rng.choice(OPS), rng.randrange(10**6), rng.random() < 0.3
        lengths, way, changed = rng.choice(LENGTHS), rng.choice(op_calls.WAYS), any_attribute(name, rng)
        if draws.SPECS[name].many:
            lengths = draws.LENGTHS  # Shapes of lists do not depend on them.
        given = f"{name} {number} {lengths} {changed} {way} split {is_split}"
        try:
            want, got = (
                results_on(on, name, number, lengths, changed, how, is_split)
                for on, how in (("cpu", "plain"), (device, way))
            )
            if isinstance(want, str) or isinstance(got, str):
                assert want is got, f"{want} on the CPU, {got} on the GPU"
            else:
                assert_all_bits_equal(got, want, "")
        except AssertionError as error:
            if "no call fits" not in str(error):  # No shape of these lengths fits the op.
                differ.append(f"{given}: {error}")
    return differ
