"""GEMM dispatch: the products of quantized matrices that tensor cores support, and the ops that compute them.

Both front ends check four conditions: `kind_of` for the formats, `contracts_last` for the planes, `fits` for the sizes
and `runs_on` for the GPU. If one fails, they multiply dequantized values with XLA's dot, PyTorch's `mm` or
`multiply_values`.

Grouped products of experts have the same conditions: `grouped_kind_of`, `contracts_last`, `grouped_fits` and
`grouped_runs_on`. "m-grouped" products multiply the rows of each expert by its matrix. "k-grouped" products contract
the rows of each expert.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

from qshard._core import quantize_steps
from qshard._core.environment import grouped_library_version, library_version
from qshard._core.quantize_steps import Plane
from qshard.formats import E4M3, E5M2, E8M0, Format, Usage
from qshard.layout import is_transposed, multiplies_codes

Array = Any
Sizes = tuple[int, int, int]
"""M, N and K of `[M, K] @ [N, K].T`."""

Kind = Literal["tensors", "blocks", "mxfp8", "nvfp4", "values"]

UNIT = 16
"""M, N and K must be multiples of this for tensor cores."""

_FP8 = (E4M3.name, E5M2.name)
LIBRARY_BYTES = 32 * 2**20
"""Workspace of a product of values, in bytes: what the cuBLASLt documentation recommends for Hopper and later."""
_TILE = (128, 4)
"""GEMM scale tile: rows and columns of scales are padded to multiples of these."""
_VALUE_UNIT = 8
"""Elements of 16 bits in 16 bytes, the alignment of the matrices of a group."""
_GROUP_BYTES = 128
"""Upper bound on the workspace bytes of each group: pointers, extents, and tensor scales or alphas."""


class Gpu(NamedTuple):
    """The GPU properties that decide which products it supports.

    Attributes:
      capability: compute capability, such as (9, 0) for Hopper.
      cublaslt: version of cuBLASLt, such as 130400 for 13.4.0; 0 if it is not available.
      grouped_cublaslt: version of the cuBLASLt that grouped products use, which may be another; 0 for none.
    """

    capability: tuple[int, int]
    cublaslt: int
    grouped_cublaslt: int = 0


def gpu_of(capability: tuple[int, int]) -> Gpu:
    """Return the properties of a GPU of this machine, with the versions of the libraries that products use."""
    return Gpu(capability, library_version(), grouped_library_version())


def contracts_last(fmt: Format, usage: Usage) -> bool:
    """Return whether blocks of a plane run along its last axis, as GEMMs require."""
    return usage is Usage.ROWWISE or is_transposed(fmt, usage)


def kind_of(a: Format, b: Format) -> Kind | None:
    """Return the kind of product for codes of two formats, or None if no hardware multiplies them.

    >>> from qshard.formats import FP8_1x128, FP8_128x128, MXFP4
    >>> kind_of(FP8_1x128, FP8_128x128), kind_of(FP8_128x128, FP8_128x128), kind_of(MXFP4, MXFP4)
    ('blocks', None, None)
    """
    elements = a.element.name, b.element.name  # Compare names: Dynamo may turn the numeric fields into symbols.
    if elements == (E5M2.name, E5M2.name):
        return None
    fp8 = elements[0] in _FP8 and elements[1] in _FP8
    if multiplies_codes(a, b):
        return "tensors"
    (a_rows, a_cols), (b_rows, b_cols) = a.block_shape(), b.block_shape()
    if a.per_tensor or b.per_tensor or a.scale_dtype != b.scale_dtype or a_cols != b_cols:
        return None
    if a.scale_dtype == "float32":
        return "blocks" if a_cols == 128 and {a_rows, b_rows} in ({1}, {1, 128}) else None
    if a.scale_dtype == E8M0.name:
        return "mxfp8" if fp8 else None
    return "nvfp4" if a.tensor_scaled and b.tensor_scaled else None


def runs_on(kind: Kind, gpu: Gpu) -> bool:
    """Return whether a GPU's tensor cores support a kind of product.

    | kind | formats | compute capability | cuBLAS |
    | --- | --- | --- | --- |
    | tensors | FP8 with one scale each | 8.9 and later | 12.0 |
    | blocks | FP8 in 1x128 with fp32 scales; one of the two may be in 128x128 | 9.0 | 12.9 |
    | mxfp8 | FP8 in 1x32 or 32x32 with E8M0 scales | 10.x | 12.8 |
    | nvfp4 | NVFP4 with a global scale for the tensor | 10.x | 12.8 |
    | values | bfloat16, of any format | 8.0 and later | 12.0 |

    Two E5M2 operands have no kind. Neither do MXFP6 and MXFP4.

    Sources: cuBLAS documentation, "8-bit and 4-bit floating point data types usage" and "Scaling factors layouts".
    """
    major, minor = gpu.capability
    number = 10 * major + minor  # Dynamo of torch 2.11 cannot order tuples.
    if kind == "values":
        return number >= 80 and gpu.cublaslt >= 120000
    if kind == "tensors":
        return number >= 89 and gpu.cublaslt >= 120000
    if kind == "blocks":
        return number == 90 and gpu.cublaslt >= 120900
    return major == 10 and gpu.cublaslt >= 120800


def fits(kind: Kind, sizes: Sizes) -> bool:
    """Return whether tensor cores accept these sizes: positive multiples of 16, and whole 16-byte units along K.

    >>> fits("tensors", (128, 256, 528)), fits("tensors", (128, 255, 512)), fits("tensors", (0, 256, 512))
    (True, False, False)
    >>> fits("nvfp4", (128, 256, 528))
    False
    """
    whole = all(size > 0 and size % UNIT == 0 for size in sizes)
    return whole and (kind != "nvfp4" or sizes[2] % (2 * UNIT) == 0)


def workspace_size(a: Format, b: Format, sizes: Sizes) -> int:
    """Return the workspace bytes of a product of codes: cuBLASLt's workspace and the scales in GEMM order.

    This is an upper bound on the scale bytes that `ffi/kernels/gemm_scales.h` computes. It exceeds them by some
    kilobytes, except for tensors too large for a GPU.
    """
    size = LIBRARY_BYTES
    if multiplies_codes(a, b):
        return size
    m, n, k = sizes
    for rows, fmt in ((m, a), (n, b)):
        block, number = fmt.block_shape(), fmt.scale_bytes
        # One-byte scales of 2-D blocks are repeated for each row.
        grid = (rows // block[0] if number == 4 else rows) + _TILE[0]
        size += number * grid * (k // block[1] + _TILE[1])
    return size + 1024


def multiply(
    ops: Any, a: Plane, a_format: Format, b: Plane, b_format: Format, *, dtype: Any, fast: bool, workspace: int
) -> Array:
    """Compute `a @ b.T` from the codes of planes `[M, K]` and `[N, K]`, with the op for their formats.

    Args:
      ops: the ops of a front end.
      a: plane `[M, K]`.
      a_format: format of `a`.
      b: plane `[N, K]`.
      b_format: format of `b`. `kind_of` both formats is not None.
      dtype: dtype of the result, in the front end's type.
      fast: allow tensor cores to accumulate long sums with fewer bits, as is usual in the forward pass.
      workspace: `workspace_size` of the operands on a GPU, 0 on the CPU.
    """
    how: dict[str, Any] = {"dtype": dtype, "workspace": workspace}
    elements = {"a_element": a_format.element.name, "b_element": b_format.element.name}
    if multiplies_codes(a_format, b_format):
        return ops.gemm(a.data, a.scale_inv, b.data, b.scale_inv, fast=fast, **elements, **how)[0]
    a_rows, cols = a_format.block_shape()
    how |= {"a_rows": a_rows, "b_rows": b_format.block_shape()[0]}
    if a.global_scale_inv is not None:
        return ops.gemm_nvfp4(*a, *b, **how)[0]
    how |= elements | {"cols": cols, "scale_dtype": a_format.scale_dtype}
    return ops.gemm_block(a.data, a.scale_inv, b.data, b.scale_inv, **how)[0]


def multiply_values(
    ops: Any, a: Array, a_in_order: bool, b: Array, b_in_order: bool, *, dtype: Any, workspace: int
) -> Array:
    """Compute `a @ b.T` from floats of one dtype, accumulated in fp32.

    Args:
      ops: the ops of a front end.
      a: `[M, K]`, or `[K, M]` if not `a_in_order`.
      a_in_order: whether `a` is stored with K last.
      b: `[N, K]`, or `[K, N]` if not `b_in_order`.
      b_in_order: whether `b` is stored with K last.
      dtype: dtype of the result: the operands' dtype or float32.
      workspace: bytes that cuBLASLt may use; 0 on the CPU.
    """
    multiplied = getattr(ops, f"gemm_values_{'n' if a_in_order else 't'}{'t' if b_in_order else 'n'}")
    return multiplied(a, b, dtype=dtype, workspace=workspace)[0]


# --- grouped products ---


def grouped_kind_of(a: Format, b: Format, *, by_k: bool = False) -> Kind | None:
    """Return the kind of grouped product for codes of two formats, or None if no hardware multiplies them.

    Args:
      a: format of the tokens, or of the first operand if `by_k`. Its blocks must be 1-D.
      b: format of the experts' matrices, or of the second operand.
      by_k: whether the product is k-grouped. Then the blocks of both must be 1-D.

    >>> from qshard.formats import FP8_1x128, FP8_128x128, NVFP4
    >>> grouped_kind_of(FP8_1x128, FP8_128x128), grouped_kind_of(FP8_1x128, FP8_128x128, by_k=True)
    ('blocks', None)
    >>> grouped_kind_of(NVFP4, NVFP4, by_k=True)
    'nvfp4'
    """
    kind = kind_of(a, b)
    if kind in ("tensors", None):
        return kind
    one_dimensional = a.block_shape()[0] == 1 and (not by_k or b.block_shape()[0] == 1)
    return kind if one_dimensional else None


def grouped_runs_on(kind: Kind, gpu: Gpu) -> bool:
    """Return whether a GPU's tensor cores support a kind of grouped product.

    | kind | formats | compute capability | cuBLAS |
    | --- | --- | --- | --- |
    | tensors | FP8 with one scale for each expert | 9.0 | 13.5 |
    | blocks | FP8 in 1x128 with fp32 scales; the experts' matrices may be in 128x128 | 9.0 | 13.4 |
    | values | bfloat16 and float16 | 9.0 | 13.4 |
    | mxfp8 | FP8 in 1x32 with E8M0 scales; the experts' matrices may be in 32x32 | 10.x | 13.4 |
    | nvfp4 | NVFP4 with a global scale for each expert; the experts' matrices may be in 16x16 | 10.x | 13.4 |

    Products for 9.0 were measured on an H100. Those for 10.x have not run. cuBLAS has MXFP8 in groups since 13.3, and
    NVFP4 since 13.4.

    Sources: cuBLAS documentation, "cublasLtMatmul" (grouped matrices); release notes of CUDA 13.2 and 13.2 Update 1.
    """
    runs = gpu.capability[0] == 10 if kind in ("mxfp8", "nvfp4") else gpu.capability == (9, 0)
    return runs and gpu.grouped_cublaslt >= (130500 if kind == "tensors" else 130400)


def grouped_fits(kind: Kind, sizes: Sizes, unit: int = UNIT, *, by_k: bool = False) -> bool:
    """Return whether tensor cores accept grouped products of these sizes.

    Args:
      kind: of the product.
      sizes: M, N and K. The axis that experts divide is M, or K if `by_k`.
      unit: every stop is a multiple of it. Any for "values".
      by_k: whether the product is k-grouped.

    >>> grouped_fits("tensors", (256, 512, 384)), grouped_fits("tensors", (256, 512, 384), 8)
    (True, False)
    >>> grouped_fits("blocks", (512, 384, 256), 16, by_k=True), grouped_fits("values", (7, 512, 384), 1)
    (False, True)
    """
    if kind != "values":
        return fits(kind, sizes) and unit % (contracted_unit(kind) if by_k else UNIT) == 0
    axes = sizes[:2] if by_k else sizes[1:]
    return all(size > 0 for size in sizes) and all(size % _VALUE_UNIT == 0 for size in axes)


def contracted_unit(kind: Kind | None) -> int:
    """Return the number that stops must be multiples of for a k-grouped product of codes; 1 if there is none.

    >>> [contracted_unit(kind) for kind in (None, "tensors", "blocks", "mxfp8", "nvfp4")]
    [1, 16, 128, 32, 32]
    """
    return 1 if kind is None else {"blocks": 128, "mxfp8": 32, "nvfp4": 2 * UNIT}.get(kind, UNIT)


def grouped_workspace_size(
    experts: int, sizes: Sizes, a: Format | None = None, b: Format | None = None, *, by_k: bool = False
) -> int:
    """Return the workspace bytes of a grouped product: of cuBLASLt, of the arrays of groups, and of scales.

    This is an upper bound on the bytes that `ffi/kernels/gemm_groups.h` computes.

    Args:
      experts: number of groups.
      sizes: M, N and K.
      a: format of the first operand; None for values.
      b: format of the second operand; None for values.
      by_k: whether the product is k-grouped.
    """
    size = LIBRARY_BYTES + _GROUP_BYTES * (experts + 64)
    if a is None or b is None or multiplies_codes(a, b):
        return size
    (m, n, k), (rows, cols) = sizes, b.block_shape()
    across = k // cols + _TILE[1]
    if (number := b.scale_bytes) == 4:
        return size + number * across * (m + (1 if by_k else experts) * (n // rows + _TILE[0]))
    # One-byte scales: each expert has whole tiles of its own, also of the axis that experts divide.
    if by_k:
        return size + number * (across + _TILE[1] * experts) * (m + n + 2 * _TILE[0])
    return size + number * across * (m + experts * (n + 2 * _TILE[0]))


def multiply_grouped(
    ops: Any,
    a: Plane,
    a_format: Format,
    b: Plane,
    b_format: Format,
    stops: Array,
    *,
    ends: Array | None = None,
    tokens: int | None = None,
    dtype: Any,
    fast: bool = False,
    workspace: int,
) -> Array:
    """Multiply the codes of each expert's rows by the codes of its matrix: `[M, N]`, or `[tokens, N]` without padding.

    `out[r] = a[r] @ b[e].T` for the rows r of expert e. Rows of the result that belong to no expert are zeros.

    Args:
      ops: the ops of a front end.
      a: plane `[M, K]`; formats with one scale have a `scale_inv` for each expert, `[E]`.
      a_format: format of `a`. Its blocks are 1-D.
      b: planes of the experts' matrices, `[E, N, K]`, contracted along their last axis; likewise. NVFP4 has a
        `global_scale_inv` for each expert in both, `[E]`.
      b_format: format of `b`.
      stops: int32 `[E]`, where the rows of each expert end, starting from 0. Out-of-range numbers are clamped.
      ends: likewise in the result, which then has the first rows of each expert; None for `stops`. Only formats with
        one scale take it, where `multiplies_codes(a_format, b_format)`.
      tokens: rows of the result, if `ends` is passed.
      dtype: dtype of the result, in the front end's type.
      fast: as in `multiply`.
      workspace: `grouped_workspace_size` on a GPU, 0 on the CPU.
    """
    how = grouped_options(a_format, b_format, fast) | {"dtype": dtype, "workspace": workspace}
    if multiplies_codes(a_format, b_format):
        if ends is None:
            ends, tokens = stops, a.data.shape[0]
        return ops.gemm_grouped(a.data, a.scale_inv, b.data, b.scale_inv, stops, ends, tokens=tokens, **how)[0]
    if ends is not None:
        raise ValueError(
            f"multiply_grouped: ends are not supported for blocks ({a_format}); pass None, and gather rows"
        )
    b_rows = b_format.block_shape()[0]
    if a.global_scale_inv is not None:
        return ops.gemm_grouped_nvfp4(*a, *b, stops, b_rows=b_rows, dtype=dtype, workspace=workspace)[0]
    return ops.gemm_grouped_block(a.data, a.scale_inv, b.data, b.scale_inv, stops, b_rows=b_rows, **how)[0]


def multiply_grouped_k(
    ops: Any,
    a: Plane,
    a_format: Format,
    b: Plane,
    b_format: Format,
    stops: Array,
    *,
    dtype: Any,
    fast: bool = False,
    workspace: int,
) -> Array:
    """Contract the codes of each expert's rows: `[E, M, N]`, as for weight gradients.

    `out[e] = a[:, rows of e] @ b[:, rows of e].T`. An expert without rows gives zeros.

    Args:
      ops: the ops of a front end.
      a: plane `[M, P]`, with P padded rows of tokens last, such as the columnwise plane of the output's gradient;
        formats with one scale have a `scale_inv` for each expert, `[E]`, and NVFP4 a `global_scale_inv`. The columnwise
        plane of MXFP8 is not transposed: `[P, M]`.
      a_format: format of `a`. Its blocks are 1-D.
      b: plane `[N, P]`, such as the columnwise plane of the tokens; likewise.
      b_format: format of `b`. Its blocks are 1-D.
      stops: as in `multiply_grouped`; multiples of the blocks.
      dtype: dtype of the result, in the front end's type.
      fast: as in `multiply`.
      workspace: `grouped_workspace_size` with `by_k` on a GPU, 0 on the CPU.
    """
    how = {"dtype": dtype, "workspace": workspace}
    if a.global_scale_inv is not None:
        return ops.gemm_grouped_nvfp4_k(*a, *b, stops, **how)[0]
    operands = a.data, a.scale_inv, b.data, b.scale_inv, stops
    if not contracts_last(a_format, Usage.COLUMNWISE):
        elements = {"a_element": a_format.element.name, "b_element": b_format.element.name}
        return ops.gemm_grouped_mxfp8_tn(*operands, **elements, **how)[0]
    op = ops.gemm_grouped_k if multiplies_codes(a_format, b_format) else ops.gemm_grouped_block_k
    return op(*operands, **grouped_options(a_format, b_format, fast), **how)[0]


def grouped_options(a: Format, b: Format, fast: bool) -> dict[str, Any]:
    """Return the attributes that all ops of grouped products of codes share."""
    elements = {"a_element": a.element.name, "b_element": b.element.name}
    if multiplies_codes(a, b):
        return elements | {"fast": fast}
    return elements | {"cols": a.block_shape()[1], "scale_dtype": a.scale_dtype}


def multiply_grouped_values(
    ops: Any, a: Array, b: Array, stops: Array, *, layout: Literal["nt", "nn", "tn"], dtype: Any, workspace: int
) -> Array:
    """Compute a grouped product of floats of one dtype, accumulated in fp32.

    | layout | a | b | result |
    | --- | --- | --- | --- |
    | "nt" | `[M, K]` | `[E, N, K]` | `[M, N]`: the rows of each expert times its matrix transposed |
    | "nn" | `[M, K]` | `[E, K, N]` | `[M, N]`: the rows of each expert times its matrix |
    | "tn" | `[P, M]` | `[P, N]` | `[E, M, N]`: the transposed rows of each expert times its rows of b |

    Args:
      ops: the ops of a front end.
      a: bfloat16 or float16; on the CPU also float32.
      b: of the same dtype.
      stops: int32 `[E]`, as in `multiply_grouped`. They need not be multiples of anything.
      layout: how the operands are stored.
      dtype: dtype of the result: the operands' dtype or float32.
      workspace: `grouped_workspace_size` on a GPU, 0 on the CPU.
    """
    return getattr(ops, f"gemm_grouped_values_{layout}")(a, b, stops, dtype=dtype, workspace=workspace)[0]


class ProductPlan(NamedTuple):
    """The plan of a product of two planes by ops, with their formats and usages and the workspace in bytes.

    Attributes:
      values: dtype that the planes are dequantized to; None: codes are multiplied.
    """

    a: tuple[Format, Usage]
    b: tuple[Format, Usage]
    workspace: int
    values: Any = None

    def multiply(self, ops: Any, a: Plane, b: Plane, *, dtype: Any, fast: bool = False) -> Array:
        """Compute `a @ b.T`; `dtype` and `fast` as in `multiply`."""
        if self.values is None:
            options = {"dtype": dtype, "fast": fast, "workspace": self.workspace}
            return multiply(ops, a, self.a[0], b, self.b[0], **options)
        x, y = (quantize_steps.dequantize(ops, each, *of, self.values) for each, of in ((a, self.a), (b, self.b)))
        in_order = contracts_last(*self.a), contracts_last(*self.b)
        return multiply_values(ops, x, in_order[0], y, in_order[1], dtype=dtype, workspace=self.workspace)
