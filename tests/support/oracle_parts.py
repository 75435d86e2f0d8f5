"""Parts of `support/oracle.py`: values of blocks, codes as bytes, functions over leading axes."""

from __future__ import annotations

import numpy as np

from qshard import reference
from qshard.formats import ELEMENTS


def wide(x):
    return np.asarray(x, np.float32)


def runs(values, x):
    """Broadcast values of the leading axes of `x` over its other axes."""
    return values.reshape(values.shape + (1,) * (x.ndim - values.ndim))


def over(values, block_rows, block_cols, shape):
    """Broadcast block values to elements."""
    each = np.repeat(np.repeat(values, block_rows, axis=-2), block_cols, axis=-1)
    return each[..., : shape[-2], : shape[-1]]


def each_matrix(function, *arrays):
    """A function of matrices, over leading axes."""
    lead = arrays[0].shape[:-2]
    if not lead:
        return function(*arrays)
    if 0 in lead:
        one = np.asarray(function(*(np.zeros(a.shape[-2:], a.dtype) for a in arrays)))
        return np.zeros((*lead, *one.shape), one.dtype)
    made = np.stack([function(*(a[i] for a in arrays)) for i in np.ndindex(lead)])
    return made.reshape(*lead, *made.shape[1:])


def stored(codes, element):
    return reference.pack(codes) if ELEMENTS[element].codes_per_byte > 1 else codes


def codes_of(data, element):
    return reference.unpack(data) if ELEMENTS[element].codes_per_byte > 1 else data


def rounded(values, dtype):
    """fp32 in another dtype, with the one NaN."""
    return np.where(np.isnan(values), np.array(np.nan, dtype), values.astype(dtype))


def transposed(x, outer=0):
    """Matrices transposed, whose rows have `outer` more axes."""
    return np.ascontiguousarray(np.moveaxis(x, -1, -2 - outer))


def scaled(x, scale, nonfinite="saturate"):
    """Under a given scale, an option shows infinities: fl(fl(x * scale) + fl(x * 0)), as NUMERICS.md has it."""
    return wide(x) * scale + wide(x) * 0 if nonfinite == "nan" else wide(x) * scale
