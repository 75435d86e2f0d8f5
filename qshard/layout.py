"""Shapes of the planes of a quantized tensor, and the errors for shapes that a format does not support.

`x` has shape `[*lead, K]` and is treated as a matrix `[M, K]`, where M is the product of the leading axes.

| plane | data | scale_inv |
| --- | --- | --- |
| rowwise, one scale | `[*lead, K]` | `[]` |
| rowwise, blocks (1, b) | `[*lead, K]` | `[*lead, ceil(K / b)]` |
| rowwise, blocks (b, b) | `[*lead, K]` | `[ceil(M / b), ceil(K / b)]` |
| columnwise, MXFP8 and MXFP6 (32, 1) | `[*lead, K]` | `[M / 32, K]` |
| columnwise, all others | `[K, M]`: the rowwise plane of `x.T` | the rowwise scales of `x.T` |

4-bit codes are packed along the last axis of `data`, which halves it. Scales are row-major and unpadded; only
`swizzle_scale` builds the padded tiles that GEMMs read.

Sources: OCP Microscaling Formats v1.0, section 5; cuBLAS documentation, "1D Block Scaling Factors Layout" (the tiles).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from qshard._core.validation import FormatLike, as_format, as_plane
from qshard.formats import Format, Usage

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlaneLayout:
    """Shapes and block of one plane of a tensor.

    Attributes:
      data_shape: shape of `data`, after packing.
      scale_shape: shape of `scale_inv`.
      global_scale_shape: shape of `global_scale_inv`; None if the format has none.
      transposed: whether `data` and `scale_inv` belong to `x.T`.
      block: (rows, cols) of the stored matrix, `x` or `x.T`, that share a scale; None: the whole matrix shares one.
      is_stack: whether `x` is a stack of matrices that have their own scales (`stack_plane`).
    """

    data_shape: Shape
    scale_shape: Shape
    global_scale_shape: Shape | None
    transposed: bool
    block: tuple[int, int] | None = field(repr=False)
    format: Format = field(repr=False)
    shape: Shape = field(repr=False)
    usage: Usage = field(repr=False)
    is_stack: bool = field(default=False, repr=False)

    @property
    def rows_apart(self) -> bool:
        """True if scales are per row of the stored matrix, so that `scale_inv` keeps the leading axes of `x`."""
        return has_rows_apart(self.format, self.usage)

    @property
    def keeps_axes(self) -> bool:
        """True if the rowwise plane can be computed from `x` without folding its leading axes into rows."""
        return self.block is None or self.rows_apart

    @property
    def rotated(self) -> bool:
        """True if the plane quantizes a rotated `x`."""
        return self.format.rotates(self.usage)

    @property
    def scaled_shape(self) -> tuple[int, int]:
        """(rows, cols) of the stored matrix that share a scale: the block, or the whole matrix."""
        matrix = matrix_shape(self.shape[-2:] if self.is_stack else self.shape)
        return self.block or (matrix[::-1] if self.transposed else matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of data and all scales."""
        whole = 0 if self.global_scale_shape is None else 4 * math.prod(self.global_scale_shape)
        return math.prod(self.data_shape) + self.format.scale_bytes * math.prod(self.scale_shape) + whole

    @property
    def unit(self) -> int:
        """Alignment of flat slices in elements: multiples split no block, byte, or row with its own global scale."""
        if self.block is None:
            return 16  # No block can be split. 16 elements align codes and masters of each rank to 16 bytes.
        columns = matrix_shape(self.shape)[1]
        in_row = self.rows_apart and columns % self.block[1] == 0 and not self.format.row_scaled
        return self.block[1] if in_row else self.block[0] * columns


def matrix_shape(shape: Shape) -> tuple[int, int]:
    """Return `(M, K)`, the size of the matrix that `x` is quantized as: leading axes are folded into rows.

    >>> matrix_shape((2, 3, 64)), matrix_shape((64,)), matrix_shape(())
    ((6, 64), (1, 64), (1, 1))
    """
    return math.prod(shape[:-1]), shape[-1] if shape else 1


def is_transposed(fmt: Format, usage: Usage) -> bool:
    """Return whether a plane is stored as the rowwise plane of `x.T`.

    >>> from qshard.formats import FP8_1x128, MXFP4, MXFP8_32x32, MXFP8_E4M3
    >>> [is_transposed(fmt, Usage.COLUMNWISE) for fmt in (FP8_1x128, MXFP8_32x32, MXFP8_E4M3, MXFP4)]
    [True, True, False, True]
    """
    return usage is Usage.COLUMNWISE and fmt.transposes_columns


def stored_block(fmt: Format, usage: Usage) -> tuple[int, int] | None:
    """Return the (rows, cols) of the stored matrix, `x` or `x.T`, that share a scale, or None if all of it does.

    >>> from qshard.formats import FP8_1x128, MXFP8_E4M3
    >>> [stored_block(fmt, Usage.COLUMNWISE) for fmt in (FP8_1x128, MXFP8_E4M3)]
    [(1, 128), (32, 1)]
    """
    return fmt.block if is_transposed(fmt, usage) else fmt.block_of(usage)


