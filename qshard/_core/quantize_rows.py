"""Quantization of the tokens of all experts into padded rows, in one op for both planes.

Padded rows have the rows of each expert one after the other, and zeros up to a multiple of the tallest block. `rows`
gives for each padded row the row of the tokens `x` `[T, K]`, or T and more for zeros. `stops` gives the end of each
expert's padded rows. Codes are those of each expert's rows alone.
"""

from __future__ import annotations

from typing import Any

from qshard._core import quantize_steps
from qshard._core.operands import OperandSpec
from qshard._core.quantize_steps import Plane, Reduce
from qshard.formats import Format, Usage

Array = Any


def takes_rows(fmt: Format) -> bool:
    """Return whether an op quantizes a format into padded rows: FP8 with one scale, or in blocks of one row.

    >>> from qshard.formats import FP8_1x128, FP8_128x128, FP8_E5M2, MXFP8_E4M3
    >>> [takes_rows(fmt) for fmt in (FP8_E5M2, FP8_1x128, FP8_128x128, MXFP8_E4M3)]
    [True, True, False, False]
    """
    if fmt.stochastic:
        return False
    return fmt.per_tensor or (fmt.scale_dtype == "float32" and fmt.block_shape()[0] == 1 and fmt.turns_columns)


def quantize_rows(
    ops: Any,
    x: Array,
    spec: OperandSpec,
    rows: Array,
    stops: Array,
    *,
    scale: Array | None = None,
    reduce_max: Reduce | None = None,
) -> tuple[dict[Usage, Plane], Array | None]:
    """Quantize the tokens `x` `[T, K]` into P padded rows.

    - `ops`: ops of a front end, as in `quantize_steps.quantize`.
    - `spec`: the operand; `takes_rows` accepts its format, and its usage includes the rowwise plane.
    - `rows`: int32 `[P]`. P is a multiple of the format's block.
    - `stops`: int32 `[E]`, multiples of the format's block.
    - `scale`: fp32 `[E]`, the scales of delayed scaling.
    - `reduce_max`: max-reduction of the amaxes `[E]` over the devices that have rows of the same experts.

    Returns the planes, and under delayed scaling the amax of each expert, otherwise None. The rowwise plane is
    `[P, K]`, the columnwise plane `[K, P]`. Formats with one scale have one for each expert, `[E]`, in both planes.
    """
    fmt, both = spec.format, spec.usage is Usage.BOTH
    if fmt.per_tensor:
        element = fmt.element.name
        amax = ops.amax_grouped(x, rows, stops)
        amax = amax if reduce_max is None else reduce_max(amax)
        options: dict[str, Any] = {"element": element}
        if spec.margin is None:
            scale, scale_inv, _ = quantize_steps.scales(ops, fmt, amax)
        else:
            options["nonfinite"] = fmt.nonfinite
            scale, scale_inv = ops.delayed_scale(amax, scale, margin=spec.margin, element=element)
        cast = ops.cast_transpose_grouped if both else ops.cast_grouped
        made = cast(x, rows, stops, scale, **options)
        planes = quantize_steps.planes_of_one_scale(made if both else [made], spec.usage, scale_inv)
        return planes, None if spec.margin is None else amax
    quantize = ops.quantize_block_both_rows if both else ops.quantize_block_rows
    made = quantize(x, rows, block_cols=fmt.block_shape()[1], **quantize_steps.block_options(fmt))
    planes = {each: Plane(*made[2 * i : 2 * i + 2]) for i, each in enumerate(spec.usage.planes)}
    return planes, None
