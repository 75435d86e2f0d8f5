"""Slices of master weights, cut anywhere: the bits of the reference's slices, and gathered, of the whole.

That the reference's slices give the whole is in tests/null/test_slices.py.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qshard import formats, reference
from qshard._core.flat_shards import TILE_COLS, FlatSlice, plan_master, plan_shards
from qshard.formats import Usage
from qshard.layout import plane
from support.awkward import DTYPES, KINDS, TAME, assert_bits_equal, awkward_values
from support.formats import SLICED
from support.fronts import TorchFront, some

FORMATS = [
    *SLICED,
    formats.FP8_E5M2.with_options(pow2=True, eps=0.25),
    formats.FP8_1x128.with_options(pow2=False, block=(3, 5)),
    formats.FP8_1x128.with_options(block=(40, 24), eps=1e-3),
]
PLANES = [
    *((fmt, Usage.ROWWISE) for fmt in FORMATS),
    *((fmt, Usage.COLUMNWISE) for fmt in (formats.MXFP8_E4M3, formats.MXFP8_E5M2)),
]
# Whole blocks for those who need them; for the others also odd sizes, and blocks that are cut.
WHOLE_BLOCKS = [(32, 96), (64, 32), (2, 32, 64)]
ANY = [(3, 7), (130, 9), (1, 1), (40, 260)]
# All of n elements, from and to the middle of a byte, past the end, nothing but padding, nothing at all.
SLICES = [
    lambda n: (0, n),
    lambda n: (n // 3 | 1, n // 2 + 18 | 1),
    lambda n: (n // 2 | 1, n + 7),
    lambda n: (n, n + 3),
    lambda n: (2**40 + n, 2**40 + n + 5),
    lambda n: (n // 3, n // 3),
]


def shapes_of(fmt):
    return WHOLE_BLOCKS if fmt.scaling.whole_blocks else [*WHOLE_BLOCKS, *ANY]


def weights_of(planes, kinds=TAME, dtype=np.float32):
    return [awkward_values(shape, i, dtype, kinds=kinds) for i, (*_, shape) in enumerate(planes)]


def assert_slices(front, planes, weights, bounds, rounded_to=None):
    """Codes and scales of slices as if they were all there is, with NaN for what they have past the end."""
    flat = [w.reshape(-1) for w in weights]
    own = [w[min(a, w.size) : min(b, w.size)] for w, (a, b) in zip(flat, bounds, strict=True)]
    nan = [np.full(b - a - x.size, np.nan, x.dtype) for x, (a, b) in zip(own, bounds, strict=True)]
    masters = [np.concatenate(pair) for pair in zip(own, nan, strict=True)]
    seeds = [i << 33 | i for i in range(len(weights))]
    made = front.cast_slices(planes, masters, [a for a, _ in bounds], seeds, rounded_to)
    for (data, scale_inv, global_scale_inv), (fmt, usage, shape), x, (start, _), seed in zip(
        made, planes, own, bounds, seeds, strict=True
    ):
        with np.errstate(over="ignore"):
            x = x if rounded_to is None else x.astype(rounded_to)
        layout, start = plane(fmt, shape, usage), min(start, int(np.prod(shape)))
        amax = reference.slice_amax(x, fmt, shape, start, usage)
        scales = reference.scales_from_amax(amax, fmt)
        want = scales.scale_inv.T if usage is Usage.COLUMNWISE else scales.scale_inv
        assert_bits_equal(scale_inv, want.reshape(scale_inv.shape), f"scales of {fmt}")
        if scales.global_scale_inv is not None:
            want = scales.global_scale_inv.reshape(global_scale_inv.shape)
            assert_bits_equal(global_scale_inv, want, f"global scale of {fmt}")
        whole = np.zeros(layout.data_shape, np.uint8)
        reference.cast_slice(x, whole, fmt, shape, start, amax, usage, seed=seed)
        there = whole.reshape(-1)[start // fmt.element.codes_per_byte :][: data.size]
        assert_bits_equal(data[: there.size], there, f"codes of {fmt} {shape} from {start}")
        assert not data[there.size :].any()


@pytest.mark.each_value
@pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])
def test_slices_are_those_of_the_reference(front, kinds):
    """Odd starts, cut rows, blocks and bytes, in the order of the weights, whatever calls they share."""
    if front.name == "jax":  # It compiles every call: each plane once, with each kind of slice in turn.
        planes = [(fmt, usage, shapes_of(fmt)[i % 3]) for i, (fmt, usage) in enumerate(PLANES)]
        weights = weights_of(planes, kinds)
        turns = [SLICES[i % 5](w.size) for i, w in enumerate(weights)]
        assert_slices(front, planes, weights, turns)
        return
    planes = [(fmt, usage, shape) for fmt, usage in PLANES for shape in shapes_of(fmt)]
    weights = weights_of(planes, kinds)
    for bounds in SLICES:
        assert_slices(front, planes, weights, [bounds(w.size) for w in weights])


def test_weights_without_elements(front):
    """Alone in their calls, as where a format has a scale a row and no weight has rows, and beside others."""
    row = formats.NVFP4.with_options(global_scale="row")
    for fmt, usage in [(row, Usage.ROWWISE)] if front.name == "jax" else PLANES:
        for shapes in ([(0, 96)], [(64, 0), (0, 0)], [(0, 32, 64), (64, 96), (0, 96)]):
            planes = [(fmt, usage, shape) for shape in shapes]
            weights = weights_of(planes)
            for bounds in SLICES[:: 1 if fmt is row and front.name == "torch" else 5]:
                assert_slices(front, planes, weights, [bounds(w.size) for w in weights])


def test_parities(front):
    """Codes of the master as it is, or rounded to the dtype of the model first."""
    shapes, fmts = [(32, 64), (64, 96), (33, 35)], [formats.NVFP4_16x16, formats.MXFP8_E4M3, formats.FP8_E4M3]
    planes = [(fmt, Usage.ROWWISE, shape) for fmt, shape in zip(fmts, shapes, strict=True)]
    cases = list(itertools.product(DTYPES, [None, "float32", "bfloat16", "float16"]))
    for dtype, rounded_to in some(front, cases, "parities"):
        weights = weights_of(planes, dtype=dtype)
        assert_slices(front, planes, weights, [(1001, w.size) for w in weights], rounded_to)


def test_long_slices(front):
    """More than a task, or a window, of a kernel, and rows longer than the buffers of one."""
    planes = [
        (fmt, Usage.ROWWISE, shape)
        for fmt, shape in (
            (formats.NVFP4, (16, 12_304)),
            (formats.FP8_E5M2, (9, 20_001)),
            (formats.MXFP8_32x32, (32, 8192)),
        )
    ]
    weights = weights_of(planes)
    for bounds in SLICES[: front.examples]:
        assert_slices(front, planes, weights, [bounds(w.size) for w in weights], "bfloat16")


def uneven(size, world, seed):
    """Cuts at odd places. One rank has nothing of any weight, if there are several."""
    inner = sorted(np.random.default_rng(seed).integers(0, size + 1, max(0, world - 2)).tolist())
    return [0, *sorted([*inner, *([inner[0] if inner else size] if world > 1 else [])]), size]


@pytest.mark.each_value
@pytest.mark.parametrize(("world", "rounded_to"), [(1, None), (2, "bfloat16"), (3, None), (4, "bfloat16"), (8, None)])
def test_gathered_slices_are_the_whole(front, world, rounded_to):
    """One reduction for all weights; what spoils a scale may be with one rank alone."""
    if world > front.devices():
        pytest.skip(f"{front.devices()} {front.device} devices")
    few = front.name == "jax" and world != 3
    planes = [(fmt, usage, shapes_of(fmt)[i % 3]) for i, (fmt, usage) in enumerate(PLANES[:: 7 if few else 1])]
    weights = weights_of(planes, KINDS if world % 2 else TAME)
    front.assert_cut_masters(planes, weights, [uneven(w.size, world, i) for i, w in enumerate(weights)], rounded_to)


def test_any_split(front):
    """Any planes, any cuts."""

    @settings(max_examples=2 if front.name == "jax" else 15)
    @given(
        where=st.lists(st.sampled_from(PLANES), min_size=1, max_size=4),
        world=st.integers(1, min(4, front.devices())),
        dtype=st.sampled_from(DTYPES),
        kinds=st.sampled_from([TAME, KINDS]),
        draw=st.data(),
    )
    def check(where, world, dtype, kinds, draw):
        planes = [(fmt, usage, draw.draw(st.sampled_from(shapes_of(fmt)))) for fmt, usage in where]
        sizes = [int(np.prod(shape)) for *_, shape in planes]
        inner = [draw.draw(st.lists(st.integers(0, n), min_size=world - 1, max_size=world - 1)) for n in sizes]
        cuts = [[0, *sorted(starts), n] for starts, n in zip(inner, sizes, strict=True)]
        front.assert_cut_masters(planes, weights_of(planes, kinds, dtype), cuts)

    check()


@pytest.mark.each_value
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("where", PLANES, ids=lambda where: f"{where[0]}-{where[1].name}")
def test_planned_cuts_need_no_reduction(where, world):
    """Unless a scale serves the whole tensor, slices have the scales of the whole for all of their elements."""
    fmt, usage = where
    shapes, front = shapes_of(fmt), TorchFront("cpu")
    for shape, shards in zip(shapes, plan_shards(shapes, fmt, world, usage=usage), strict=True):
        w, per_byte = awkward_values(shape, 3, kinds=TAME), fmt.element.codes_per_byte
        assert [start for start, _ in shards] + [w.size] == [0] + [stop for _, stop in shards]
        assert max(stop - start for start, stop in shards) == shards[0][1]
        assert all(start % per_byte == 0 for start, _ in shards)
        if world > 1 and (fmt.block is None or fmt.scaling.global_scale == "tensor"):
            continue
        whole = getattr(reference.quantize(w, fmt, usage, seed=1), usage.name.lower()).data.reshape(-1)
        for start, stop in shards:
            ((data, *_),) = front.cast_slices([(fmt, usage, shape)], [w.reshape(-1)[start:stop]], [start], [1])
            end = -(-stop // per_byte)
            assert_bits_equal(data[: end - start // per_byte], whole[start // per_byte : end])


def test_matrices_are_as_wide_as_tiles_of_the_kernel():
    source = Path(__file__).parents[2] / "ffi/kernels/cuda/slices/slices.cuh"
    assert re.findall(r"kSliceCols = (\d+)", source.read_text()) == [str(TILE_COLS)]


def test_bad_plans():
    four = formats.NVFP4.with_options(four_over_six="mae")
    with pytest.raises(
        ValueError, match=r"plan_master: slices of NVFP4.* cannot be cast: its scales depend on more than amaxes"
    ):
        plan_master([FlatSlice((16, 32), four)])
    with pytest.raises(
        ValueError, match=r"COLUMNWISE\) of FP8_128x128 is stored transposed, so a flat slice of the weight is"
    ):
        plan_master([FlatSlice((16, 32), formats.FP8_128x128, usage=Usage.COLUMNWISE)])
    with pytest.raises(ValueError, match="of NVFP4 is stored transposed, so a flat slice of the weight is no slice of"):
        plan_master([FlatSlice((16, 32), formats.NVFP4, usage=Usage.COLUMNWISE)])
    with pytest.raises(ValueError, match=r"plan_master: x \(16, 31\) is not a whole number of 1x32 blocks"):
        plan_master([FlatSlice((16, 31), formats.MXFP8_E4M3)])
    with pytest.raises(ValueError, match=r"plan_master: slices\[0\].dtype \('float64'\) is not float32"):
        plan_master([FlatSlice((16, 32), formats.FP8_E4M3, "float64")])
    with pytest.raises(ValueError, match=r"plan_shards: world \(0\) is not a positive integer; pass the number"):
        plan_shards([(16, 32)], formats.FP8_E4M3, 0)
