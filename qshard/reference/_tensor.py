"""Quantize and dequantize a tensor.

Every plane is computed in one orientation, `[rows, cols]` with blocks along cols. The columnwise plane of `x` is the
rowwise plane of `x.T`, stored as `layout.plane` describes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from qshard._core.validation import FormatLike, as_format, as_plane, as_usage
from qshard.formats import ELEMENTS, Format, Usage
from qshard.layout import PlaneLayout, Shape, matrix_shape, plane
from qshard.reference._elements import Codes, Float32, decode, pack, unpack
from qshard.reference._hadamard import hadamard_transform
from qshard.reference._planes import cast, four_over_six, plane_amax
from qshard.reference._scales import Scales, per_element, scales_from_amax

INPUT_DTYPES = tuple(map(np.dtype, (np.float32, ml_dtypes.bfloat16, np.float16)))


@dataclass(frozen=True, kw_only=True)
class Plane:
    """One plane, in the shapes of `layout.plane`.

    Attributes:
      data: uint8 codes; 4-bit codes are packed.
      scale_inv: float32, or uint8 codes of the format's scale dtype.
      global_scale_inv: float32; None if the format has none. Both planes have the same, unless one is rotated.
    """

    data: Codes
    scale_inv: NDArray[Any]
    global_scale_inv: Float32 | None = None


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A quantized tensor with the requested planes, and the shape and dtype of the original tensor."""

    format: Format
    shape: Shape
    dtype: np.dtype[Any]
    rowwise: Plane | None = None
    columnwise: Plane | None = None

    @property
    def global_scale_inv(self) -> Float32 | None:
        """Global scale of the rowwise plane if present, else of the columnwise plane."""
        either = self.rowwise or self.columnwise
        return None if either is None else either.global_scale_inv

    @np.errstate(all="ignore")
    def dequantize(self, dtype: DTypeLike | None = None, *, usage: Usage | None = None) -> NDArray[Any]:
        """Dequantize one plane, with one rounding to `dtype`.

            value = fl(q * scale_inv);   NVFP4: fl(q * fl(scale_inv * global_scale_inv))

        Args:
          dtype: dtype of the result; by default the dtype of the original tensor.
          usage: plane to read; by default the rowwise plane if present.

        Returns:
          `[*shape]`. A rotated columnwise plane gives the values of the rotated tensor.

        Raises:
          ValueError: the plane is not present.
        """
        usage = usage or (Usage.ROWWISE if self.rowwise else Usage.COLUMNWISE)
        value = self.elements(usage) * self.scales(usage)
        return value.astype(self.dtype if dtype is None else dtype)

    def elements(self, usage: Usage) -> Float32:
        """Decode the codes of a plane without scaling, `[*shape]`, or raise ValueError if it is not present."""
        stored, where = self._plane(usage)
        codes = unpack(stored.data) if self.format.element.codes_per_byte > 1 else stored.data
        return self._in_order(decode(codes, self.format.element), where)

    def scales(self, usage: Usage) -> Float32:
        """Return the decode scale of each element of a plane, `[*shape]`, or raise ValueError if it is not present."""
        where = self._plane(usage)[1]
        matrix = matrix_shape(self.shape)[::-1] if where.transposed else matrix_shape(self.shape)
        return self._in_order(per_element(self.block_scales(usage), where.block, matrix), where)

    @np.errstate(all="ignore")
    def block_scales(self, usage: Usage) -> Float32:
        """Return the decode scale of each block of a plane, as a matrix of blocks, or one number.

        Raises ValueError if the plane is not present.
        """
        stored, where = self._plane(usage)
        scale = stored.scale_inv
        if self.format.scale_dtype in ELEMENTS:
            scale = decode(scale, ELEMENTS[self.format.scale_dtype])
        if where.block is not None:
            scale = scale.reshape(matrix_shape(where.scale_shape))
        if stored.global_scale_inv is not None:
            scale = scale * stored.global_scale_inv.reshape(-1, 1)
        return scale

    def _plane(self, usage: Usage) -> tuple[Plane, PlaneLayout]:
        planes = {Usage.ROWWISE: self.rowwise, Usage.COLUMNWISE: self.columnwise}
        stored = planes[as_plane(usage, "dequantize", [each for each, made in planes.items() if made is not None])]
        assert stored is not None
        return stored, plane(self.format, self.shape, usage, op="dequantize")

    def _in_order(self, stored: Float32, where: PlaneLayout) -> Float32:
        """Reorder a stored matrix to the order and shape of the tensor."""
        if where.transposed:
            stored = stored.reshape(matrix_shape(self.shape)[::-1]).T
        return np.asarray(stored).reshape(self.shape)


