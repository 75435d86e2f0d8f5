"""Kernels whose results depend on more than a scale: rotation, random bits, other layouts, state between steps."""

import numpy as np
import pytest
import torch

from qshard import _ffi, reference
from qshard.formats import E2M1, E4M3, E5M2
from support.awkward import BFLOAT16, DTYPES, assert_bits_equal, awkward_values
from support.op_calls import call

ROWWISE = {"block_rows": 1, "block_cols": 16}
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
fp8 = pytest.mark.parametrize("element", [E4M3, E5M2], ids=str)


def pair(*values: int) -> np.ndarray:
    """64-bit numbers as pairs of words, the low one first, in an axis of their own if there are several."""
    words = np.array(values, np.uint64).view(np.uint32)
    return words.reshape(len(values), 2) if len(values) > 1 else words


# --- hadamard ---


def check_hadamard(x):
    want = reference.hadamard_transform(x).astype(BFLOAT16)
    assert_bits_equal(call("hadamard", x, **ROWWISE), want, "along rows")
    turned = call("hadamard", np.ascontiguousarray(x.T), block_rows=16, block_cols=1)
    assert_bits_equal(turned, np.ascontiguousarray(want.T), "down columns")


@dtypes
def test_hadamard_is_exact(dtype):
    for shape in [(0, 16), (1, 16), (3, 48), (17, 16), (31, 160)]:
        check_hadamard(awkward_values(shape, 7, dtype))


def test_hadamard_of_exponents_far_apart():
    """Sums that cancel to their smallest terms, ties of bfloat16, and spans next to where the exact path begins."""
    rng = np.random.default_rng(0)
    x = rng.integers(-255, 256, (600, 16)).astype(np.float32)
    for span in (0, 5, 17, 18, 19, 20, 60, 250):
        for base in (-133, -60, 0, 119 - span):
            if base >= -133 and base + span <= 119:
                check_hadamard(np.ldexp(x[:40], base + rng.integers(0, span + 1, (40, 16))).astype(np.float32))
    cancel = np.ldexp(x, rng.integers(-133, 100, (600, 1))).astype(np.float32)
    cancel[:, 8:] = cancel[:, :8]
    cancel[:, 3] += np.ldexp(1.0, rng.integers(-133, 100, 600))
    check_hadamard(cancel)
    check_hadamard(np.eye(16, dtype=np.float32) * np.float32(2.0**-133))
    check_hadamard(np.full((1, 16), np.finfo(np.float32).max))


# --- stochastic rounding ---


def stochastic(x, scale, seed, first, row_step, col_step=1, **block):
    steps = {"row_step": row_step, "col_step": col_step}
    return call("cast_block_stochastic", x, scale, seed, first, **steps, **(block or ROWWISE))


def expected(x, scale, seed, index):
    with np.errstate(all="ignore"):
        scaled = x.astype(np.float32) * np.repeat(scale, 16, axis=1)
    return reference.pack(reference.encode_stochastic(scaled, reference.random_bytes(seed, index)))


@dtypes
@pytest.mark.parametrize("first", [0, 1, 15, 2**32 - 5, 2**36 + 7, 2**63])
def test_random_bits_follow_the_index(first, dtype):
    seed = 0x0123456789ABCDEF
    x = awkward_values((5, 1104), 1, dtype)
    scale = awkward_values((5, 69), 2, kinds=["normal"])
    for row_step, col_step in [(1104, 1), (5000, 1), (1, 5), (1, 2**33), (7, 3)]:
        rows, cols = np.ogrid[:5, :1104]
        index = np.uint64(first) + (rows * row_step + cols * col_step).astype(np.uint64)
        got = stochastic(x, scale, pair(seed), pair(first), row_step, col_step)
        assert_bits_equal(got, expected(x, scale, seed, index), f"{first} {row_step} {col_step}")


