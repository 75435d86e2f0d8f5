"""gather(quantize(shards)) == quantize(whole), bit for bit: every format, both front ends, any number of ranks.

How a front end shards, FSDP2 or shard_map, is in support/fronts.py; what else it does with shards has tests of its own.
"""

import pytest

from support.awkward import DTYPES, KINDS, TAME, awkward_values
from support.formats import SCALINGS, VARIANTS
from support.pairs import turns


@turns(1, fmt=VARIANTS, shards=[2, 3, 4])
def test_gathered_shards_are_the_whole(front, fmt, shards):
    """Ranks cut blocks, hold parts of one, or no row at all; what spoils a scale may be with one rank alone."""
    if shards > front.devices():
        pytest.skip(f"{front.devices()} {front.device} devices")
    assert_law(front, fmt, shards)


@pytest.mark.parametrize(
    "fmt", [pytest.param(fmt, marks=[] if fmt in SCALINGS else pytest.mark.slow) for fmt in VARIANTS], ids=str
)
def test_one_shard_is_the_whole(front, fmt):
    assert_law(front, fmt, 1)


def assert_law(front, fmt, shards):
    shapes = front.shapes_to_cut(fmt, shards)
    kinds, dtype = (TAME, KINDS)[shards % 2], DTYPES[shards // 2 % 2]
    front.assert_law([awkward_values(shape, i, dtype, kinds=kinds) for i, shape in enumerate(shapes)], fmt, shards)
