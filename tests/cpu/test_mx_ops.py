"""Ops of blocks under powers of two, for every element that may have them: any blocks, all codes, refusals."""

import itertools

import numpy as np
import pytest

from qshard import reference
from qshard.formats import E8M0, PowerScaling
from support.awkward import DTYPES, assert_bits_equal, awkward_values
from support.op_calls import call

ELEMENTS = pytest.mark.parametrize("element", PowerScaling.elements, ids=str)
ROUNDINGS = pytest.mark.parametrize("rounding", ["up", "floor"])


def stored(codes, element):
    return reference.pack(codes) if element.codes_per_byte > 1 else codes


def planes_of(x, element, block, rounding):
    """Codes and scales by the reference, of blocks of any size: those at the edges are completed with zeros."""
    grid = [-(-size // unit) for size, unit in zip(x.shape, block, strict=True)]
    padded = np.zeros([n * unit for n, unit in zip(grid, block, strict=True)], np.float32)
    padded[: x.shape[0], : x.shape[1]] = x
    blocks = padded.reshape(grid[0], block[0], grid[1], block[1])
    amax = (blocks.view(np.uint32) & 0x7FFFFFFF).max(axis=(1, 3)).view(np.float32)
    scale_inv = reference.e8m0_from_amax(amax, element, rounding=rounding)
    with np.errstate(all="ignore"):
        scaled = blocks * (np.float32(1) / reference.decode(scale_inv, E8M0))[:, None, :, None]
    codes = reference.encode(scaled.reshape(padded.shape)[: x.shape[0], : x.shape[1]], element)
    return codes, scale_inv


@pytest.mark.parametrize("block", [(1, 2), (2, 1), (32, 32), (16, 1), (6, 10), (1, 256), (256, 1), (130, 256)], ids=str)
@ELEMENTS
@ROUNDINGS
def test_blocks_of_any_size(element, block, rounding):
    options = {"element": element.name, "eps": 0.0, "pow2": False, "rounding": rounding, "scale_dtype": E8M0.name}
    where = {"block_rows": block[0], "block_cols": block[1]}
    for shape, dtype in zip(
        [(2, 2), (6, 8), (260, 516), (1030, 10), (10, 2060)], itertools.cycle(DTYPES), strict=False
    ):
        x = awkward_values(shape, 4, dtype)
        for op, turned, size in [
            ("quantize_block", False, block),
            ("quantize_block_t", True, block),
            ("quantize_block_both", False, (block[0], 1)),
            ("quantize_block_both_t", True, (block[0], 1)),
        ]:
            made = call(op, x, **options, **where)
            codes, scale_inv = planes_of(x.astype(np.float32), element, size, rounding)
            if turned:
                codes, scale_inv = np.ascontiguousarray(codes.T), np.ascontiguousarray(scale_inv.T)
            assert_bits_equal(made[-2], stored(codes, element), f"{op} {shape} codes")
            assert_bits_equal(made[-1], scale_inv, f"{op} {shape} scales")


@ELEMENTS
def test_every_code_is_decoded_under_every_scale(element):
    data = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    codes = reference.unpack(data) if element.codes_per_byte > 1 else data & (2**element.bits - 1)
    scale_inv = np.arange(256, dtype=np.uint8)[:, None]
    where = {"block_rows": 1, "block_cols": codes.shape[1]}
    for dtype in DTYPES:
        with np.errstate(all="ignore"):
            want = (reference.decode(codes, element) * reference.decode(scale_inv, E8M0)).astype(dtype)
        want[np.isnan(want)] = np.nan
        options = {"element": element.name, "scale_dtype": E8M0.name, "dtype": dtype}
        assert_bits_equal(call("dequantize_block", stored(codes, element), scale_inv, **options, **where), want)


@ELEMENTS
def test_the_scale_is_the_least_that_saturates_nothing(element):
    """ "up", by definition in fp64; "floor" takes amax into the octave of the largest element."""
    powers = 2.0 ** np.arange(-100, 100)
    amax = np.concatenate([powers, element.max * powers, np.linspace(0.1, 99, 999)])
    amax = np.concatenate([np.nextafter(amax, np.inf, dtype=np.float32), amax.astype(np.float32)])
    scale, code = call("scale_e8m0", amax, element=element.name, rounding="up")
    assert_bits_equal(scale.astype(np.float64) * 2.0 ** (code.astype(int) - 127), np.ones(len(amax)))
    v = (amax * (np.float32(1) / np.float32(element.max))).astype(np.float64)
    powers = 2.0 ** (code.astype(int) - 127)
    assert (powers >= v).all()
    assert (powers / 2 < v).all()
    scale, _ = call("scale_e8m0", amax, element=element.name, rounding="floor")
    scaled = amax.astype(np.float64) * scale
    assert ((scaled >= 2.0**element.max_exponent) & (scaled < 2.0 ** (element.max_exponent + 1))).all()


@pytest.mark.parametrize("element", [e for e in PowerScaling.elements if e.codes_per_byte > 1], ids=str)
def test_blocks_that_share_bytes_are_refused(element):
    options = {"element": element.name, "eps": 0.0, "pow2": False, "rounding": "up", "scale_dtype": E8M0.name}
    for block, shape in [((3, 4), (12, 12)), ((1, 258), (2, 516))]:
        with pytest.raises(ValueError, match=r"quantize_block: block \(.*\) of .* sides of 1, or even ones up to 256"):
            call("quantize_block", np.ones(shape, np.float32), **options, block_rows=block[0], block_cols=block[1])
