"""Flat slices of a weight, cut anywhere: merged amaxes, then casts in place, give the bytes of the whole."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qshard import formats, reference
from qshard.formats import Usage
from support.awkward import KINDS, TAME, assert_bits_equal, awkward_values
from support.formats import PLANES


@given(
    where=st.sampled_from(PLANES),
    cuts=st.lists(st.integers(0, 64 * 96), max_size=5),
    seed=st.integers(0, 2**16),
    tame=st.booleans(),
)
def test_slices_give_the_bytes_of_the_whole(where, cuts, seed, tame):
    fmt, usage = where
    weight = awkward_values((64, 96), seed, kinds=TAME if tame else KINDS)
    whole = getattr(reference.quantize(weight, fmt, usage, seed=seed), usage.name.lower())
    starts = [0, *sorted(cuts)]
    parts = np.split(weight.reshape(-1), starts[1:])

    amaxes = [
        reference.slice_amax(part, fmt, weight.shape, start, usage) for part, start in zip(parts, starts, strict=True)
    ]
    amax = amaxes[0]
    for other in amaxes[1:]:
        amax = other.merge(amax)
    scales = reference.scales_from_amax(amax, fmt)
    scale_inv = scales.scale_inv.T if usage is Usage.COLUMNWISE else scales.scale_inv
    assert_bits_equal(scale_inv.reshape(whole.scale_inv.shape), whole.scale_inv)
    if whole.global_scale_inv is not None:
        assert_bits_equal(scales.global_scale_inv, whole.global_scale_inv)

    data = np.full(whole.data.shape, 0xA5, np.uint8)  # Every byte is written, by one slice or by two halves.
    for part, start in zip(parts, starts, strict=True):
        reference.cast_slice(part, data, fmt, weight.shape, start, amax, usage, seed=seed)
    assert_bits_equal(data, whole.data)


@pytest.mark.parametrize("fmt", [formats.NVFP4_16x16, formats.MXFP8_32x32], ids=str)
@pytest.mark.parametrize(("start", "length"), [(3, 100), (1, 511), (17, 33), (0, 1), (5, 0)])
def test_nothing_outside_the_slice_is_written(fmt, start, length):
    weight = awkward_values((32, 64), seed=1)
    amax = reference.slice_amax(weight.reshape(-1), fmt, weight.shape, 0)
    whole = reference.quantize(weight, fmt).rowwise.data
    data = ~whole  # Every bit is wrong, so that a write shows whatever it writes.
    reference.cast_slice(weight.reshape(-1)[start : start + length], data, fmt, weight.shape, start, amax)
    unpack = reference.unpack if fmt.element.bits == 4 else np.asarray
    right = (unpack(data) == unpack(whole)).reshape(-1)
    assert np.flatnonzero(right).tolist() == list(range(start, start + length))


def test_rounding_the_master_first_is_another_parity():
    """The two are both exact, and they differ."""
    weight = awkward_values((32, 32), seed=2, kinds=("normal",))
    exact = reference.quantize(weight, formats.MXFP8_E4M3)
    rounded = reference.quantize(weight.astype("bfloat16"), formats.MXFP8_E4M3)
    assert (exact.rowwise.data != rounded.rowwise.data).any()


@pytest.mark.parametrize(
    ("fmt", "usage"),
    [
        (formats.FP8_E4M3, Usage.COLUMNWISE),
        (formats.MXFP8_32x32, Usage.COLUMNWISE),
        (formats.NVFP4, Usage.COLUMNWISE),
        (formats.NVFP4.with_options(four_over_six="mae"), Usage.ROWWISE),
    ],
    ids=str,
)
def test_planes_that_slices_do_not_make(fmt, usage):
    with pytest.raises(ValueError, match=r"slice_amax: .* (is stored transposed|cannot be cast)"):
        reference.slice_amax(np.ones(32, np.float32), fmt, (32, 32), 0, usage)