def has_rows_apart(fmt: Format, usage: Usage) -> bool:
    """Return whether each row of the stored matrix has its own scales.

    >>> from qshard.formats import FP8_1x128, FP8_E4M3, MXFP8_E4M3
    >>> [has_rows_apart(fmt, Usage.COLUMNWISE) for fmt in (FP8_1x128, FP8_E4M3, MXFP8_E4M3)]
    [True, False, False]
    """
    block = stored_block(fmt, usage)
    return block is not None and block[0] == 1


def has_row_blocks_of(fmt: Format, other: Format) -> bool:
    """Return whether a format has the elements and scales of another one, in 1-D blocks along its columns.

    >>> from qshard.formats import FP8_E4M3, MXFP8_32x32, MXFP8_E4M3, MXFP8_E5M2
    >>> [has_row_blocks_of(fmt, MXFP8_32x32) for fmt in (MXFP8_E4M3, MXFP8_E5M2, MXFP8_32x32, FP8_E4M3)]
    [True, False, False, False]
    """
    if (fmt.element, fmt.kind, fmt.row_scaled) != (other.element, other.kind, other.row_scaled) or fmt.per_tensor:
        return False
    return fmt.block_shape() == (1, other.block_shape()[1])


def takes_rows(fmt: Format) -> bool:
    """Return whether an op quantizes a format straight into padded rows. Others are gathered first.

    >>> from qshard.formats import MXFP8_E4M3, NVFP4
    >>> [takes_rows(fmt) for fmt in (MXFP8_E4M3, NVFP4, NVFP4.with_options(global_scale="row"))]
    [True, True, False]
    """
    return not (fmt.row_scaled or fmt.scaling.four_over_six)


def rows_are_independent(fmt: Format) -> bool:
    """Return whether the rowwise codes and scales of a row depend on this row alone, wherever it is in a matrix.

    >>> from qshard.formats import FP8_1x128, FP8_E4M3, MXFP8_32x32, NVFP4
    >>> [rows_are_independent(fmt) for fmt in (FP8_1x128, FP8_E4M3, MXFP8_32x32, NVFP4)]
    [True, False, False, False]
    """
    return takes_rows(fmt) and not (fmt.tensor_scaled or fmt.stochastic) and fmt.block_shape()[0] == 1


def source(fmt: Format, usage: Usage) -> Usage:
    """Return the plane to quantize, gather or save in order to serve `usage`.

    If both planes hold the same numbers, this is the rowwise plane: the columnwise plane is its transpose.

    >>> from qshard.formats import FP8_E4M3, MXFP8_32x32, MXFP8_E4M3
    >>> [source(fmt, Usage.COLUMNWISE).name for fmt in (FP8_E4M3, MXFP8_32x32, MXFP8_E4M3)]
    ['ROWWISE', 'ROWWISE', 'COLUMNWISE']
    """
    return Usage.ROWWISE if fmt.shares_codes else usage


def multiplies_codes(a: Format, b: Format) -> bool:
    """Return whether a GEMM may multiply codes without block scales.

    With one scale per operand, the product of codes is the product of values up to one factor.
    """
    return a.per_tensor and b.per_tensor


def block_alignment(*formats: Format) -> int:
    """Return the number that rows and columns of a shard must be multiples of so that its blocks are whole.

    Valid for both planes of all `formats`: columnwise blocks are transposed rowwise blocks.

    >>> from qshard.formats import FP8_128x128, FP8_E4M3, MXFP8_E4M3
    >>> block_alignment(FP8_E4M3), block_alignment(MXFP8_E4M3), block_alignment(MXFP8_E4M3, FP8_128x128)
    (1, 32, 128)
    """
    return max(size for fmt in formats for size in fmt.block or (1,))


def whole_units(fmt: Format, usage: Usage) -> tuple[int, int]:
    """Return the numbers that the rows and columns of a tensor must be multiples of for one of its planes.

    >>> from qshard.formats import FP8_1x128, MXFP8_E4M3
    >>> [whole_units(fmt, Usage.COLUMNWISE) for fmt in (FP8_1x128, MXFP8_E4M3)]
    [(1, 1), (32, 1)]
    """
    return (fmt.block_of(usage) if fmt.scaling.whole_blocks else None) or (1, 1)


