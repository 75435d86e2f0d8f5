"""Steps of `_core.quantize_steps` on tensors, each one call where nobody looks on (`programs.py`).

The parts of a tensor's planes are data, scale_inv and global_scale_inv of the rowwise plane, then of the columnwise
one: six, of which those that are not there are None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Draws, Plane, Reduce
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import Way
from qshard.layout import PlaneLayout, matrix_shape, plane
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.dynamo import as_constant
from qshard.torch_bridge._ops.programs import Steps

Parts = tuple[Any, ...]

NO_PLANE = (None,) * len(Plane._fields)


def planes_of(parts: Parts) -> dict[Usage, Plane]:
    """The planes that are there."""
    return {usage: plane for usage, plane in zip(Usage.BOTH.planes, pair_of(parts), strict=True) if plane is not None}


def pair_of(parts: Parts) -> tuple[Plane | None, Plane | None]:
    """The rowwise and the columnwise plane; None for one that is not there."""
    rowwise, columnwise = parts[: len(NO_PLANE)], parts[len(NO_PLANE) :]
    return None if rowwise[0] is None else Plane(*rowwise), None if columnwise[0] is None else Plane(*columnwise)


def viewed(parts: Plane, where: PlaneLayout) -> Plane:
    """A plane in the shapes of a layout of as many elements: those of a tensor, or of it as a matrix."""
    data, scale_inv, global_scale_inv = parts
    if global_scale_inv is not None:
        global_scale_inv = global_scale_inv.view(where.global_scale_shape)
    return Plane(data.view(where.data_shape), scale_inv.view(where.scale_shape), global_scale_inv)


def quantized(
    x: Tensor,
    fmt: Format,
    usage: Usage,
    *,
    draws: Draws | None = None,
    reduce_max: Reduce | None = None,
    amax: Tensor | None = None,
    check: Callable[[], None] | None = None,
) -> Parts:
    """The parts of the planes of `x` `[*lead, K]`: `pipeline.quantize`, in the shapes of `layout.plane`.

    `check` raises what is wrong with `x`, as the caller names it. It is asked unless all of it is one call.
    """
    if reduce_max is not None:  # A collective, amid the steps.
        if check is not None:
            check()
        return _parts(ops, x, fmt, usage, draws, reduce_max, amax)
    if draws is None:
        if amax is not None:
            return _quantize_known((x, amax), fmt, usage, check=check)
        return _quantize((x,), fmt, usage, check=check)
    if draws.col_step != 1:
        raise ValueError(f"quantized: draws (col_step={draws.col_step}) are not in the order of x; pass those of x")
    return _quantize_stochastic((x, draws.seed, draws.first), fmt, usage, draws.row_step, check=check)


def quantized_delayed(x: Tensor, scale: Tensor, fmt: Format, usage: Usage, margin: int) -> tuple[Parts, Tensor]:
    """The parts of the planes of a matrix under a scale of earlier steps, and its amax: `pipeline.quantize_delayed`."""
    *parts, amax = _quantize_delayed((x, scale), fmt, usage, margin)
    return tuple(parts), amax


def quantized_swiglu_again(gate: Tensor, up: Tensor, fmt: Format, amax: Tensor) -> Plane:
    """The columnwise plane of `swiglu(gate, up)`, matrices: `pipeline.quantize_swiglu_again`."""
    return Plane(*_quantize_swiglu_again((gate, up, amax), fmt))


def dequantized(
    parts: Plane, fmt: Format, usage: Usage, dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> Tensor:
    """The values of a plane of a matrix, in the order in which it is stored; with `shape`, those of such a tensor."""
    tensors = tuple(part for part in parts if part is not None)
    (values,) = _dequantize(tensors, fmt, usage, dtype, shape)
    result: Tensor = values
    return result


def transposed(parts: Plane, fmt: Format) -> Plane:
    """The columnwise plane of the rowwise one of a matrix, or back: `pipeline.transposed`."""
    data, scale_inv = _transpose((parts.data, parts.scale_inv), fmt)
    return parts._replace(data=data, scale_inv=scale_inv)


def multiplied(a: Plane, b: Plane, dtype: torch.dtype, fast: bool, way: Way) -> Tensor:
    """`a @ b.T` of two planes, as `way` has it."""
    tensors = [tuple(part for part in parts if part is not None) for parts in (a, b)]
    (product,) = _multiply((*tensors[0], *tensors[1]), len(tensors[0]), dtype, fast, way)
    result: Tensor = product
    return result


def _parts(
    ops: Any,
    x: Any,
    fmt: Format,
    usage: Usage,
    draws: Draws | None = None,
    reduce_max: Reduce | None = None,
    amax: Any = None,
) -> Parts:
    shape = tuple(x.shape)
    layouts = {one: plane(fmt, shape, one) for one in usage.planes}
    matrix = x if x.ndim == 2 else x.view(matrix_shape(shape))
    made = quantize_steps.quantize(ops, matrix, as_constant(fmt), usage, reduce_max=reduce_max, draws=draws, amax=amax)
    if x.ndim != 2:
        made = {one: viewed(parts, layouts[one]) for one, parts in made.items()}
    return _flat(made)


@Steps
def _quantize(ops: Any, x: Any, fmt: Format, usage: Usage) -> Parts:
    return _parts(ops, x, fmt, usage)


@Steps
def _quantize_known(ops: Any, x: Any, amax: Any, fmt: Format, usage: Usage) -> Parts:
    return _parts(ops, x, fmt, usage, amax=amax)


@Steps
def _quantize_stochastic(
    ops: Any, x: Any, seed: Any, first: Any, fmt: Format, usage: Usage, row_step: int | None
) -> Parts:
    return _parts(ops, x, fmt, usage, Draws(seed, first, row_step))


@Steps
def _quantize_delayed(ops: Any, x: Any, scale: Any, fmt: Format, usage: Usage, margin: int) -> Parts:
    planes, amax = quantize_steps.quantize_delayed(ops, x, fmt, usage, scale, margin)
    return (*_flat(planes), amax)


@Steps
def _quantize_swiglu_again(ops: Any, gate: Any, up: Any, amax: Any, fmt: Format) -> Parts:
    return quantize_steps.quantize_swiglu_again(ops, gate, up, fmt, amax)[:2]


@Steps
def _dequantize(ops: Any, *args: Any) -> Parts:
    *parts, fmt, usage, dtype, shape = args
    if shape is None:
        return (quantize_steps.dequantize(ops, Plane(*parts), fmt, usage, dtype),)
    where = plane(fmt, matrix_shape(shape), usage)
    values = quantize_steps.dequantize(ops, viewed(Plane(*parts), where), fmt, usage, dtype)
    return ((ops.transposed(values) if where.transposed else values).view(shape),)


@Steps
def _transpose(ops: Any, data: Any, scale_inv: Any, fmt: Format) -> Parts:
    return quantize_steps.transposed(ops, Plane(data, scale_inv), fmt)[:2]


@Steps
def _multiply(ops: Any, *args: Any) -> Parts:
    *parts, count, dtype, fast, way = args
    return (way.product(ops, Plane(*parts[:count]), Plane(*parts[count:]), dtype=dtype, fast=fast),)


def _flat(planes: Mapping[Usage, Plane]) -> Parts:
    return (*planes.get(Usage.ROWWISE, NO_PLANE), *planes.get(Usage.COLUMNWISE, NO_PLANE))
