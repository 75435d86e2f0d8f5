"""`qshard.torch_bridge.cast_master`: what is written, how often, and what a plan and the ops refuse."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qshard import formats, reference
from qshard.formats import Usage
from qshard.torch_bridge import CastPlan, QuantizedSlice, cast_master, quantize, update_columnwise
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.fronts import TorchFront, assert_plane
from support.torch_models import Wire

FRONT = TorchFront("cpu")
SQUARES = [formats.FP8_E4M3, formats.FP8_128x128, formats.MXFP8_32x32, formats.NVFP4_16x16]


@pytest.mark.parametrize("parity", ["master", "model"])
def test_whole_weights_in_place(parity):
    """One rank that has it all. Addresses stay, so a captured graph would replay."""
    values = [awkward_values((32, 96), i, kinds=TAME) for i in range(len(SQUARES))]
    weights = [
        quantize(torch.zeros(32, 96, dtype=torch.bfloat16), fmt, usage=usage)
        for fmt, usage in zip(SQUARES, [Usage.BOTH, Usage.ROWWISE, Usage.BOTH, Usage.BOTH], strict=True)
    ]
    both = quantize(torch.zeros(32, 96, dtype=torch.bfloat16), formats.MXFP8_E4M3, usage=Usage.BOTH)
    weights, values = [*weights, both], [*values, values[0]]
    addresses = [[t.data_ptr() for t in w.parts(Usage.ROWWISE) if t is not None] for w in weights]
    columns = [p.data.data_ptr() if (p := w.parts(Usage.COLUMNWISE)) else None for w in weights]
    plan = CastPlan(weights, parity=parity)
    for _ in range(2):
        cast_master(weights, [FRONT.array(v) for v in values], [0] * 5, parity=parity, plan=plan)
        assert [w.columnwise is None for w in weights] == [True] * 4 + [False], "stale planes are gone"
        update_columnwise(weights[:4])
        for w, v in zip(weights, values, strict=True):
            source = v if parity == "master" else v.astype("bfloat16")
            expected = reference.quantize(source, w.format, Usage.BOTH)
            assert_plane(FRONT, w.rowwise, expected.rowwise)
            assert_plane(FRONT, w.columnwise, expected.columnwise)
    assert addresses == [[t.data_ptr() for t in w.parts(Usage.ROWWISE) if t is not None] for w in weights]
    assert all(
        a is None or a == w.parts(Usage.COLUMNWISE).data.data_ptr() for a, w in zip(columns, weights, strict=True)
    )


@pytest.mark.parametrize("start", [0, 403, 512, 512 + 2**40])
@pytest.mark.parametrize("fmt", [formats.NVFP4_16x16, formats.FP8_E4M3], ids=str)
def test_nothing_else_of_a_whole_weight_is_written(fmt, start):
    """Not the other half of a byte, nor for what a slice has past the end."""
    w = awkward_values((16, 32), 1, kinds=TAME)
    q = quantize(FRONT.array(-2 * w), fmt)
    expected, own, first = FRONT.numpy(q.rowwise.data).copy(), w.reshape(-1)[start : start + 109], min(start, w.size)
    amax = reference.slice_amax(own, fmt, w.shape, first)
    reference.cast_slice(own, expected, fmt, w.shape, first, amax)
    padding = np.full(7 * (start > 400), np.nan, np.float32)
    cast_master([q], [FRONT.array(np.concatenate([own, padding]))], [start], parity="master")
    assert_bits_equal(FRONT.numpy(q.rowwise.data), expected)
    assert_bits_equal(FRONT.numpy(q.rowwise.scale_inv), reference.scales_from_amax(amax, fmt).scale_inv)


def test_calls_do_not_grow_with_the_number_of_weights():
    counts = []
    for n in (3, 30):
        weights = [quantize(torch.zeros(16, 32), formats.NVFP4_16x16) for _ in range(n)]
        weights += [quantize(torch.zeros(4, 32), formats.FP8_E4M3) for _ in range(n)]
        masters = [torch.ones(w.numel()) for w in weights]
        plan = CastPlan(weights, parity="master")
        starts = torch.zeros(len(weights), dtype=torch.int64)
        with Wire() as wire:
            cast_master(weights, masters, starts, parity="master", plan=plan)
        kernels = [name for name in wire.launches if name.startswith(("qshard", "aten._foreach"))]
        counts.append(kernels)
        assert sum("amax_slices" in name for name in kernels) == 2
        assert sum("cast_slices" in name for name in kernels) == 2
    assert counts[0] == counts[1]


def test_ops_in_a_compiled_program():
    """The schema says what is written, so a functionalized graph has it too."""

    def step(x, amax, starts):
        torch.ops.qshard.amax_slices(
            starts, amax, [x * 2], block_cols=2, block_rows=1, rounded_to="float32", shapes=[2, 4], whole="none"
        )
        return amax + 1

    x, starts = torch.tensor([1.0, -3.0, 2.0]), torch.tensor([[3, 0]], dtype=torch.int32)
    expected = torch.tensor([1.0, 3.0, 7.0, 1.0])
    assert torch.equal(step(x, torch.zeros(4), starts), expected)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    amax = torch.zeros(4)
    assert torch.equal(compiled(x, amax, starts), expected)
    assert torch.equal(amax, expected - 1)


@pytest.mark.parametrize("op", ["amax_slices", "cast_slices", "cast_slices_stochastic", "transpose_each"])
def test_ops_keep_torch_rules(op):
    words, x, data = torch.tensor([[3, 0]], dtype=torch.int32), [torch.randn(20)], [torch.zeros(16, dtype=torch.uint8)]
    shared = {"block_cols": 16, "block_rows": 1, "rounded_to": "bfloat16", "shapes": [2, 16]}
    operands, attributes = {
        "amax_slices": ((words, torch.zeros(3), x), {**shared, "whole": "tensor"}),
        "cast_slices": ((words, torch.ones(2), x, data), {**shared, "pieces": False, "element": "float4_e2m1fn"}),
        "cast_slices_stochastic": ((words, words, torch.ones(2), x, data), {**shared, "pieces": True}),
        "transpose_each": (([torch.ones(4, 2)], [torch.ones(2, 4)]), {}),
    }[op]
    torch.library.opcheck(getattr(torch.ops.qshard, op).default, operands, attributes)


def test_transposes_of_every_kind_in_one_call():
    """Bytes, nibbles and words, one matrix or a batch; shapes and dtypes say which."""
    codes = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (3, 6, 8), dtype=np.uint8))
    packed, scale = torch.from_numpy(reference.pack(codes[0] % 16)), torch.randn(2, 3, 5)
    made = [codes.new_zeros(3, 8, 6), codes.new_zeros(8, 3), scale.new_zeros(2, 5, 3), codes.new_zeros(0, 4)]
    torch.ops.qshard.transpose_each([codes, packed, scale, codes.new_zeros(4, 0)], made)
    assert torch.equal(made[0], codes.mT)
    assert torch.equal(made[1], torch.from_numpy(reference.pack(codes[0].T % 16)))
    assert torch.equal(made[2], scale.mT)


@pytest.mark.parametrize(
    ("data", "data_t", "message"),
    [
        ((4, 6), (4, 6), r"data_t\[1\] \(4, 6\) is not the transpose of data \(4, 6\), with one code a byte or two"),
        ((4, 6), (6, 2), r"is not the transpose"),
        ((5, 6), (12, 2), r"is not the transpose"),
        ((2, 4, 6), (3, 6, 4), r"is not the transpose"),
        ((4,), (4,), r"is not the transpose"),
    ],
)
def test_shapes_that_are_no_transposes(data, data_t, message):
    good = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=message):
        torch.ops.qshard.transpose_each(
            [good, torch.zeros(data, dtype=torch.uint8)], [good.clone(), torch.zeros(data_t, dtype=torch.uint8)]
        )
    with pytest.raises(ValueError, match=r"data\[0\] .* are not both of one byte, or float32"):
        torch.ops.qshard.transpose_each([good.half()], [good.half()])


def test_writes_count_in_versions():
    amax = torch.zeros(1)
    before = amax._version
    torch.ops.qshard.amax_slices(
        torch.zeros(1, 2, dtype=torch.int32),
        amax,
        [torch.ones(4)],
        block_cols=0,
        block_rows=0,
        rounded_to="float32",
        shapes=[2, 2],
        whole="none",
    )
    assert amax._version > before


def cast(data, x, **changes):
    options = {
        "block_cols": 16,
        "block_rows": 1,
        "element": "float4_e2m1fn",
        "pieces": False,
        "rounded_to": "float32",
        "shapes": [2, 16],
    } | changes
    starts = options.pop("starts", torch.zeros(1, 2, dtype=torch.int32))
    torch.ops.qshard.cast_slices(starts, options.pop("scale", torch.ones(2)), x, data, **options)


@pytest.mark.parametrize(
    ("data", "changes", "error", "message"),
    [
        (15, {}, ValueError, r"cast_slices: data\[0\] \(15,\) is not the codes of a weight of 2 x 16, two a byte"),
        (16, {"element": "float8_e4m3fn"}, ValueError, r"data\[0\] \(16,\) is not the codes of a weight of 2 x 16$"),
        (3, {"pieces": True}, ValueError, r"data\[0\] \(3,\) is too small for the codes of 7 elements; pass 4 bytes"),
        (16, {"scale": torch.ones(3)}, ValueError, r"scale \(3,\) is not one number for each of 2 blocks"),
        (16, {"shapes": [2]}, ValueError, r"shapes \(1 numbers\) are not the rows and columns of 1 weights"),
        (15, {"shapes": [2, 15]}, ValueError, r"odd number of columns, and two codes share a byte"),
        (16, {"element": "int4"}, ValueError, r"cast_slices: element \(int4\) is not one of float8_e4m3fn"),
        (16, {"starts": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"starts \(2, 2\) does not fit"),
        (16, {"starts": torch.zeros(1, dtype=torch.int64)}, ValueError, r"starts \(int64\) is not int32 or uint32"),
    ],
)
def test_bad_operands(data, changes, error, message):
    codes = torch.full((data,), 7, dtype=torch.uint8)
    with pytest.raises(error, match=message):
        cast([codes], [torch.ones(7)], **changes)
    assert (codes == 7).all(), "nothing is written"


def test_lists_must_fit():
    codes = torch.zeros(16, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"cast_slices: lists \(3 tensors in all\) are not 2 of equal length"):
        cast([codes], [torch.ones(7)] * 2)
    with pytest.raises(ValueError, match=r"x\[1\] \(bfloat16\) is not float32 as x\[0\] is; call once for each dtype"):
        cast(
            [codes] * 2,
            [torch.ones(7), torch.ones(7, dtype=torch.bfloat16)],
            shapes=[2, 16, 2, 16],
            starts=torch.zeros(2, 2, dtype=torch.int32),
            scale=torch.ones(4),
        )
    with pytest.raises(ValueError, match=r"cast_slices: x\[0\] \(strides \(2,\)\) is not contiguous"):
        cast([codes], [torch.ones(14)[::2]])
    with pytest.raises(ValueError, match=r"cast_slices: x\[0\] requires grad, but the op has no derivative"):
        cast([codes], [torch.ones(7, requires_grad=True)])


def test_bad_calls():
    q = quantize(torch.zeros(4, 4), formats.FP8_E4M3)
    piece = QuantizedSlice.empty(formats.FP8_E4M3, (4, 4), 4)
    x = torch.ones(16)
    with pytest.raises(ValueError, match=r"cast_master: parity \('bf16'\) is not 'master' or 'model'"):
        cast_master([q], [x], [0], parity="bf16")
    with pytest.raises(ValueError, match="cast_master: weights mix whole tensors and slices; cast them in"):
        cast_master([q, piece], [x, x], [0, 0], parity="master")
    with pytest.raises(ValueError, match="cast_master: got 2 masters and a plan of 1 for 1 weights; pass one per"):
        cast_master([q], [x, x], [0], parity="master")
    with pytest.raises(TypeError, match=r"cast_master: masters\[0\] \(bfloat16\) is not float32, the dtype of"):
        cast_master([q], [x.bfloat16()], [0], parity="master")
    with pytest.raises(ValueError, match="starts has 2 entries for 1 weights; pass one per weight"):
        cast_master([q], [x], [0, 1], parity="master")
    with pytest.raises(ValueError, match=r"masters\[0\] .* is not contiguous"):
        cast_master([q], [torch.ones(32)[::2]], [0], parity="master")
    random = quantize(torch.zeros(1, 16), formats.NVFP4.with_options(rounding="stochastic"), seed=0)
    with pytest.raises(ValueError, match="cast_master: a format uses stochastic rounding and needs `seeds`"):
        cast_master([random], [x], [0], parity="master")
    with pytest.raises(ValueError, match=r"MXFP8_E4M3\) has no columnwise plane that is the transpose of the"):
        update_columnwise([quantize(torch.zeros(32, 32), formats.MXFP8_E4M3)])