def plane(fmt: FormatLike, shape: Shape, usage: Usage, *, op: str = "quantize", name: str = "x") -> PlaneLayout:
    """Compute the shapes of one plane of `x`.

    Args:
      fmt: the format, or its name.
      shape: shape of `x`.
      usage: `ROWWISE` or `COLUMNWISE`.
      op: name of the operation in errors.
      name: name of `x` in errors.

    Raises:
      ValueError: `fmt` needs whole blocks and `shape` does not have them, or `fmt` has no columnwise plane.

    The layout depends on the shape alone, so it applies to a whole tensor and, with the shape of a shard, to the shard.

    >>> from qshard.formats import MXFP8_E4M3, NVFP4
    >>> plane(MXFP8_E4M3, (4, 64), Usage.ROWWISE)
    PlaneLayout(data_shape=(4, 64), scale_shape=(4, 2), global_scale_shape=None, transposed=False)
    >>> plane(NVFP4, (16, 64), Usage.COLUMNWISE)
    PlaneLayout(data_shape=(64, 8), scale_shape=(64, 1), global_scale_shape=(), transposed=True)
    >>> plane(MXFP8_E4M3, (4, 33), Usage.ROWWISE)
    Traceback (most recent call last):
    ValueError: quantize: x (4, 33) is not a whole number of 1x32 blocks of MXFP8_E4M3; pad the columns to 64
    """
    fmt, usage = as_format(fmt, op), as_plane(usage, op, Usage.BOTH.planes)
    if usage is Usage.COLUMNWISE and fmt.row_scaled:
        raise ValueError(
            f"{op}: {name} ({fmt}) has one scale per row, so it has no columnwise plane; pass Usage.ROWWISE"
        )

    units = whole_units(fmt, usage)
    needs = [
        f"the {axis} to {_ceil(size, unit) * unit}"
        for axis, size, unit in zip(("rows", "columns"), matrix_shape(shape), units, strict=True)
        if size % unit
    ]
    if needs:
        raise ValueError(
            f"{op}: {name} {shape} is not a whole number of {units[0]}x{units[1]} blocks of {fmt}; "
            f"pad {' and '.join(needs)}"
        )
    transposed, block = is_transposed(fmt, usage), stored_block(fmt, usage)
    matrix = matrix_shape(shape)[::-1] if transposed else matrix_shape(shape)
    data: Shape = matrix if transposed else shape
    grid: Shape = () if block is None else tuple(map(_ceil, matrix, block))
    if has_rows_apart(fmt, usage) and not transposed:
        grid = (*shape[:-1], grid[1])
    return PlaneLayout(
        data_shape=(*data[:-1], data[-1] // fmt.element.codes_per_byte) if data else data,
        scale_shape=grid,
        global_scale_shape={None: None, "tensor": (), "row": shape[:-1]}[fmt.scaling.global_scale],
        transposed=transposed,
        block=block,
        format=fmt,
        shape=shape,
        usage=usage,
    )


def stack_plane(fmt: FormatLike, shape: Shape, usage: Usage, *, op: str = "quantize", name: str = "x") -> PlaneLayout:
    """Compute the layout of a stack: the planes of E matrices `[E, N, K]`, each with its own scales.

    Every part of the plane of a matrix gets a leading axis of E: one scale becomes `scale_inv` `[E]`. Arguments and
    errors as in `plane`.

    >>> from qshard.formats import FP8_E4M3, MXFP8_32x32
    >>> stack_plane(FP8_E4M3, (4, 64, 32), Usage.COLUMNWISE)
    PlaneLayout(data_shape=(4, 32, 64), scale_shape=(4,), global_scale_shape=None, transposed=True)
    >>> stack_plane(MXFP8_32x32, (4, 64, 32), Usage.ROWWISE).scale_shape
    (4, 2, 1)
    """
    one = plane(fmt, shape[1:], usage, op=op, name=name)
    first, of_tensor = shape[:1], one.global_scale_shape
    return replace(
        one,
        data_shape=(*first, *one.data_shape),
        scale_shape=(*first, *one.scale_shape),
        global_scale_shape=None if of_tensor is None else (*first, *of_tensor),
        shape=shape,
        is_stack=True,
    )


def splits_stack(fmt: Format, shape: Shape) -> bool:
    """Return whether a block of `x` `[E * N, K]` would have rows of two matrices of a stack `[E, N, K]`.

    >>> from qshard.formats import FP8_128x128, FP8_E4M3
    >>> splits_stack(FP8_128x128, (2, 200, 128)), splits_stack(FP8_E4M3, (2, 200, 128))
    (True, False)
    """
    return fmt.block is not None and shape[1] % fmt.block[0] != 0


def slice_plane(
    fmt: Format, shape: Shape, usage: Usage, *, op: str, name: str = "x", is_stack: bool = False
) -> PlaneLayout:
    """Compute the layout of a plane of the whole `x` that ranks can quantize from flat slices of `x`.

    Raises:
      ValueError: `plane` raises; the plane is stored transposed; or its scales depend on more than amaxes.
    """
    where = (stack_plane if is_stack else plane)(fmt, shape, usage, op=op, name=name)
    if where.transposed:
        raise ValueError(
            f"{op}: usage ({usage}) of {fmt} is stored transposed, so a flat slice of the weight is no slice of it; "
            "gather the rowwise plane and transpose it, or use a format with 2-D blocks"
        )
    if fmt.slice_refusal is not None:
        raise ValueError(f"{op}: slices of {fmt} cannot be cast: {fmt.slice_refusal}; quantize whole blocks")
    return where


def _ceil(size: int, unit: int) -> int:
    return -(-size // unit)