def test_place_of_each_row_or_block_is_the_place_of_the_whole():
    """What SPMD passes: an operand that is cut with x. Also several matrices, and square blocks."""
    x = awkward_values((2, 64, 96), 3)
    for rows, cols in [(1, 16), (16, 16), (16, 1)]:
        grid = (64 // rows, 96 // cols)
        block = {"block_rows": rows, "block_cols": cols}
        scale = awkward_values((2, *grid), 4, kinds=["normal"])
        whole = stochastic(x, scale, pair(5), pair(1000), 96, **block)
        strips = 1000 + np.arange(0, x.size, rows * 96).reshape(2, grid[0], 1).astype(np.uint64)
        for first in (strips[:, 0, 0], strips[:, :, 0], strips + np.arange(0, 96, cols).astype(np.uint64)):
            first = np.ascontiguousarray(first)[..., None].view(np.uint32)
            seed = np.broadcast_to(pair(5), first.shape)
            assert_bits_equal(stochastic(x, scale, seed, first, 96, **block), whole, f"{block} {first.shape}")
    scale = np.ones((2, 64, 6), np.float32)
    seeds = stochastic(x, scale, pair(5, 6), pair(0, 0), 96)
    for i in range(2):
        assert_bits_equal(seeds[i], stochastic(x[i], scale[i], pair(5 + i), pair(0), 96), f"seed {i}")


def test_shards_draw_what_the_whole_draws():
    x = awkward_values((64, 256), 8)
    scale = np.ones((64, 16), np.float32)
    whole = stochastic(x, scale, pair(1), pair(0), 256)
    by_rows = [stochastic(x[i : i + 16], scale[:16], pair(1), pair(i * 256), 256) for i in range(0, 64, 16)]
    assert_bits_equal(np.concatenate(by_rows), whole)
    by_cols = [stochastic(x[:, j : j + 64], scale[:, :4], pair(1), pair(j), 256) for j in range(0, 256, 64)]
    assert_bits_equal(np.concatenate(by_cols, axis=1), whole)
    turned = stochastic(np.ascontiguousarray(x.T), np.ones((256, 4), np.float32), pair(1), pair(0), 1, 256)
    assert_bits_equal(reference.unpack(turned).T, reference.unpack(whole), "transpose")


@pytest.mark.parametrize(("low", "high"), [(0.0, 0.5), (1.5, 2.0), (2.0, 3.0), (4.0, 6.0)])
def test_rounding_up_is_as_likely_as_near(low, high):
    """Chi-square of the share that rounds up, at distances of whole 256ths: 99.99 % of perfect generators pass each."""
    n = 1 << 16
    for i, distance in enumerate([1, 13, 64, 128, 200, 255]):
        probability = distance / 256
        x = np.full((n // 16, 16), low + (high - low) * probability, np.float32)
        data = stochastic(x, np.ones((n // 16, 1), np.float32), pair(i), pair(0), 16)
        values = reference.decode(reference.unpack(data), E2M1)
        assert set(np.unique(values)) <= {np.float32(low), np.float32(high)}
        up = int((values == np.float32(high)).sum())
        assert (up - n * probability) ** 2 / (n * probability * (1 - probability)) < 15.1, (distance, up)


def test_random_bytes_are_uniform():
    """x = 0.25 rounds up where the byte is at least 128: counts of runs of four elements, against chance."""
    x = np.full((1 << 12, 64), 0.25, np.float32)
    data = stochastic(x, np.ones((1 << 12, 4), np.float32), pair(11), pair(0), 64)
    bits = (reference.decode(reference.unpack(data), E2M1) > 0).reshape(-1, 4)
    counts = np.bincount(bits @ [1, 2, 4, 8], minlength=16)
    want = counts.sum() / 16
    assert ((counts - want) ** 2 / want).sum() < 44.3  # 99.99 % of chi-square with 15 degrees of freedom


# --- layouts ---


@pytest.mark.parametrize(
    ("rows", "cols"), [(0, 16), (2, 2), (16, 80), (130, 48), (288, 32), (16, 0), (254, 258), (66, 144)]
)
def test_transpose_packed(rows, cols):
    for batch in ((), (3,)):
        codes = np.random.default_rng(0).integers(0, 16, (*batch, rows, cols), np.uint8)
        turned = call("transpose_packed", reference.pack(codes))
        assert_bits_equal(turned, reference.pack(np.ascontiguousarray(np.swapaxes(codes, -1, -2))))


@pytest.mark.parametrize("block_rows", [1, 16, 32, 128])
def test_swizzle_scale(block_rows):
    for shape in [(1, 1), (3, 5), (128, 4), (130, 6), (0, 4), (4, 0), (257, 13)]:
        scale = np.random.default_rng(1).integers(1, 256, shape, np.uint8)
        tiles = call("swizzle_scale", scale, rows=128 // block_rows)
        assert_bits_equal(tiles, reference.swizzle_scale(scale, block_rows=block_rows), f"{shape}")
        assert_bits_equal(call("swizzle_scale", np.stack([scale, scale]), rows=128 // block_rows)[1], tiles)


# --- delayed scaling ---


@dtypes
@fp8
def test_cast_and_amax_of_one_read(element, dtype):
    for shape in [(1, 1), (0, 5), (31, 37), (64, 192), (130, 70), (3, 5, 70)]:
        x = awkward_values(shape, 1, dtype)
        for axes in range(len(shape)):
            scale = np.asarray(awkward_values((*shape[:axes], 1), 2, kinds=["normal"])[..., 0])
            codes = call("cast_tensor", x, scale, element=element.name)
            for lead in range(len(shape)):
                amax = np.asarray(reference.amax(x, axis=tuple(range(lead, len(shape)))))
                got = call("cast_amax", x, scale, element=element.name, lead=lead)
                for result, want in zip(got, (codes, amax), strict=True):
                    assert_bits_equal(result, want, f"{shape} {axes} {lead}")
                got = call("cast_transpose_amax", x, scale, element=element.name, lead=lead, batch=len(shape) - 2)
                turned = np.ascontiguousarray(np.swapaxes(codes, -1, -2))
                for result, want in zip(got, (codes, turned, amax), strict=True):
                    assert_bits_equal(result, want, f"{shape} {axes} {lead} transposed")


def step(amax, history, scale, element, margin, most_recent):
    return call(
        "update_delayed_scale", amax, history, scale, element=element.name, margin=margin, most_recent=most_recent
    )


@fp8
@pytest.mark.parametrize("most_recent", [False, True])
@pytest.mark.parametrize("length", [1, 2, 16])
def test_update_delayed_scale_over_many_steps(length, most_recent, element):
    """From a fresh state, as training goes: zeros, infinities, NaN and tiny amaxes among the rest, for 300 tensors."""
    rng = np.random.default_rng(length)
    scale, history = np.ones(300, np.float32), np.zeros((300, length), np.float32)
    rule = {"margin": 1, "algorithm": "most_recent" if most_recent else "max"}
    for _ in range(40):
        amax = np.ldexp(np.abs(rng.standard_normal(300)), rng.integers(-30, 30, 300)).astype(np.float32)
        odd = rng.random(300) < 0.3
        amax[odd] = rng.choice(np.array([0, np.inf, np.nan, 1e-45, 3e38], np.float32), odd.sum())
        want_scale, want_history = reference.delayed_scale_update(scale, history, amax, element, **rule)
        new_history, new_scale, scale_inv = step(amax, history, scale, element, 1, most_recent)
        assert_bits_equal(new_history, want_history)
        assert_bits_equal(new_scale, want_scale)
        assert_bits_equal(scale_inv, np.float32(1) / want_scale)
        scale, history = want_scale, want_history


@pytest.mark.parametrize("most_recent", [False, True])
def test_an_amax_of_zero_leaves_window_and_scale(most_recent):
    """Also where the scale does not follow from the window, as after a restore or a change by hand."""
    amax, history, scale = np.zeros(1, np.float32), np.array([[1.0, 2.0]], np.float32), np.array([3.0], np.float32)
    rule = {"algorithm": "most_recent" if most_recent else "max"}
    new_history, new_scale, scale_inv = step(amax, history, scale, E4M3, 0, most_recent)
    want_scale, want_history = reference.delayed_scale_update(scale, history, amax, E4M3, **rule)
    assert_bits_equal(new_history, want_history)
    assert_bits_equal(new_scale, want_scale)
    assert_bits_equal(new_scale, scale)
    assert_bits_equal(scale_inv, np.float32(1) / scale)


def test_update_delayed_scale_in_place():
    amax = torch.tensor([1.0, 0.0, 3.0])
    history = torch.arange(12.0).reshape(3, 4)
    scale, scale_inv = torch.ones(3), torch.empty(3)
    want = step(amax.numpy(), history.numpy().copy(), scale.numpy().copy(), E4M3, 0, False)
    attributes = {"element": E4M3.name, "margin": 0, "most_recent": False}
    _ffi.call("update_delayed_scale", (amax, history, scale), (history, scale, scale_inv), attributes)
    for got, new in zip((history, scale, scale_inv), want, strict=True):
        assert_bits_equal(got.numpy(), new)
