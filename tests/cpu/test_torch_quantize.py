"""`quantize` and `QuantizedTensor`: the reference's bits, and a container that never turns into something else."""

import copy
import io

import numpy as np
import pytest
import torch

from qshard import reference
from qshard.formats import (
    FP8_E4M3,
    FP8_E5M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    FP8_1x128,
    FP8_128x128,
    MXFP8_32x32,
    NVFP4_16x16,
    Usage,
)
from qshard.torch_bridge import QuantizedTensor, quantize
from support.awkward import DTYPES, KINDS, TAME, assert_bits_equal, awkward_values, fits, shapes_of
from support.fronts import TorchFront

FRONT = TorchFront("cpu")
PER_TENSOR = [
    FP8_E4M3,
    FP8_E5M2,
    FP8_E4M3.with_options(pow2=True),
    FP8_E4M3.with_options(eps=1.0),
    FP8_E5M2.with_options(pow2=True, eps=1e-3),
]
IN_BLOCKS = [
    FP8_1x128,
    FP8_1x128.with_options(pow2=False, eps=1e-2),
    FP8_128x128,
    MXFP8_E4M3,
    MXFP8_E5M2.with_options(scale_rounding="floor"),
    MXFP8_32x32,
    NVFP4,
    NVFP4_16x16,
    NVFP4.with_options(global_scale="row"),
    NVFP4.with_options(four_over_six="mae"),
    NVFP4_16x16.with_options(four_over_six="mse", scale_max=256.0),
    NVFP4.with_options(hadamard=True),
    NVFP4.with_options(rounding="stochastic"),
    NVFP4.with_options(rounding="stochastic", hadamard=True),
    NVFP4_16x16.with_options(rounding="stochastic"),
]
MADE = PER_TENSOR + IN_BLOCKS
SEED = 0xFEDCBA9876543210
every_format = pytest.mark.parametrize("fmt", MADE, ids=str)
every_usage = pytest.mark.parametrize("usage", [*Usage, Usage.BOTH], ids=lambda usage: usage.name)


def random_of(fmt, seed=SEED):
    return {"seed": seed} if fmt.rounding == "stochastic" else {}


def assert_is_the_reference(q, x, fmt, usage, **place):
    expected = reference.quantize(x, fmt, usage, **random_of(fmt), **place)
    for name in ("rowwise", "columnwise"):
        got, want = getattr(q, name), getattr(expected, name)
        assert (got is None) == (want is None)
        if got is not None:
            assert got.data.dtype == getattr(torch, fmt.data_dtype)
            assert got.scale_inv.dtype == getattr(torch, fmt.scale_dtype)
            for part in ("data", "scale_inv", "global_scale_inv"):
                mine, theirs = getattr(got, part), getattr(want, part)
                assert (mine is None) == (theirs is None)
                if mine is not None:
                    assert_bits_equal(FRONT.numpy(mine), theirs, f"{name}.{part}")
    assert (q.global_scale_inv is None) == (fmt.global_scale is None)
    assert (q.format, tuple(q.shape), q.dtype) == (fmt, x.shape, FRONT.array(x).dtype)


@every_format
@every_usage
@pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])
def test_quantize_is_the_reference(fmt, usage, kinds):
    shapes = [shape for shape in shapes_of(fmt, usage) if not fmt.hadamard or np.prod(shape) <= 4000]
    for seed, shape in enumerate(shapes):
        for dtype in DTYPES if seed < 8 else DTYPES[:1]:
            x = awkward_values(shape, seed, dtype, kinds=kinds)
            assert_is_the_reference(FRONT.quantize(x, fmt, usage=usage, **random_of(fmt)), x, fmt, usage)


@every_format
@every_usage
def test_dequantize_is_the_reference(fmt, usage):
    """Rounding to the result's dtype happens once."""
    shapes = [shape for shape in [(2, 31, 37), (2, 16, 64), (32,), (64, 32)] if fits(fmt, shape, usage)]
    assert shapes or fmt.global_scale == "row"
    for seed, shape in enumerate(shapes):
        x = awkward_values(shape, seed)
        q = FRONT.quantize(x, fmt, usage=usage, **random_of(fmt))
        expected = reference.quantize(x, fmt, usage, **random_of(fmt))
        for dtype in (None, *DTYPES):
            for one in usage:
                values = q.dequantize(None if dtype is None else FRONT.dtype(dtype), usage=one)
                assert_bits_equal(FRONT.numpy(values), expected.dequantize(dtype, usage=one))
        assert_bits_equal(FRONT.dequantize(q), expected.dequantize())


