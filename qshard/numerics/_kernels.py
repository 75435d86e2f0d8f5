"""The compiled kernels on NumPy arrays: the ops that `_core.quantize_steps` needs.

`ops` has every op on single tensors as a function of arrays, bound from `ops.def` as in the front ends, so
`quantize_steps.quantize(ops, x, fmt, usage)` returns planes of NumPy arrays. Codes and one-byte scales are uint8.
Kernels run on `qshard.num_threads()` threads and release the GIL.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qshard import _ffi
from qshard._core.quantize_steps import Philox, Plane
from qshard._core.validation import uint32_pair
from qshard.formats import ELEMENTS, Format
from qshard.op_table import OpSpec, table

Array = NDArray[Any]


def bind(spec: OpSpec) -> Callable[..., Any]:
    """Bind an op as a function of contiguous arrays. Attributes, and the `dtype` of some ops, are keyword arguments.

    >>> ops.amax_tensor(np.float32([[1.0, -3.0], [2.0, 0.0]]), lead=1)
    array([3., 2.], dtype=float32)
    """

    def run(*inputs: Array, dtype: str | None = None, **attributes: Any) -> Any:
        shapes, dtypes = [x.shape for x in inputs], [x.dtype.name for x in inputs]
        results = spec.results(shapes, dtypes, attributes, dtype)
        made = [np.empty(shape, dtype_of(name)) for shape, name in results]
        _ffi.call(spec.name, inputs, made, attributes)
        return made[0] if len(made) == 1 else tuple(made)

    return run


def call_into(
    op: str, inputs: tuple[Array, ...], attributes: Mapping[str, Any], dtype: str | None = None
) -> Callable[[], None]:
    """Return a call of an op that writes to the same output arrays every time, for benchmarks.

    >>> call_into("amax_tensor", (np.ones(4, np.float32),), {})()
    """
    spec = table()[op]
    results = spec.results([x.shape for x in inputs], [x.dtype.name for x in inputs], attributes, dtype)
    made = [np.empty(shape, dtype_of(name)) for shape, name in results]
    return lambda: _ffi.call(op, inputs, made, attributes)


def dtype_of(name: str) -> np.dtype[Any]:
    """Return the NumPy dtype of a dtype name; uint8 for element formats."""
    return np.dtype("uint8" if name in ELEMENTS else getattr(ml_dtypes, name, name))


def swap_last_axes(x: Array) -> Array:
    return np.ascontiguousarray(np.swapaxes(x, -1, -2))


def _transpose_squares(data: Array, scale_inv: Array, *, packed: bool) -> tuple[Array, Array]:
    batch = data.ndim - 2
    data_t = ops.transpose_packed(data) if packed else ops.transpose(data, batch=batch)
    return data_t, swap_last_axes(scale_inv)


ops = SimpleNamespace(
    **{spec.name: bind(spec) for spec in table().values()},
    swap_last_axes=swap_last_axes,
    transposed_squares=_transpose_squares,
)


def philox(op: str, seed: int) -> Philox:
    """Return the Philox key for `seed`, with offset 0. `op` names the caller in errors."""
    return Philox(np.array(uint32_pair(f"{op}: seed", seed), np.uint32), np.zeros(2, np.uint32))


def block_scales(parts: Plane, fmt: Format) -> NDArray[np.float32]:
    """Return the fp32 decode scale of each block: `scale_inv`, times `global_scale_inv` if there is one."""
    scale: NDArray[np.float32] = parts.scale_inv
    if scale.dtype == np.uint8:
        scale = ops.decode(scale, element=fmt.scale_dtype)
    return scale if parts.global_scale_inv is None else scale * parts.global_scale_inv.reshape(-1, 1)
