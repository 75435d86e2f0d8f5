"""Steps of `_core.quantize_steps` on tensors, each recorded as a program that runs in one host call (`programs.py`).

`Parts` holds both planes of a tensor: data, scale_inv and global_scale_inv of the rowwise plane, then of the columnwise
plane. Missing parts are None.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qshard._core import operands, quantize_steps
from qshard._core.operands import OperandSpec
from qshard._core.quantize_steps import Philox, Plane, Reduce
from qshard._core.validation import seed_missing
from qshard.formats import Format, Usage
from qshard.gemm_dispatch import ProductPlan
from qshard.layout import PlaneLayout, matrix_shape, plane
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._ops.programs import Steps
from qshard.torch_bridge._torch_internals import as_constant, has_static_shape

Parts = tuple[Any, ...]

NO_PLANE = (None,) * len(Plane._fields)


def planes_by_usage(parts: Parts) -> dict[Usage, Plane]:
    row, column = parts[: len(NO_PLANE)], parts[len(NO_PLANE) :]
    # Written out: comprehensions take two to three times as long, in each call of `quantize`.
    planes = {} if row[0] is None else {Usage.ROWWISE: Plane(*row)}
    if column[0] is not None:
        planes[Usage.COLUMNWISE] = Plane(*column)
    return planes


def view_plane(parts: Plane, where: PlaneLayout) -> Plane:
    """View a plane in the shapes of another layout with as many elements, such as a tensor and its matrix form."""
    data, scale_inv, global_scale_inv = parts
    if global_scale_inv is not None:
        global_scale_inv = global_scale_inv.view(where.global_scale_shape)
    return Plane(data.view(where.data_shape), scale_inv.view(where.scale_shape), global_scale_inv)


def quantize_operand(
    x: Tensor,
    spec: OperandSpec,
    *,
    scale: Tensor | None = None,
    philox: Philox | None = None,
    amax: Tensor | None = None,
    global_amaxes: Sequence[Tensor] = (),
    reduce_max: Reduce | None = None,
    check: Callable[[], object] | None = None,
) -> tuple[dict[Usage, Plane], Tensor | None]:
    """Apply `operands.quantize_operand` to `x`, and return planes in the shapes of `layout.plane`.

    `check` raises an error that names x, and is called only if the program does not run; the default checks the
    layouts. `global_amaxes` are `quantize_steps.compute_global_amaxes` of the whole tensor, if x is a shard. With
    `reduce_max` they are computed and reduced here, in one call. Under delayed scaling, with `scale`, also returns the
    amax of x.
    """
    fmt, usage = spec.format, spec.usage
    if check is None:  # Dynamo of torch 2.11 cannot ask a `partial` for its truth, as `or` does.
        check = functools.partial(spec.layouts, tuple(x.shape))
    if philox is not None and philox.col_step != 1:
        raise ValueError(
            f"quantize_operand: philox (col_step={philox.col_step}) is not in the order of x; pass that of the "
            "untransposed x"
        )
    if reduce_max is not None:
        check()  # Before the collective, so that all ranks raise.
        if fmt.stochastic and philox is None:
            raise ValueError(seed_missing("quantize", fmt))
        global_amaxes = _reduced_amaxes(x, fmt, usage, amax, reduce_max)
    if scale is not None:
        *delayed_parts, amax = _quantize_delayed((x, scale, *global_amaxes), fmt, usage, spec.margin)
        return planes_by_usage(tuple(delayed_parts)), amax
    if global_amaxes or philox is not None:
        drawn, row_step = ((), None) if philox is None else ((philox.seed, philox.offset), philox.row_step)
        parts = _quantize_from((x, *global_amaxes, *drawn), len(global_amaxes), fmt, usage, row_step, check=check)
    elif amax is not None:
        parts = _quantize_known((x, amax), fmt, usage, check=check)
    else:
        parts = _quantize((x,), fmt, usage, check=check)
    return planes_by_usage(parts), None


def _reduced_amaxes(x: Tensor, fmt: Format, usage: Usage, amax: Tensor | None, reduce_max: Reduce) -> Sequence[Tensor]:
    """Return `quantize_steps.compute_global_amaxes` after one max-reduction. A program cannot contain a collective."""
    found = quantize_steps.compute_global_amaxes(ops, _matrix(x), fmt, usage, amax)
    return [reduce_max(each) for each in found] if len(found) < 2 else reduce_max(torch.stack([*found])).unbind()


def dequantize(
    parts: Plane, fmt: Format, usage: Usage, dtype: torch.dtype, shape: tuple[int, ...] | None = None
) -> Tensor:
    """Dequantize a plane of a matrix in its stored orientation; with `shape`, to a tensor of that shape."""
    tensors = tuple(part for part in parts if part is not None)
    (values,) = _dequantize(tensors, fmt, usage, dtype, shape)
    result: Tensor = values
    return result


def transpose(parts: Plane, fmt: Format) -> Plane:
    """Convert between the rowwise and the columnwise plane of a matrix: `quantize_steps.transpose_plane`."""
    data, scale_inv = _transpose((parts.data, parts.scale_inv), fmt)
    return parts._replace(data=data, scale_inv=scale_inv)


def multiply_planes(a: Plane, b: Plane, dtype: torch.dtype, fast: bool, plan: ProductPlan) -> Tensor:
    tensors = [tuple(part for part in parts if part is not None) for parts in (a, b)]
    (product,) = _multiply((*tensors[0], *tensors[1]), len(tensors[0]), dtype, fast, plan)
    result: Tensor = product
    return result


def _parts(
    ops: Any,
    x: Any,
    fmt: Format,
    usage: Usage,
    philox: Philox | None = None,
    amax: Any = None,
    global_amaxes: Sequence[Any] | None = None,
) -> Parts:
    layouts = {one: plane(fmt, tuple(x.shape), one) for one in usage.planes}
    matrix = _matrix(x)
    is_whole = has_static_shape(matrix)
    planes = quantize_steps.quantize(
        ops, matrix, as_constant(fmt), usage, philox=philox, amax=amax, global_amaxes=global_amaxes, is_whole=is_whole
    )
    if x.ndim != 2:
        planes = {one: view_plane(parts, layouts[one]) for one, parts in planes.items()}
    return _flat(planes)


@Steps
def _quantize(ops: Any, x: Any, fmt: Format, usage: Usage) -> Parts:
    return _parts(ops, x, fmt, usage)


@Steps
def _quantize_known(ops: Any, x: Any, amax: Any, fmt: Format, usage: Usage) -> Parts:
    return _parts(ops, x, fmt, usage, amax=amax)


@Steps
def _quantize_from(ops: Any, x: Any, *args: Any) -> Parts:
    *tensors, count, fmt, usage, row_step = args
    global_amaxes, drawn = tensors[:count], tensors[count:]
    philox = Philox(drawn[0], drawn[1], row_step) if drawn else None
    return _parts(ops, x, fmt, usage, philox, global_amaxes=global_amaxes or None)


@Steps
def _quantize_delayed(ops: Any, x: Any, scale: Any, *args: Any) -> Parts:
    *global_amaxes, fmt, usage, margin = args
    spec, global_amax = OperandSpec(fmt, usage, margin=margin), global_amaxes[0] if global_amaxes else None
    planes, amax = operands.quantize_operand(ops, x, spec, scale=scale, global_amax=global_amax)
    return (*_flat(planes), amax)


@Steps
def swiglu_columns(ops: Any, gate: Any, up: Any, amax: Any, fmt: Format) -> Parts:
    """Compute the columnwise plane of `swiglu(gate, up)` of two matrices from its amax, without storing the values."""
    scale, scale_inv, _ = quantize_steps.scales(ops, fmt, amax)
    return ops.swiglu_cast_t(gate, up, scale, element=fmt.element.name), scale_inv


@Steps
def _dequantize(ops: Any, *args: Any) -> Parts:
    *parts, fmt, usage, dtype, shape = args
    if shape is None:
        return (quantize_steps.dequantize(ops, Plane(*parts), fmt, usage, dtype),)
    where = plane(fmt, matrix_shape(shape), usage)
    values = quantize_steps.dequantize(ops, view_plane(Plane(*parts), where), fmt, usage, dtype)
    return ((ops.swap_last_axes(values) if where.transposed else values).view(shape),)


@Steps
def _transpose(ops: Any, data: Any, scale_inv: Any, fmt: Format) -> Parts:
    return quantize_steps.transpose_plane(ops, Plane(data, scale_inv), fmt)[:2]


@Steps
def _multiply(ops: Any, *args: Any) -> Parts:
    *parts, count, dtype, fast, plan = args
    return (plan.multiply(ops, Plane(*parts[:count]), Plane(*parts[count:]), dtype=dtype, fast=fast),)


def _matrix(x: Any) -> Any:
    return x if x.ndim == 2 else x.view(matrix_shape(tuple(x.shape)))


def _flat(planes: Mapping[Usage, Plane]) -> Parts:
    return (*planes.get(Usage.ROWWISE, NO_PLANE), *planes.get(Usage.COLUMNWISE, NO_PLANE))
