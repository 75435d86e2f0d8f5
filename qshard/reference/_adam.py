"""Adam and its quantized states, with the bits of the kernels."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qshard._core.optimizers.adam import BLOCK
from qshard.formats import ELEMENTS, FLOAT16_MAX
from qshard.layout import matrix_shape
from qshard.reference._elements import Float32, decode, encode
from qshard.reference._scales import block_amax, largest_power, per_element, scale_to

Decay = str  # weight decay: "coupled" adds to the gradient, "decoupled" to the update (AdamW), "none" to neither


class AdamConstants(NamedTuple):
    """Constants of a step, each rounded once to fp32, in the order of `ops.adam_constants`."""

    lr: np.float32
    eps: np.float32
    decay: np.float32
    grad_scale: np.float32
    beta1: np.float32
    rest1: np.float32  # 1 - beta1
    unbias1: np.float32  # 1 / (1 - beta1 ** step)
    beta2: np.float32
    rest2: np.float32
    unbias2: np.float32


def _power(base: float, exponent: int) -> float:
    """Compute a power by squaring. Libraries disagree on the last bits of `pow`."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


def adam_constants(
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    decay: float = 0.0,
    grad_scale: float = 1.0,
) -> AdamConstants:
    """Compute the constants of step number `step`, counted from 1.

    Each beta is split into two float32 terms, as the op takes it, and the constants are derived from their sum in fp64.
    """
    derived: list[np.float32] = []
    for beta in betas:
        high = np.float32(beta)
        beta = float(high) + float(np.float32(beta - float(high)))
        derived += [np.float32(beta), np.float32(1 - beta), np.float32(1 / (1 - _power(beta, step)))]
    return AdamConstants(np.float32(lr), np.float32(eps), np.float32(decay), np.float32(grad_scale), *derived)


@np.errstate(all="ignore")
def adam_update(
    c: AdamConstants, p: Float32, g: Float32, m: Float32, v: Float32, decay: Decay = "none"
) -> tuple[Float32, Float32, Float32]:
    """Return the value to subtract from `p`, and the new `m` and `v`. Every operation rounds to fp32, in this order."""
    g = g * c.grad_scale
    if decay == "coupled":
        g = g + c.decay * p
    m = c.beta1 * m + c.rest1 * g
    v = c.beta2 * v + c.rest2 * g * g
    u = (m * c.unbias1) / (np.sqrt(v * c.unbias2) + c.eps)
    if decay == "decoupled":
        u = u + c.decay * p
    return c.lr * u, m, v


@np.errstate(all="ignore")
def narrow(x: Float32, dtype: str) -> NDArray[np.generic]:
    """Round `x` to "float32", "bfloat16" or "float16": nearest even, canonical NaN."""
    kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    return np.where(np.isnan(x), np.array(np.nan, kind), x.astype(kind))


@np.errstate(all="ignore")
def encode_state(x: Float32, dtype: str, *, positive: bool = False) -> tuple[NDArray[np.generic], Float32 | None]:
    """Quantize an optimizer state `[*lead, cols]`. Return its data and, for float16 and FP8, its decode scales.

    The scale of a block is the largest power of two that keeps its amax within the range of the dtype. Blocks of zeros,
    and blocks with an infinity or NaN, have scale 1. Scales have shape `[*lead, ceil(cols / 128)]`.

    `dtype` is "float32", "bfloat16", "float16", "float8_e4m3fn" or "float8_e5m2"; FP8 codes are returned as uint8.
    `positive` is for second moments: it rounds positive values that would become 0 up to the smallest code.

    >>> data, scale_inv = encode_state(np.float32([[1.0, 0.3]]), "float8_e4m3fn")
    >>> data, scale_inv
    (array([[120, 106]], dtype=uint8), array([[0.00390625]], dtype=float32))
    """
    if dtype in ("float32", "bfloat16"):
        return narrow(x, dtype), None
    matrix = x.reshape(matrix_shape(x.shape))
    largest = FLOAT16_MAX if dtype == "float16" else ELEMENTS[dtype].max
    scale = largest_power(scale_to(largest, block_amax(matrix, (1, BLOCK))))
    scaled = matrix * per_element(scale, (1, BLOCK), matrix.shape)
    bits = narrow(scaled, dtype).view(np.uint16) if dtype == "float16" else encode(scaled, ELEMENTS[dtype])
    if positive:
        bits = np.where((bits == 0) & (matrix > 0), np.array(1, bits.dtype), bits)
    data = bits.view(np.float16) if dtype == "float16" else bits
    return data.reshape(x.shape), (np.float32(1) / scale).reshape(*x.shape[:-1], scale.shape[1])


@np.errstate(all="ignore")
def decode_state(data: NDArray[np.generic], dtype: str, scale_inv: Float32 | None = None) -> Float32:
    """Dequantize the result of `encode_state`. Exact unless scales are so small that values are subnormal."""
    if scale_inv is None:
        return data.astype(np.float32)
    values = data.astype(np.float32) if dtype == "float16" else decode(data, ELEMENTS[dtype])
    return values * np.repeat(scale_inv, BLOCK, axis=-1)[..., : values.shape[-1]]


def split_float32(x: Float32) -> tuple[NDArray[np.generic], NDArray[np.int16]]:
    """Split a float32 into a bfloat16 and 16 more bits. The bfloat16 is the nearest; ties round away from zero.

    >>> upper, lower = split_float32(np.float32([1.0, 1.01]))
    >>> upper.astype(np.float32), join_float32(upper, lower)
    (array([1.      , 1.0078125], dtype=float32), array([1.  , 1.01], dtype=float32))
    """
    bits = np.where(np.isnan(x), np.uint32(0x7FC00000), x.view(np.uint32))
    upper = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    return upper.view(ml_dtypes.bfloat16), bits.astype(np.uint16).view(np.int16)


def join_float32(upper: NDArray[np.generic], lower: NDArray[np.int16]) -> Float32:
    """Invert `split_float32`. A lower half of 0x8000 or more means that the upper half was rounded up."""
    high = upper.view(np.uint16).astype(np.uint32) << np.uint32(16)
    low = lower.view(np.uint16).astype(np.uint32)
    return (high - ((low & np.uint32(0x8000)) << np.uint32(1)) | low).view(np.float32)
