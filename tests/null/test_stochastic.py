"""Philox against its published vectors, the bit-to-element map, and the rounding that uses the bits."""

import numpy as np
import pytest

from qshard import formats, reference
from qshard.formats import E2M1, Usage
from support.awkward import assert_bits_equal, awkward_values

STOCHASTIC = formats.NVFP4.with_options(rounding="stochastic")


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # Random123, kat_vectors: philox4x32 10.
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF,) * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter, key, words):
    assert reference.philox4x32(counter, key).tolist() == words


@pytest.mark.parametrize("index", [0, 1, 15, 16, 2**36 - 1, 2**36, 2**36 + 37, 2**40 + 6])
@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**64 - 1])
def test_map_of_bits_to_elements(seed, index):
    words = reference.philox4x32([index // 16 % 2**32, index // 2**36, 0, 0], (seed % 2**32, seed // 2**32))
    byte = int(words[index // 4 % 4]) >> 8 * (index % 4) & 0xFF
    assert reference.random_bytes(seed, index) == byte


def test_random_bits_are_uniform():
    """The top bits of four elements in a row, against chance."""
    bits = reference.random_bytes(11, np.arange(1 << 18)).reshape(-1, 4) >= 128
    counts = np.bincount(bits @ [1, 2, 4, 8], minlength=16)
    want = counts.sum() / 16
    assert ((counts - want) ** 2 / want).sum() < 44.3  # 99.99 % of chi-square with 15 degrees of freedom.


def test_rounding_is_unbiased():
    """Over all 256 bytes the mean is the input itself, if that is a multiple of a 256th of the step."""
    bytes_ = np.arange(256, dtype=np.uint8)
    for low, high in [(0, 0.5), (0.5, 1), (1, 1.5), (1.5, 2), (2, 3), (3, 4), (4, 6)]:
        x = np.linspace(low, high, 257, dtype=np.float32)[:, None]
        values = reference.decode(reference.encode_stochastic(np.broadcast_to(x, (257, 256)), bytes_[None]), E2M1)
        assert set(np.unique(values)) == {low, high}
        np.testing.assert_array_equal(values.mean(axis=1, dtype=np.float64), x[:, 0])


def test_special_values():
    for byte in (0, 255):
        codes = reference.encode_stochastic([0.0, -0.0, 6.0, 7.0, -1e30, np.inf, -np.inf, np.nan], [byte] * 8)
        assert codes.tolist() == [0, 8, 7, 7, 15, 7, 15, 7]
    representable = reference.decode(np.arange(16), E2M1)
    assert_bits_equal(reference.encode_stochastic(representable, [255] * 16), np.arange(16, dtype=np.uint8))
    assert reference.encode_stochastic([-1e-6, -1e-6], [0, 255]).tolist() == [8, 8]  # Too small to be rounded up.


@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.COLUMNWISE])
def test_shard_draws_what_the_whole_draws(usage):
    x = awkward_values((64, 96), seed=3, kinds=("normal", "ties"))
    whole = reference.quantize(x, STOCHASTIC, usage, seed=7)
    part = x[16:48, 32:80]
    shard = reference.quantize(
        part, STOCHASTIC, usage, amax=reference.amax(x), seed=7, offset=16 * 96 + 32, row_step=96
    )
    if usage is Usage.ROWWISE:
        assert_bits_equal(shard.rowwise.data, whole.rowwise.data[16:48, 16:40])
    else:
        assert_bits_equal(shard.columnwise.data, whole.columnwise.data[32:80, 8:24])
    other = reference.quantize(part, STOCHASTIC, usage, amax=reference.amax(x), seed=7)
    assert (getattr(other, usage.name.lower()).data != getattr(shard, usage.name.lower()).data).any()


def test_planes_draw_alike():
    """One element has one random byte, in both planes."""
    x = np.full((16, 16), 1.0, np.float32)
    x[3, 5] = 0.7  # One element between two codes: every block has amax 1 and one scale.
    values = [reference.quantize(x, STOCHASTIC, Usage.BOTH, seed=s) for s in range(16)]
    rows = [reference.unpack(q.rowwise.data)[3, 5] for q in values]
    cols = [reference.unpack(q.columnwise.data)[5, 3] for q in values]
    assert rows == cols
    assert len(set(rows)) == 2
