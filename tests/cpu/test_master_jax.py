"""`qshard.jax.cast_master` of whole weights, and what it refuses. Slices are in test_master.py."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qshard import formats, reference
from qshard._core.flat_shards import FlatSlice, plan_master
from qshard.formats import Usage
from qshard.jax import cast_master, quantize
from qshard.jax._sharding import multi_tensor
from support.awkward import TAME, assert_bits_equal, awkward_values


def test_weights_are_changed_in_place():
    """Whole weights: what is outside the slice stays, and a donated weight is not copied."""
    fmt, w = formats.NVFP4_16x16, awkward_values((32, 32), 1, kinds=TAME)
    plan = plan_master([FlatSlice(w.shape, fmt)])
    old = quantize(jnp.asarray(w) * 2, fmt, usage=Usage.BOTH)
    new = w.reshape(-1)[101:303]
    (made,) = jax.jit(lambda q, m: cast_master([q], [m], [101], plan=plan))(old, new)
    assert made.columnwise is None, "a stale plane"
    amax = reference.slice_amax(new, fmt, w.shape, 101)
    expected = np.array(old.rowwise.data)
    reference.cast_slice(new, expected, fmt, w.shape, 101, amax)
    assert_bits_equal(np.asarray(made.rowwise.data), expected)
    assert_bits_equal(np.asarray(made.rowwise.scale_inv), reference.scales_from_amax(amax, fmt).scale_inv)


def test_bad_input():
    plan = plan_master([FlatSlice((4, 4), formats.FP8_E4M3)])
    with pytest.raises(ValueError, match="cast_master: got 2 masters for 1 weights; pass one per weight"):
        cast_master(None, [jnp.ones(4)] * 2, [0], plan=plan)
    with pytest.raises(TypeError, match=r"cast_master: masters\[0\] \(bfloat16\) is not float32, the dtype of the"):
        cast_master(None, [jnp.ones(4, jnp.bfloat16)], [0], plan=plan)
    with pytest.raises(ValueError, match=r"cast_master: starts \(2, 2\) is not one integer for each of 1 weights"):
        cast_master(None, [jnp.ones(4)], [0, 1], plan=plan)
    random = plan_master([FlatSlice((1, 16), formats.NVFP4.with_options(rounding="stochastic"))])
    with pytest.raises(ValueError, match="cast_master: a format uses stochastic rounding and needs `seeds`"):
        cast_master(None, [jnp.ones(16)], [0], plan=random)
    with pytest.raises(ValueError, match=r"cast_master: weights\[0\] \(FP8_E4M3 \(4, 8\)\) does not match the"):
        cast_master([quantize(jnp.ones((4, 8)), formats.FP8_E4M3)], [jnp.ones(4)], [0], plan=plan)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": (4,)}, r"amax_slices: shapes \(1 numbers\) are not the rows and columns of 1 weights"),
        ({"block_rows": 0}, r"amax_slices: block \(0x2\) is not of positive size, or 0x0 for the whole weight"),
        ({"rounded_to": "float64"}, r"amax_slices: rounded_to \(float64\) is not one of float32, bfloat16, float16"),
        ({"whole": "column"}, r"amax_slices: whole \(column\) is not one of none, tensor, row"),
        ({"shapes": (4, 4)}, r"amax_slices: amax \(4,\) is not one number for each of 8 blocks and 0 whole"),
    ],
)
def test_handlers_check_for_themselves(change, message):
    options = {"block_cols": 2, "block_rows": 1, "rounded_to": "float32", "shapes": (2, 4), "whole": "none"} | change
    with pytest.raises(Exception, match=message):
        multi_tensor.bind("amax_slices")(np.zeros((1, 2), np.uint32), jnp.zeros(4), [jnp.ones(3)], **options)
