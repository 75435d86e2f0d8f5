"""`qshard.jax.cast_master` in one program for eight devices: starts are traced, one collective, no copies."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from qshard import formats, reference
from qshard.formats import Usage
from qshard.jax import _multi, cast_master, join_pieces, quantize
from qshard.master import plan_master
from support import hlo
from support.awkward import TAME, assert_bits_equal, awkward_values

P = PartitionSpec
RANDOM = formats.NVFP4.with_options(rounding="stochastic")
FORMATS = [
    formats.FP8_E4M3,
    formats.FP8_128x128,
    formats.MXFP8_32x32,
    formats.MXFP8_E4M3,
    formats.NVFP4_16x16,
    RANDOM,
    formats.NVFP4.with_options(global_scale="row"),
]
SHAPES = [(33, 45), (130, 140), (64, 96), (32, 32), (16, 48), (5, 48), (7, 32)]


def program(world, plan, lengths):
    """Masters, padded to `world` slices of one length, to whole codes and scales."""
    mesh = Mesh(np.array(jax.devices()[:world]), ("d",))

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("d"), P()),
        out_specs=(P("d"), P()),
    )
    def run(masters, seeds):
        starts = [lax.axis_index("d") * length for length in lengths]
        made = cast_master(None, masters, starts, "d", plan=plan, seeds=list(seeds))
        return [plane.data for plane in made], [(plane.scale_inv, plane.global_scale_inv) for plane in made]

    def whole(masters, seeds):
        pieces, scales = run(masters, seeds)
        starts = [np.arange(world) * length for length in lengths]
        joined = [
            join_pieces(p.reshape(world, -1), list(s), fmt, shape, usage)
            for p, s, fmt, shape, usage in zip(pieces, starts, plan.formats, plan.shapes, plan.usages, strict=True)
        ]
        return joined, scales

    return jax.jit(run), jax.jit(whole)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_slices_of_all_formats_in_one_program(world):
    """Lengths that cut rows, blocks and bytes, and leave the last devices nothing but padding."""
    plan = plan_master(SHAPES, FORMATS, rounded_to="bfloat16")
    weights = [awkward_values(shape, i, kinds=TAME) for i, shape in enumerate(SHAPES)]
    lengths = [-(-w.size // world) + 7 for w in weights]
    masters = [np.full(world * n, np.nan, np.float32) for n in lengths]
    for m, w in zip(masters, weights, strict=True):
        m[: w.size] = w.reshape(-1)
    seeds = np.arange(2 * len(weights), dtype=np.uint32).reshape(-1, 2)
    run, whole = program(world, plan, lengths)
    joined, scales = whole(masters, seeds)
    for i, (fmt, w) in enumerate(zip(FORMATS, weights, strict=True)):
        seed = int(seeds[i, 0]) + (int(seeds[i, 1]) << 32)
        expected = reference.quantize(w.astype("bfloat16"), fmt, seed=seed).rowwise
        assert_bits_equal(np.asarray(joined[i]), expected.data, f"codes of {fmt}")
        assert_bits_equal(np.asarray(scales[i][0]), expected.scale_inv, f"scales of {fmt}")
        if expected.global_scale_inv is not None:
            assert_bits_equal(np.asarray(scales[i][1]), expected.global_scale_inv, f"global scale of {fmt}")
    if world > 1:
        compiled = run.lower(masters, seeds).compile()
        assert hlo.collectives(compiled) == [("all-reduce", (f"s32[{plan.amaxes}]",))], "one for all weights"
        text = compiled.as_text()
        assert text.count('custom_call_target="qshard_amax_slices"') == len(plan.buckets)
        assert text.count('custom_call_target="qshard_cast_slices') == len(plan.buckets)


def test_weights_are_changed_in_place():
    """Whole weights: what is outside the slice stays, and a donated weight is not copied."""
    fmt, w = formats.NVFP4_16x16, awkward_values((32, 32), 1, kinds=TAME)
    plan = plan_master([w.shape], fmt)
    old = quantize(jnp.asarray(w) * 2, fmt, usage=Usage.BOTH)
    new = w.reshape(-1)[101:303]
    (made,) = jax.jit(lambda q, m: cast_master([q], [m], [101], plan=plan))(old, new)
    assert made.columnwise is None, "a stale plane"
    amax = reference.slice_amax(new, fmt, w.shape, 101)
    expected = np.array(old.rowwise.data)
    reference.cast_slice(new, expected, fmt, w.shape, 101, amax)
    assert_bits_equal(np.asarray(made.rowwise.data), expected)
    assert_bits_equal(np.asarray(made.rowwise.scale_inv), reference.scales_from_amax(amax, fmt).scale_inv)


def test_starts_of_64_bits():
    """Past 2**31 elements: words, or ints. Here they are past the end, and nothing is written."""
    plan = plan_master([(4, 4)], formats.FP8_E4M3)
    for starts in ([2**33], np.array([[0, 2]], np.uint32)):
        (piece,) = cast_master(None, [jnp.ones(4)], starts, plan=plan)
        assert not np.asarray(piece.data).any()


def test_bad_input():
    plan = plan_master([(4, 4)], formats.FP8_E4M3)
    with pytest.raises(ValueError, match=r"cast_master: 2 masters are not one for each of 1 weights"):
        cast_master(None, [jnp.ones(4)] * 2, [0], plan=plan)
    with pytest.raises(TypeError, match=r"cast_master: masters\[0\] \(bfloat16\) is not float32, as the plan has it"):
        cast_master(None, [jnp.ones(4, jnp.bfloat16)], [0], plan=plan)
    with pytest.raises(ValueError, match=r"cast_master: starts \(2, 2\) is not one number for each of 1 weights"):
        cast_master(None, [jnp.ones(4)], [0, 1], plan=plan)
    with pytest.raises(ValueError, match=r"cast_master: weights\[0\] .* is not what the plan has"):
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
        _multi.bind("amax_slices")(np.zeros((1, 2), np.uint32), jnp.zeros(4), [jnp.ones(3)], **options)