def test_a_plane_that_is_not_there_cannot_be_read():
    q = quantize(torch.ones(4, 6), FP8_E4M3)
    with pytest.raises(ValueError, match=r"dequantize: usage .* is not a plane of this tensor; quantize with it"):
        q.dequantize(usage=Usage.COLUMNWISE)


@pytest.mark.parametrize(
    "fmt", [NVFP4.with_options(rounding="stochastic"), NVFP4_16x16.with_options(rounding="stochastic")], ids=str
)
@every_usage
def test_shards_draw_the_bits_of_the_whole(fmt, usage):
    """Random bits belong to the place in the whole tensor; seed and place may be tensors."""
    x = awkward_values((64, 96), 1, kinds=TAME)
    x[0::16, 0::32] = 77.0  # Each shard has the amax of the whole.
    words = torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32]).to(torch.uint32)
    for rows in (slice(0, 16), slice(16, 64)):
        first = rows.start * 96
        place = torch.tensor([first, 0], dtype=torch.int32)
        for options in ({"seed": SEED, "first": first}, {"seed": words, "first": place}):
            q = FRONT.quantize(x[rows], fmt, usage=usage, **options)
            assert_is_the_reference(q, x[rows], fmt, usage, start=first)
    columns = np.ascontiguousarray(x[:, 32:64])
    q = FRONT.quantize(columns, fmt, usage=usage, seed=SEED, first=32, row_step=96)
    assert_is_the_reference(q, columns, fmt, usage, start=32, row_stride=96)


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38])
def test_a_tensor_of_one_value(value):
    for fmt in MADE:
        x = np.full((3, 5) if fmt.cuts_blocks else (32, 32), value, np.float32)
        usage = Usage.ROWWISE if fmt.global_scale == "row" else Usage.BOTH
        assert_is_the_reference(FRONT.quantize(x, fmt, usage=usage, **random_of(fmt)), x, fmt, usage)


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.ones(4, 6).t(), ValueError, "x .* is not contiguous; call .contiguous"),
        (torch.ones(4, 6, dtype=torch.float64), TypeError, "x .float64. is not float32 or bfloat16 or float16"),
        (torch.ones(4, 6, dtype=torch.int32), TypeError, "x .int32. is not float32"),
    ],
    ids=["strided", "float64", "int32"],
)
@every_usage
def test_what_quantize_refuses(x, error, text, usage):
    for fmt in (FP8_E4M3, FP8_1x128):
        with pytest.raises(error, match=text):
            quantize(x, fmt, usage=usage)


STOCHASTIC = NVFP4.with_options(rounding="stochastic")


@pytest.mark.parametrize(
    ("shape", "fmt", "options", "error", "text"),
    [
        ((4, 33), MXFP8_E4M3, {}, ValueError, r"x \(4, 33\) is not a whole number of 1x32 blocks of MXFP8_E4M3; pad"),
        (
            (33, 32),
            MXFP8_32x32,
            {},
            ValueError,
            r"not a whole number of 32x32 blocks of MXFP8_32x32; pad the rows to 64",
        ),
        ((8, 32), MXFP8_E4M3, {"usage": Usage.BOTH}, ValueError, "32x1 blocks of MXFP8_E4M3; pad the rows to 32"),
        ((16, 24), NVFP4, {}, ValueError, "pad the columns to 32"),
        ((16, 16), NVFP4.with_options(global_scale="row"), {"usage": Usage.BOTH}, ValueError, "one scale a row"),
        ((16, 16), STOCHASTIC, {}, ValueError, r"quantize: seed .None. is not what NVFP4.rounding=stochastic. needs"),
        ((16, 16), STOCHASTIC, {"seed": -1}, ValueError, r"seed .-1. is not in .0, 2\*\*64.; take it modulo"),
        (
            (16, 16),
            STOCHASTIC,
            {"seed": torch.zeros(2)},
            TypeError,
            r"seed .torch.float32 \(2,\). is not int32 or uint32",
        ),
        (
            (16, 16),
            STOCHASTIC,
            {"seed": 1, "first": torch.zeros(3, dtype=torch.int32)},
            TypeError,
            "first .* is not int32",
        ),
    ],
)
def test_what_a_format_refuses(shape, fmt, options, error, text):
    with pytest.raises(error, match=text):
        quantize(torch.ones(shape), fmt, **options)


