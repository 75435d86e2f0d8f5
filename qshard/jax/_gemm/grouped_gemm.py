"""Grouped products of experts: by qshard's own ops on GPUs that have them, elsewhere by `jax.lax.ragged_dot_general`.

Rows of expert e are those from the stop of the expert before it to `stops[e]`. A product either multiplies the rows of
each expert by its matrix, or contracts them. The platform is known only when a program is lowered, so a product traces
both ways, and XLA sees one. On Auto meshes XLA replicates the operands of the ops.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from qshard import gemm_dispatch
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import Format, Usage
from qshard.jax._gemm import target_gpu
from qshard.jax._quantized.array import QuantizedArray
from qshard.jax._sharding import partitionable_ops

Product = Callable[..., jax.Array]

_OF_16_BITS = (jnp.bfloat16, jnp.float16)


def multiply_rows(a: jax.Array, b: jax.Array, axis: int, stops: jax.Array, dtype: Any) -> jax.Array:
    """Multiply the rows of each expert by its matrix: `[P, N]` in `dtype`, with zeros in rows of no expert.

    Args:
      a: the rows of all experts, `[P, K]`.
      b: the matrices, `[E, N, K]` or `[E, K, N]`, in the dtype of `a`.
      axis: the axis of `b` that has length K.
      stops: the end of each expert's rows, int32 `[E]`.
      dtype: dtype of the result.
    """
    sizes = a.shape[0], b.shape[3 - axis], a.shape[1]
    return _multiply("nt" if axis == 2 else "nn", sizes, a, b, stops, (1, axis), dtype)


def contract_rows(a: jax.Array, b: jax.Array, stops: jax.Array, dtype: Any) -> jax.Array:
    """Multiply `a[rows].T @ b[rows]` over the rows of each expert: `[E, M, N]` in `dtype`.

    Args:
      a: rows `[P, M]`.
      b: rows `[P, N]`, in the dtype of `a`.
      stops: the end of each expert's rows, int32 `[E]`.
      dtype: dtype of the result.
    """
    return _multiply("tn", (a.shape[1], b.shape[1], a.shape[0]), a, b, stops, (0, 0), dtype)


def _multiply(
    layout: Literal["nt", "nn", "tn"],
    sizes: gemm_dispatch.Sizes,
    a: jax.Array,
    b: jax.Array,
    stops: jax.Array,
    contracted: tuple[int, int],
    dtype: Any,
) -> jax.Array:
    gpu, by_k = target_gpu.gpu_of(a), layout == "tn"
    has_op = a.dtype in _OF_16_BITS and gpu is not None and gemm_dispatch.grouped_runs_on("values", gpu)
    workspace = gemm_dispatch.grouped_workspace_size(stops.shape[0], sizes, by_k=by_k)

    def by_op(a: jax.Array, b: jax.Array, stops: jax.Array) -> jax.Array:
        own = jnp.dtype(dtype if dtype == a.dtype else jnp.float32).name
        made: jax.Array = gemm_dispatch.multiply_grouped_values(
            partitionable_ops, a, b, stops, layout=layout, dtype=own, workspace=workspace
        )
        return made.astype(dtype)

    plain = functools.partial(_ragged_dot_general, contracted, dtype)
    has_op &= gemm_dispatch.grouped_fits("values", sizes, 1, by_k=by_k)
    return _choose(has_op, by_op, plain, a, b, stops)


def _choose(has_op: bool, by_op: Product, otherwise: Product, *operands: Any) -> jax.Array:
    return target_gpu.by_platform(by_op, otherwise, *operands) if has_op else otherwise(*operands)


def _ragged_dot_general(
    contracted: tuple[int, int], dtype: Any, a: jax.Array, b: jax.Array, stops: jax.Array
) -> jax.Array:
    dims = lax.RaggedDotDimensionNumbers(
        (((contracted[0],), (contracted[1],)), ((), ())), [0], [0] if b.ndim == 3 else []
    )
    # XLA sums in the result's dtype.
    narrow = jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32
    plain = functools.partial(lax.ragged_dot_general, ragged_dot_dimension_numbers=dims, preferred_element_type=narrow)
    multiply = jax.custom_batching.custom_vmap(plain)

    @multiply.def_vmap
    def _(size: int, batched: list[bool], *operands: jax.Array) -> tuple[jax.Array, bool]:
        """Broadcast all operands: JAX can batch a ragged product only along the first axis of every operand."""
        each = zip(operands, batched, strict=True)
        return jax.vmap(plain)(*(x if flag else jnp.broadcast_to(x, (size, *x.shape)) for x, flag in each)), True

    sizes = jnp.diff(stops, prepend=jnp.zeros(1, stops.dtype))
    product: jax.Array = multiply(a, b, sizes).astype(dtype)
    return product


def multiply_row_codes(
    a: QuantizedArray,
    w: QuantizedArray,
    contracted: Usage,
    stops: jax.Array,
    ends: jax.Array | None,
    place: jax.Array | None,
    dtype: Any,
    multiply_values: Product,
    *,
    fast: bool,
) -> jax.Array:
    """Multiply the rows of each expert by its weight, from codes where a GPU has an op for them: `[M, N]`.

    With one scale for each expert, the op writes the rows of tokens itself. Other products are gathered.

    Args:
      a: the padded rows of all experts, `[P, K]`.
      w: the weights, with experts as the first axis.
      contracted: the plane of `w` that the product contracts.
      stops: the end of each expert's padded rows, int32 `[E]`.
      ends: the end of each expert's rows in the result, int32 `[E]`; None if the result is not sorted by expert.
      place: the padded row of each row of the result, int32 `[M]`; None for a result of padded rows.
      dtype: dtype of the result.
      multiply_values: the product of padded rows elsewhere, a function of `a` and `w`.
      fast: as in `gemm_dispatch.multiply`.
    """
    n, k = w.shape[1:] if contracted is Usage.ROWWISE else w.shape[:0:-1]
    sizes = a.shape[-2], n, k
    options: dict[str, Any] = {"dtype": jnp.dtype(dtype).name, "fast": fast}

    kind = takes_codes(a.format, w.format, stops)

    def by_op(a: QuantizedArray, w: QuantizedArray, stops: jax.Array, ends: Any, place: Any) -> jax.Array:
        x, y = a.plane(Usage.ROWWISE), _contracted_last(w, contracted)
        options["workspace"] = gemm_dispatch.grouped_workspace_size(stops.shape[0], sizes, a.format, w.format)
        operands = partitionable_ops, x, a.format, y, w.format, stops
        if kind != "tensors" or ends is None:
            return _gather(gemm_dispatch.multiply_grouped(*operands, **options), place)
        made: jax.Array = gemm_dispatch.multiply_grouped(*operands, ends=ends, tokens=place.shape[0], **options)
        return made

    def plain(a: QuantizedArray, w: QuantizedArray, _: jax.Array, __: Any, place: jax.Array | None) -> jax.Array:
        return _gather(multiply_values(a, w), place)

    in_order = gemm_dispatch.contracts_last(w.format, contracted)
    has_op = kind is not None and in_order and gemm_dispatch.grouped_fits(kind, sizes)
    return _choose(has_op, by_op, plain, a, w, stops, ends, place)


def _gather(product: jax.Array, place: jax.Array | None) -> jax.Array:
    return product if place is None else product.at[place].get(mode="promise_in_bounds")


def contract_row_codes(
    a: QuantizedArray, b: QuantizedArray, stops: jax.Array, unit: int, dtype: Any, multiply_values: Product
) -> jax.Array:
    """Contract the rows of each expert, from codes where a GPU has an op for them: `[E, M, N]` in `dtype`.

    `a` and `b` have rows `[P, M]` and `[P, N]`, and store their columnwise planes `[M, P]` and `[N, P]` for the op, or
    as rows in MXFP8. Stops are multiples of `unit`. Other arguments as in `multiply_row_codes`.
    """
    sizes = a.shape[-1], b.shape[-1], a.shape[-2]
    options: dict[str, Any] = {"dtype": jnp.dtype(dtype).name, "fast": False}

    def by_op(a: QuantizedArray, b: QuantizedArray, stops: jax.Array) -> jax.Array:
        x, y = a.plane(Usage.COLUMNWISE), b.plane(Usage.COLUMNWISE)
        size = gemm_dispatch.grouped_workspace_size(stops.shape[0], sizes, a.format, b.format, by_k=True)
        made: jax.Array = gemm_dispatch.multiply_grouped_k(
            partitionable_ops, x, a.format, y, b.format, stops, workspace=size, **options
        )
        return made

    kind = takes_codes(a.format, b.format, stops, by_k=True)
    has_op = kind is not None and gemm_dispatch.grouped_fits(kind, sizes, unit, by_k=True)
    return _choose(has_op, by_op, lambda a, b, _: multiply_values(a, b), a, b, stops)


def takes_codes(a: Format, b: Format, x: jax.Array, *, by_k: bool = False) -> gemm_dispatch.Kind | None:
    """Return the kind of a grouped product of codes on the GPU that a program of `x` runs on; None if it has none.

    `a` is the format of rows, and `b` of weights, or of rows as well if the product contracts rows (`by_k`).
    """
    gpu, kind = target_gpu.gpu_of(x), gemm_dispatch.grouped_kind_of(a, b, by_k=by_k)
    if gpu is None or kind is None:
        return None
    return kind if gemm_dispatch.grouped_runs_on(kind, gpu) else None


def _contracted_last(w: QuantizedArray, contracted: Usage) -> Plane:
    """The plane of weights that a product contracts. If it is not stored, transpose the rowwise plane."""
    if contracted in w.planes:
        return w.plane(contracted)
    turn = functools.partial(quantize_steps.transpose_plane, partitionable_ops, fmt=w.format)
    plane: Plane = jax.vmap(turn)(w.plane(Usage.ROWWISE))
    return plane
