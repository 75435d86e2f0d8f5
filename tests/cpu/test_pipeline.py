"""The algorithms of `quantize_steps` where shards cut blocks. Whole planes are under the tests of `quantize`."""

import math

import numpy as np
import pytest

from qshard import reference
from qshard._core import quantize_steps
from qshard.formats import NVFP4, Usage
from qshard.torch_bridge._ops.bind import ops
from support.awkward import assert_bits_equal, awkward_values
from support.formats import NAMED
from support.fronts import TorchFront

FRONT = TorchFront("cpu")


class Reads:
    """The ops, and the names of those that read `x`."""

    def __init__(self, x):
        self.x, self.names = x, []

    def __getattr__(self, name):
        def call(*operands, **options):
            if any(operand is self.x for operand in operands):
                self.names.append(name)
            return getattr(ops, name)(*operands, **options)

        return call


@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.COLUMNWISE, Usage.BOTH])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("hadamard", [False, True])
def test_nvfp4_reads_twice(hadamard, rounding, usage):
    """Once for amaxes, once for codes, whatever the options; and nothing rotated or transposed is made in between."""
    x = FRONT.array(awkward_values((64, 96), 1))
    philox = quantize_steps.Philox(FRONT.array(np.int32([1, 2])), FRONT.array(np.int32([0, 0])))
    reads = Reads(x)
    fmt = NVFP4.with_options(hadamard=hadamard, rounding=rounding)
    quantize_steps.quantize(reads, x, fmt, usage, philox=philox)
    amaxes = "amax_hadamard" if hadamard and usage is not Usage.ROWWISE else "amax_tensor"
    assert reads.names[0] == amaxes
    assert len(reads.names) == 2, reads.names


@pytest.mark.parametrize("fmt", [fmt for fmt in NAMED if fmt.block is not None], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 48, 100])
def test_blocks_that_shards_cut_are_merged_from_their_parts(fmt, rows):
    """Of the rowwise plane: amaxes of parts, one maximum, scales, codes of parts. A part divides rows and block."""
    shape = (192, 256)
    x = awkward_values(shape, 5)
    part = (math.gcd(rows, fmt.block[0]), fmt.block[1])
    grid = np.zeros([-(-size // unit) for size, unit in zip(shape, fmt.block, strict=True)], np.float32)
    shards = {start: FRONT.array(x[start : start + rows]) for start in range(0, shape[0], rows)}
    wholes = []
    for start, shard in shards.items():
        amax = FRONT.numpy(quantize_steps.block_amax(ops, shard, part))
        blocks = (start + part[0] * np.arange(len(amax))) // fmt.block[0]
        np.maximum.at(grid.view(np.int32), blocks, amax.view(np.int32))
        if (own := quantize_steps.global_amax(ops, shard, fmt)) is not None:
            wholes.append(FRONT.numpy(own))
    whole = FRONT.array(reference.amax(np.stack(wholes), axis=0)) if wholes else None
    made = quantize_steps.scales(ops, fmt, FRONT.array(grid), whole)
    codes = []
    for start, shard in shards.items():
        blocks = np.arange(start, start + len(shard), part[0]) // fmt.block[0]
        codes.append(FRONT.numpy(quantize_steps.cast(ops, shard, fmt, made.scale[blocks].contiguous(), part)))
    want = reference.quantize(x, fmt).rowwise
    assert_bits_equal(np.concatenate(codes), want.data)
    assert_bits_equal(FRONT.numpy(made.scale_inv), want.scale_inv)
    if whole is not None:
        assert_bits_equal(FRONT.numpy(made.global_scale_inv), want.global_scale_inv)
