"""The algorithms of qshard.pipeline, over NumPy arrays: the bits of the reference, for every format and its options."""

import math

import numpy as np
import pytest

from qshard import layout, pipeline, reference
from qshard.formats import FORMATS, FP8_E4M3, MXFP8_E4M3, NVFP4, Usage
from qshard.formats import NVFP4_16x16 as SQUARE4
from support.awkward import assert_bits_equal, awkward_values
from support.op_calls import NumpyOps

OPS = NumpyOps()
OPTIONS = [
    FP8_E4M3.with_options(pow2=True, eps=0.1),
    MXFP8_E4M3.with_options(scale_rounding="floor"),
    NVFP4.with_options(global_scale="row"),
    NVFP4.with_options(scale_max=256.0),
    NVFP4.with_options(four_over_six="mae"),
    SQUARE4.with_options(four_over_six="mse", scale_max=256.0),
    NVFP4.with_options(hadamard=True),
    NVFP4.with_options(hadamard=True, rounding="stochastic"),
    SQUARE4.with_options(rounding="stochastic"),
]
SEED = (7 << 32) + 5
DRAWS = pipeline.Draws(np.array([5, 7], np.uint32), np.array([0, 0], np.uint32))


def assert_is_the_reference(planes, want, fmt):
    for usage, name in ((Usage.ROWWISE, "rowwise"), (Usage.COLUMNWISE, "columnwise")):
        assert (getattr(want, name) is None) == (usage not in planes)
        for part in pipeline.Parts._fields if usage in planes else ():
            got, expected = getattr(planes[usage], part), getattr(getattr(want, name), part)
            assert (got is None) == (expected is None)
            if expected is not None:
                assert_bits_equal(np.asarray(got), expected, f"{fmt} {name}.{part}")


@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH], ids=str)
@pytest.mark.parametrize("fmt", [*FORMATS.values(), *OPTIONS], ids=str)
def test_planes_are_those_of_the_reference(fmt, usage):
    if fmt.scaling.global_scale == "row" and usage & Usage.COLUMNWISE:
        pytest.skip("rowwise only")
    for shape in [(32, 64), (96, 160), *([(37, 53), (1, 129), (130, 1)] if not fmt.scaling.whole_blocks else [])]:
        x = awkward_values(shape, 3, "bfloat16")
        want = reference.quantize(x, fmt, usage, seed=SEED)
        draws = DRAWS if fmt.rounding == "stochastic" else None
        planes = pipeline.quantize(OPS, x, fmt, usage, draws=draws)
        assert_is_the_reference(planes, want, fmt)
        for each in planes:
            values = pipeline.dequantize(OPS, planes[each], fmt, each, "float32")
            values = values.T if layout.plane(fmt, shape, each).transposed else values
            assert_bits_equal(np.ascontiguousarray(values), want.dequantize("float32", usage=each), f"{fmt} {each}")


def test_random_rounding_needs_a_seed():
    with pytest.raises(
        ValueError, match=r"quantize: NVFP4.rounding=stochastic. rounds stochastically and needs a seed"
    ):
        pipeline.quantize(OPS, np.ones((16, 16), np.float32), OPTIONS[-2].with_options(hadamard=False), Usage.ROWWISE)


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS.values() if fmt.block is not None], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 48, 100])
def test_blocks_that_shards_cut_are_merged_from_their_parts(fmt, rows):
    """Of the rowwise plane: amaxes of parts, one maximum, scales, codes of parts. A part divides rows and block."""
    shape = (192, 256)
    x = awkward_values(shape, 5)
    want = reference.quantize(x, fmt, Usage.ROWWISE)
    part = (math.gcd(rows, fmt.block[0]), fmt.block[1])
    grid = np.zeros([-(-size // unit) for size, unit in zip(shape, fmt.block, strict=True)], np.float32)
    starts = range(0, shape[0], rows)
    whole = None
    for start in starts:
        shard = x[start : start + rows]
        amax = pipeline.block_amax(OPS, shard, part)
        blocks = (start + part[0] * np.arange(len(amax))) // fmt.block[0]
        np.maximum.at(grid.view(np.int32), blocks, amax.view(np.int32))
        if (own := pipeline.global_amax(OPS, shard, fmt)) is not None:
            whole = own if whole is None else np.maximum(whole.view(np.int32), own.view(np.int32)).view(np.float32)
    made = pipeline.scales(OPS, fmt, grid, whole)
    codes = []
    for start in starts:
        shard = x[start : start + rows]
        blocks = np.arange(start, start + len(shard), part[0]) // fmt.block[0]
        codes.append(pipeline.cast(OPS, shard, fmt, np.ascontiguousarray(made.scale[blocks]), part))
    got = pipeline.Parts(np.concatenate(codes), made.scale_inv, made.global_scale_inv)
    assert_is_the_reference({Usage.ROWWISE: got}, want, fmt)
