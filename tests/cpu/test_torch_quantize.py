"""`quantize` and `QuantizedTensor`: the reference's bits, and a container that never turns into something else."""

import copy
import io

import numpy as np
import pytest
import torch

from awkward import DTYPES, KINDS, TAME, assert_bits_equal, awkward_values, shapes_of
from fronts import TorchFront
from qshard import reference
from qshard.formats import FORMATS, FP8_E4M3, FP8_E5M2, Usage
from qshard.torch_bridge import QuantizedTensor, quantize

FRONT = TorchFront("cpu")
MADE = [
    FP8_E4M3,
    FP8_E5M2,
    FP8_E4M3.with_options(pow2=True),
    FP8_E4M3.with_options(eps=1.0),
    FP8_E5M2.with_options(pow2=True, eps=1e-3),
]
NOT_MADE = [fmt for fmt in FORMATS.values() if fmt.block is not None]
every_format = pytest.mark.parametrize("fmt", MADE, ids=str)
every_usage = pytest.mark.parametrize("usage", [*Usage, Usage.BOTH], ids=lambda usage: usage.name)


def assert_is_the_reference(q, x, fmt, usage):
    expected = reference.quantize(x, fmt, usage)
    for name in ("rowwise", "columnwise"):
        got, want = getattr(q, name), getattr(expected, name)
        assert (got is None) == (want is None)
        if got is not None:
            assert got.data.dtype == getattr(torch, fmt.element.name)
            assert_bits_equal(FRONT.numpy(got.data), want.data, f"{name}.data")
            assert_bits_equal(FRONT.numpy(got.scale_inv), want.scale_inv, f"{name}.scale_inv")
    assert q.global_scale_inv is None
    assert (q.format, tuple(q.shape), q.dtype) == (fmt, x.shape, FRONT.array(x).dtype)


@every_format
@every_usage
@pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])
def test_quantize_is_the_reference(fmt, usage, kinds):
    for seed, shape in enumerate(shapes_of(fmt, usage)):
        for dtype in DTYPES:
            x = awkward_values(shape, seed, dtype, kinds=kinds)
            assert_is_the_reference(FRONT.quantize(x, fmt, usage=usage), x, fmt, usage)


@every_format
@every_usage
def test_dequantize_is_the_reference(fmt, usage):
    """Both planes hold the same values, and rounding to the result's dtype happens once."""
    x = awkward_values((2, 31, 37), seed=5)
    q, expected = FRONT.quantize(x, fmt, usage=usage), reference.quantize(x, fmt, usage)
    for dtype in DTYPES:
        values = FRONT.dequantize(q, dtype)
        assert_bits_equal(values, expected.dequantize(dtype))
    assert_bits_equal(FRONT.dequantize(q), expected.dequantize())


@pytest.mark.parametrize("value", [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38])
def test_a_tensor_of_one_value(value):
    x = np.full((3, 5), value, np.float32)
    for fmt in MADE:
        assert_is_the_reference(FRONT.quantize(x, fmt, usage=Usage.BOTH), x, fmt, Usage.BOTH)


@pytest.mark.parametrize("fmt", NOT_MADE, ids=str)
def test_formats_that_torch_cannot_make_yet_are_named(fmt):
    with pytest.raises(NotImplementedError, match="is not one that PyTorch can make yet, as its scales are of blocks"):
        quantize(torch.ones(128, 128), fmt)


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
    with pytest.raises(error, match=text):
        quantize(x, FP8_E4M3, usage=usage)


def test_quantize_is_not_differentiable():
    """It takes the values as they are, like `argmax`; what should have a gradient goes through `Linear`."""
    q = quantize(torch.ones(4, 6, requires_grad=True), FP8_E4M3)
    assert not q.requires_grad
    assert not q.dequantize().requires_grad


def test_meta_tensors_give_the_layout():
    q = quantize(torch.empty(4, 6, device="meta"), FP8_E4M3, usage=Usage.BOTH)
    assert (q.rowwise.data.shape, q.columnwise.data.shape, q.device.type) == ((4, 6), (6, 4), "meta")
    assert q.dequantize().shape == (4, 6)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@every_usage
def test_compiled_quantize_gives_the_same_bits(usage, backend):
    torch._dynamo.reset()

    def both_ways(x):
        q = quantize(x, FP8_E5M2, usage=usage)
        return q, q.dequantize(torch.bfloat16)

    compiled = torch.compile(both_ways, fullgraph=True, backend=backend)
    x = FRONT.array(awkward_values((31, 37), seed=3, kinds=["normal", "ties", "outlier"]))
    (got, values), (want, expected) = compiled(x), both_ways(x)
    assert isinstance(got, QuantizedTensor)
    assert torch.equal(values, expected)
    for a, b in ((got.rowwise, want.rowwise), (got.columnwise, want.columnwise)):
        assert (a is None) == (b is None)
        if a is not None:
            assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8))
            assert torch.equal(a.scale_inv, b.scale_inv)


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
