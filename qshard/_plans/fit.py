"""The formats that fit the shape of a tensor in a file, where nothing can be padded."""

from __future__ import annotations

import math

from qshard.formats import FORMATS, Format, Usage
from qshard.layout import Shape, plane

WIDEST_KERNEL = 32  # A longer last axis is not the width of a convolution's kernel.


def fold_kernel(shape: Shape) -> Shape:
    """Return the shape that is quantized: `[out, -1]` for the kernel of a convolution, `[out, in, ..., width]`.

    Blocks would else lie along the width, which is shorter than a block.

    >>> fold_kernel((512, 256, 64, 1)), fold_kernel((8, 2048, 768)), fold_kernel((30522, 384))
    ((512, 16384), (8, 2048, 768), (30522, 384))
    """
    if len(shape) > 2 and shape[-1] < WIDEST_KERNEL:
        return shape[0], math.prod(shape[1:])
    return shape


def refusal(fmt: Format, shape: Shape, usage: Usage) -> str | None:
    """Return the reason why a format does not fit a shape, and which one does; None if it fits.

    >>> refusal(FORMATS["MXFP8_32x32"], (30522, 384), Usage.ROWWISE)
    'shape (30522, 384) is not a whole number of 32x32 blocks; MXFP8_E4M3 would fit'
    """
    why = _refusal(fmt, shape, usage)
    if why is None:
        return None
    why = why.removeprefix(f"{fmt}: ").replace(f" of {fmt};", ";")
    near = min(
        (other for other in FORMATS.values() if _refusal(other, shape, usage) is None),
        key=lambda other: -_common_letters(other.name, fmt.name),
        default=None,
    )
    return why if near is None else f"{why.partition(';')[0]}; {near} would fit"


def _common_letters(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _refusal(fmt: Format, shape: Shape, usage: Usage) -> str | None:
    try:
        for each in usage.planes:
            plane(fmt, shape, each, op=str(fmt), name="shape")
    except ValueError as error:
        return str(error)
    return None
