"""Products of quantized matrices: which ones tensor cores take as codes, and the op that multiplies them.

Both front ends ask first: `kind_of` of the formats, `contracts_last` of the planes, `fits` of the sizes, `runs_on` of
the GPU. Where one says no, they multiply dequantized values: XLA's dot, PyTorch's `mm`, or an op (`multiply_values`).
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from qshard import _ffi
from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard.formats import E4M3, E5M2, E8M0, Format, Usage
from qshard.layout import is_transposed, multiplies_codes

Array = Any
Sizes = tuple[int, int, int]
"""M, N and K of `[M, K] @ [N, K].T`."""

Kind = Literal["tensors", "blocks", "mxfp8", "nvfp4", "values"]

UNIT = 16
"""What each of the sizes of a product is a multiple of, if tensor cores take it."""

_FP8 = (E4M3.name, E5M2.name)
LIBRARY_BYTES = 32 * 2**20
"""What cuBLASLt may use, as its documentation recommends for Hopper and later: the workspace of products of values."""
_TILE = (128, 4)
"""Rows and columns that scales are padded to."""


class Gpu(NamedTuple):
    """What a product may run on.

    Attributes:
      capability: compute capability, such as (9, 0) of Hopper.
      cublaslt: the version of the library, 130400 being 13.4.0; 0 where there is none.
    """

    capability: tuple[int, int]
    cublaslt: int


def library_version() -> int:
    """The version of the cuBLASLt that products run on: `Gpu.cublaslt`.

    It is that which the process has loaded, as PyTorch and JAX do; else what the system's loader finds; else what lies
    in Python's packages of NVIDIA. Without CUDA kernels in this build it is 0.
    """
    if not _ffi.cuda_built:
        return 0
    folders = getattr(find_spec("nvidia"), "submodule_search_locations", None) or ()
    # Of CUDA 13, then of 12.
    names = ("cu13/lib/libcublasLt.so.13", "cublas/lib/libcublasLt.so.12")
    files = [str(path) for name in names for folder in folders if (path := Path(folder, name)).is_file()]
    _ffi.set_gemm_library_paths(files)
    return _ffi.gemm_library_version()


def contracts_last(fmt: Format, usage: Usage) -> bool:
    """Whether a plane has the axis that blocks run along last, as GEMMs read it."""
    return usage is Usage.ROWWISE or is_transposed(fmt, usage)


def kind_of(a: Format, b: Format) -> Kind | None:
    """Which kind of product codes of two formats have, if some hardware multiplies them.

    >>> from qshard.formats import FP8_1x128, FP8_128x128, MXFP4
    >>> kind_of(FP8_1x128, FP8_128x128), kind_of(FP8_128x128, FP8_128x128), kind_of(MXFP4, MXFP4)
    ('blocks', None, None)
    """
    elements = a.element.name, b.element.name  # Dynamo may take numbers of theirs for symbols.
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
    """Whether a GPU has tensor cores for a kind of product.

    | kind | formats | compute capability | cuBLAS |
    | --- | --- | --- | --- |
    | tensors | FP8 with one scale each | 8.9 and later | 12.0 |
    | blocks | FP8 in 1x128 with fp32 scales; one of the two may be in 128x128 | 9.0 | 12.9 |
    | mxfp8 | FP8 in 1x32 or 32x32 with E8M0 scales | 10.x | 12.8 |
    | nvfp4 | NVFP4 with a global scale for the tensor | 10.x | 12.8 |
    | values | bfloat16, of any format | 8.0 and later | 12.0 |

    Two operands of E5M2 have no kind, nor have MXFP6 and MXFP4.

    Sources: cuBLAS documentation, "8-bit and 4-bit floating point data types usage" and "Scaling factors layouts".
    """
    if kind == "values":
        return gpu.capability >= (8, 0) and gpu.cublaslt >= 120000
    if kind == "tensors":
        return gpu.capability >= (8, 9) and gpu.cublaslt >= 120000
    if kind == "blocks":
        return gpu.capability == (9, 0) and gpu.cublaslt >= 120900
    return gpu.capability[0] == 10 and gpu.cublaslt >= 120800


def fits(kind: Kind, sizes: Sizes) -> bool:
    """Whether tensor cores take matrices of these sizes: positive multiples of 16, and of 16 bytes along K.

    >>> fits("tensors", (128, 256, 528)), fits("tensors", (128, 255, 512)), fits("tensors", (0, 256, 512))
    (True, False, False)
    >>> fits("nvfp4", (128, 256, 528))
    False
    """
    whole = all(size > 0 and size % UNIT == 0 for size in sizes)
    return whole and (kind != "nvfp4" or sizes[2] % (2 * UNIT) == 0)


def workspace_size(a: Format, b: Format, sizes: Sizes) -> int:
    """Bytes that a product of codes needs besides operands and result: what cuBLASLt may use, and scales in its order.

    It is at least what `ffi/kernels/gemm_scales.h` has for scales; some kilobytes more, but for tensors that would not
    fit a GPU.
    """
    size = LIBRARY_BYTES
    if multiplies_codes(a, b):
        return size
    m, n, k = sizes
    for rows, fmt in ((m, a), (n, b)):
        block, number = fmt.block_shape(), fmt.scale_bytes
        # One-byte scales of squares are repeated for each row.
        grid = (rows // block[0] if number == 4 else rows) + _TILE[0]
        size += number * grid * (k // block[1] + _TILE[1])
    return size + 1024


def multiply(
    ops: Any, a: Plane, a_format: Format, b: Plane, b_format: Format, *, dtype: Any, fast: bool, workspace: int
) -> Array:
    """`a @ b.T` of two planes `[M, K]` and `[N, K]`, by the op for their formats, which are of one kind.

    Args:
      dtype: of the result, as the front end names it.
      fast: whether tensor cores may keep fewer bits of long sums, as is usual in the forward pass.
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
    """`a @ b.T` of floats of one dtype, summed in fp32.

    Args:
      a, b: `[M, K]` and `[N, K]`.
      a_in_order, b_in_order: whether each is stored so; if not, with K first.
      dtype: of the result: that of the operands, or float32.
      workspace: bytes that cuBLASLt may use; 0 on the CPU.
    """
    multiplied = getattr(ops, f"gemm_values_{'n' if a_in_order else 't'}{'t' if b_in_order else 'n'}")
    return multiplied(a, b, dtype=dtype, workspace=workspace)[0]


class Way(NamedTuple):
    """How ops multiply two planes, if they do.

    Attributes:
      a, b: the format of each plane, and the usage that it is for.
      workspace: bytes.
      values: what the planes are dequantized to; None: their codes are multiplied.
    """

    a: tuple[Format, Usage]
    b: tuple[Format, Usage]
    workspace: int
    values: Any = None

    def product(self, ops: Any, a: Plane, b: Plane, *, dtype: Any, fast: bool = False) -> Array:
        """`a @ b.T`; `dtype` and `fast` as `multiply` has them."""
        if self.values is None:
            options = {"dtype": dtype, "fast": fast, "workspace": self.workspace}
            return multiply(ops, a, self.a[0], b, self.b[0], **options)
        x, y = (quantize_steps.dequantize(ops, each, *of, self.values) for each, of in ((a, self.a), (b, self.b)))
        in_order = contracts_last(*self.a), contracts_last(*self.b)
        return multiply_values(ops, x, in_order[0], y, in_order[1], dtype=dtype, workspace=self.workspace)
