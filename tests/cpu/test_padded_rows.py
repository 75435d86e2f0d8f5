"""Ops on padded rows of experts: the bits of one tensor for each expert, from rows in any order."""

import numpy as np
import pytest

from qshard.formats import E4M3, E5M2
from qshard.reference import gather_rows
from support.awkward import assert_bits_equal, awkward_values
from support.draws import FLOATS
from support.op_calls import call

TOKENS, COLS = 300, 72
every_unit = pytest.mark.parametrize("unit", [16, 128])
every_dtype = pytest.mark.parametrize("dtype", FLOATS)


def routed(unit, dtype):
    """Return x, the row of x in each padded row, and the end of each expert; each token goes to two of 6 experts."""
    rng = np.random.default_rng(unit)
    expert = rng.integers(0, 5, 2 * TOKENS)  # The last expert gets none.
    rows, stops = [], []
    for e in range(6):
        own = np.flatnonzero(expert == e) % TOKENS
        rows += [*own, *[TOKENS] * (-len(own) % unit)]
        stops.append(len(rows))
    rows += [TOKENS] * 2 * unit  # Of no expert.
    x = awkward_values((TOKENS, COLS), dtype=dtype, kinds=("normal", "outlier", "zeros", "subnormal"))
    return x, np.int32(rows), np.int32(stops)


def each_expert(x, rows, stops):
    """Yield the padded rows of each expert, and what they hold."""
    for begin, end in zip([0, *stops[:-1]], stops, strict=True):
        yield slice(begin, end), gather_rows(x, rows[begin:end])


@every_dtype
@every_unit
@pytest.mark.parametrize("element", [E4M3.name, E5M2.name])
def test_one_scale_an_expert(unit, dtype, element):
    x, rows, stops = routed(unit, dtype)
    rule = {"element": element, "eps": 0.0, "nonfinite": "saturate", "pow2": False}
    amax = call("amax_grouped", x, rows, stops)
    scale, _ = call("scale_from_amax", amax, **rule)
    options = {"element": element, "nonfinite": "saturate"}
    data, data_t = call("cast_transpose_grouped", x, rows, stops, scale, **options)
    assert_bits_equal(call("cast_grouped", x, rows, stops, scale, **options), data)
    for e, (where, own) in enumerate(each_expert(x, rows, stops)):
        own_amax = call("amax_tensor", own, lead=0)
        own_scale, _ = call("scale_from_amax", own_amax, **rule)
        assert_bits_equal((amax[e], scale[e]), (own_amax, own_scale))
        want, want_t = call("cast_transpose", own, own_scale, batch=0, **options)
        assert_bits_equal(data[where], want)
        assert_bits_equal(data_t[:, where], want_t)
    assert not data[stops[-1] :].any()
    assert not data_t[:, stops[-1] :].any()


@every_dtype
@every_unit
@pytest.mark.parametrize("scale_dtype", ["float32", "float8_e8m0fnu"])
def test_blocks(unit, dtype, scale_dtype):
    x, rows, stops = routed(unit, dtype)
    options = {"element": E4M3.name, "eps": 0.0, "nonfinite": "saturate", "pow2": False, "rounding": "up"}
    options["scale_dtype"] = scale_dtype
    block = {"block_rows": unit, "block_cols": unit}
    made = call("quantize_block_both_t_rows", x, rows, **block, **options)
    one = call("quantize_block_rows", x, rows, **block | {"block_rows": 1}, **options)
    for got, want in zip(one, made[:2], strict=True):
        assert_bits_equal(got, want)
    for where, own in each_expert(x, rows, stops):
        data, scale_inv, data_t, scale_inv_t = call("quantize_block_both_t", own, outer=0, **block, **options)
        grid = slice(where.start // unit, where.stop // unit)
        assert_bits_equal(made[0][where], data)
        assert_bits_equal(made[1][where], scale_inv)
        assert_bits_equal(made[2][:, where], data_t)
        assert_bits_equal(made[3][:, grid], scale_inv_t)
    assert not made[0][stops[-1] :].any()
    assert not made[2][:, stops[-1] :].any()


def test_padding_and_rows_of_no_expert_do_not_count():
    """A token that no padded row names may be infinite, and so may a token in rows after the last stop."""
    x = np.float32([[1, -2], [np.nan, 0], [np.inf, 0]])
    rows, stops = np.int32([0, 3, -1, 0, 2]), np.int32([3, 4])
    assert_bits_equal(call("amax_grouped", x, rows, stops), np.float32([2, 2]))
    data = call("cast_grouped", x, rows, stops, np.float32([1, 2]), element=E4M3.name, nonfinite="nan")
    assert_bits_equal(data, np.uint8([[0x38, 0xC0], [0, 0], [0, 0], [0x40, 0xC8], [0, 0]]))


@pytest.mark.parametrize("stops", [[-1, 2], [5, 2], [2**31 - 1, 0], [0, -(2**31)]])
def test_bad_stops_stay_inside(stops):
    """They assign rows to the first expert whose stop is after the row."""
    x, rows = np.float32([[1], [2], [3]]), np.int32([2, 1, 0])
    amax = call("amax_grouped", x, rows, np.int32(stops))
    want = {-1: [0, 3], 5: [3, 0], 2**31 - 1: [3, 0], 0: [0, 0]}[stops[0]]
    assert_bits_equal(amax, np.float32(want))