def test_quantize_is_not_differentiable():
    """It takes the values as they are, like `argmax`; what should have a gradient goes through `Linear`."""
    q = quantize(torch.ones(4, 6, requires_grad=True), FP8_E4M3)
    assert not q.requires_grad
    assert not q.dequantize().requires_grad


def test_meta_tensors_give_the_layout():
    q = quantize(torch.empty(4, 6, device="meta"), FP8_E4M3, usage=Usage.BOTH)
    assert (q.rowwise.data.shape, q.columnwise.data.shape, q.device.type) == ((4, 6), (6, 4), "meta")
    assert q.dequantize().shape == (4, 6)
    q = quantize(torch.empty(16, 32, device="meta"), NVFP4, usage=Usage.BOTH)
    assert (q.rowwise.data.shape, q.columnwise.data.shape, q.columnwise.scale_inv.shape) == ((16, 16), (32, 8), (32, 1))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("fmt", [FP8_E5M2, MXFP8_E4M3, STOCHASTIC.with_options(hadamard=True)], ids=str)
@every_usage
def test_compiled_quantize_gives_the_same_bits(fmt, usage, backend):
    torch._dynamo.reset()

    def both_ways(x):
        q = quantize(x, fmt, usage=usage, seed=SEED)
        return q, q.dequantize(torch.bfloat16)

    compiled = torch.compile(both_ways, fullgraph=True, backend=backend)
    x = FRONT.array(awkward_values((32, 64), seed=3, kinds=["normal", "ties", "outlier"]))
    (got, values), (want, expected) = compiled(x), both_ways(x)
    assert isinstance(got, QuantizedTensor)
    assert torch.equal(values, expected)
    for a, b in ((got.rowwise, want.rowwise), (got.columnwise, want.columnwise)):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
            assert torch.equal(a.scale_inv.float(), b.scale_inv.float())


def q_of_both():
    return quantize(torch.linspace(-3, 3, 24).view(4, 6), FP8_E4M3, usage=Usage.BOTH)


@pytest.mark.parametrize(
    "change",
    [
        torch.Tensor.detach,
        torch.clone,
        copy.deepcopy,
        lambda q: q.to("cpu", copy=True),
        lambda q: q.view(4, 6),
        lambda q: torch.as_strided(q, (4, 6), (6, 1), 0),
        lambda q: torch.nn.Parameter(q, requires_grad=True),
        lambda q: type(q).__tensor_unflatten__(
            {name: getattr(q, name) for name in q.__tensor_flatten__()[0]},
            q.__tensor_flatten__()[1],
            q.shape,
            q.stride(),
        ),
        lambda q: torch.load(saved(q), weights_only=False),
    ],
    ids=["detach", "clone", "deepcopy", "to", "view", "as_strided", "Parameter", "unflatten", "pickle"],
)
def test_it_stays_what_it_is(change):
    q = q_of_both()
    same = change(q)
    assert isinstance(same, QuantizedTensor)
    assert (same.format, same.shape, same.dtype) == (q.format, q.shape, q.dtype)
    assert torch.equal(same.dequantize(), q.dequantize())
    assert torch.equal(same.columnwise.data.view(torch.uint8), q.columnwise.data.view(torch.uint8))


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.mark.parametrize(
    "use",
    [
        lambda q: q + 1,
        lambda q: q.add_(1),
        lambda q: q.copy_(torch.ones(4, 6)),
        lambda q: torch.ones(4, 6).copy_(q),
        lambda q: q @ q.T,
        lambda q: torch.nn.functional.linear(torch.ones(2, 6), q),
        lambda q: q.to(torch.bfloat16),
        lambda q: q.view(24),
        lambda q: q[0],
        lambda q: q.sum(),
        lambda q: torch.nn.functional.embedding(torch.tensor([1]), q),
        lambda q: torch._foreach_add_([q], 1.0),
    ],
)
def test_all_other_use_says_what_to_do(use):
    with pytest.raises(NotImplementedError, match=r"is not an op on codes; call .dequantize\(\)"):
        use(q_of_both())


def test_what_gradients_are_made_of_is_plain():
    q = q_of_both()
    for like in (torch.zeros_like(q), torch.empty_like(q), torch.ones_like(q), q.new_zeros(4, 6), q.new_empty((4, 6))):
        assert type(like) is torch.Tensor
        assert (like.shape, like.dtype) == (q.shape, q.dtype)
    assert torch.zeros_like(q, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_it_prints_what_it_is_and_no_values():
    assert repr(q_of_both()) == "QuantizedTensor(FP8_E4M3, shape=(4, 6), dtype=torch.float32, device=cpu)"
