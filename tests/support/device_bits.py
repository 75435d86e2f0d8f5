"""Random calls of every op on two devices, compared bit for bit."""

from __future__ import annotations

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
OPS = [name for name in draws.SPECS if name not in (*draws.IN_ANY_ORDER, *op_calls.OWN_EXPONENTIALS)]


def results_on(device: str, name: str, number: int, lengths: tuple[int, ...], way: str, split: float) -> Any:
    """Return the arrays of a drawn call, or the type of its error."""
    made = filled(draws.draw(draws.SPECS[name], number, lengths=lengths), number)
    splits = made.spec.splits and op_calls.bind(made).split and split < 0.3
    op_calls.device = device
    try:
        return op_calls.run(made, way, split=bool(splits))
    except (ValueError, RuntimeError) as error:
        return type(error)


def compare(device: str, calls: int, seed: int) -> list[str]:
    """Compare `calls` random calls, and return a line for each that differs."""
    rng, differ = random.Random(seed), []
    for _ in range(calls):
        name, number, split = rng.choice(OPS), rng.randrange(10**6), rng.random()
        lengths, way = rng.choice(LENGTHS), rng.choice(op_calls.WAYS)
        if draws.SPECS[name].many:
            lengths = draws.LENGTHS  # Shapes of lists do not depend on them.
        try:
            want, got = (
                results_on(on, name, number, lengths, how, split) for on, how in (("cpu", "plain"), (device, way))
            )
        except AssertionError as error:
            if "no call fits" not in str(error):  # No shape of these lengths fits the op; or the call wrote too much.
                differ.append(f"{name} {number} {lengths} {way}: {error}")
            continue
        try:
            if isinstance(want, type) or isinstance(got, type):
                assert want is got, f"{want} on the CPU, {got} on the GPU"
            else:
                assert_all_bits_equal(got, want, "")
        except AssertionError as error:
            differ.append(f"{name} {number} {lengths} {way}: {error}")
    return differ