@np.errstate(all="ignore")
def quantize(
    x: ArrayLike,
    fmt: FormatLike,
    usage: Usage = Usage.ROWWISE,
    *,
    amax: ArrayLike | None = None,
    scale: ArrayLike | None = None,
    seed: int = 0,
    offset: int = 0,
    row_step: int | None = None,
) -> Quantized:
    """Quantize `x` to any format.

    Args:
      x: float32, bfloat16 or float16 `[*lead, K]`.
      fmt: the format, or its name.
      usage: planes to compute.
      amax: amax of the whole tensor, or of whole rows, if `x` is a shard and the format has such a scale. For a rotated
        columnwise plane, the amax of the rotated tensor; request one plane at a time.
      scale: float32 `[]`, for delayed scaling: used instead of the scale computed from the amax.
      seed: seed of stochastic rounding, 64 bits.
      offset: index of the first element of `x` in the whole tensor.
      row_step: columns of the whole tensor, if different from the columns of `x`.

    Raises:
      TypeError: `x` has another dtype, or another argument is not of its type.
      ValueError: `fmt` does not support the shape of `x`, or does not use `amax` or `scale`.

    A shard of whole blocks gives the bytes that the whole tensor has there, given the amax of the whole tensor and, for
    stochastic rounding, the position of the shard (`offset`, `row_step`).

    >>> from qshard.formats import MXFP8_E4M3
    >>> q = quantize(np.ones((2, 64), np.float32), MXFP8_E4M3)
    >>> q.rowwise.data.shape, q.rowwise.scale_inv
    ((2, 64), array([[119, 119],
           [119, 119]], dtype=uint8))
    """
    fmt, usage, x = as_format(fmt, "quantize"), as_usage(usage, "quantize"), np.asarray(x)
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"quantize: x ({x.dtype}) is not float32, bfloat16 or float16; cast it first")
    if scale is not None and fmt.block is not None:
        raise ValueError(f"quantize: scale is per tensor, but {fmt} has one scale per block; leave it out")
    if amax is not None and fmt.block is not None and fmt.scaling.global_scale is None:
        raise ValueError(f"quantize: amax is per tensor, but {fmt} has only block scales; leave it out")
    if amax is not None and fmt.hadamard and usage is Usage.BOTH:
        raise ValueError(
            f"quantize: the planes of {fmt} have different amaxes, and amax= gives one; quantize one plane at a time"
        )

    rows, cols = matrix_shape(x.shape)
    index = offset + np.arange(rows)[:, None] * (cols if row_step is None else row_step) + np.arange(cols)
    planes = {}
    for each in usage:
        where = plane(fmt, x.shape, each)
        matrix, place = tensor_of_plane(x, fmt, each).astype(np.float32).reshape(rows, cols), index
        transposed = each is Usage.COLUMNWISE and not fmt.shares_codes
        if transposed:
            matrix, place = matrix.T, index.T
        scales = _scales(matrix, fmt, amax, scale)
        codes, scale_inv = cast(matrix, fmt, scales.multiplier, seed=seed, index=place), scales.scale_inv
        if where.transposed != transposed:
            codes, scale_inv = codes.T, scale_inv.T
        planes[each] = Plane(
            data=_as_stored(pack(codes) if fmt.element.codes_per_byte > 1 else codes, where.data_shape),
            scale_inv=_as_stored(scale_inv, where.scale_shape),
            global_scale_inv=_as_stored(scales.global_scale_inv, where.global_scale_shape),
        )
    return Quantized(
        format=fmt,
        shape=x.shape,
        dtype=x.dtype,
        rowwise=planes.get(Usage.ROWWISE),
        columnwise=planes.get(Usage.COLUMNWISE),
    )


def tensor_of_plane(x: NDArray[Any], fmt: Format, usage: Usage) -> NDArray[Any]:
    """Return the tensor that a plane of `x` quantizes: `x` itself, or `x` rotated along its columns."""
    if fmt.hadamard and usage is Usage.COLUMNWISE:
        return hadamard_transform(x.reshape(matrix_shape(x.shape)).T).T.reshape(x.shape)
    return x


def _scales(x: Float32, fmt: Format, amax: ArrayLike | None, scale: ArrayLike | None) -> Scales:
    if scale is not None:
        given = np.asarray(scale, np.float32)
        return Scales(given, np.float32(1) / given)
    found = plane_amax(x, fmt)
    if amax is not None and found.whole is not None:
        found = found._replace(whole=np.asarray(amax, np.float32).reshape(found.whole.shape))
    return four_over_six(x, fmt, found) if fmt.scaling.four_over_six else scales_from_amax(found, fmt)


def _as_stored(x: Any, shape: Shape | None) -> Any:
    return None if shape is None else np.ascontiguousarray(x).reshape(shape)
