"""`quantize` of shards and in compiled code, and `QuantizedTensor`: a container that never turns into something else.

The bits of every format and shape are in test_quantize.py.
"""

import copy
import io

import numpy as np
import pytest
import torch

from qshard import reference
from qshard.formats import FP8_E4M3, FP8_E5M2, MXFP8_E4M3, NVFP4, Usage
from qshard.torch_bridge import QuantizedTensor, quantize
from support.awkward import TAME, awkward_values
from support.formats import VARIANTS, stochastic
from support.fronts import TorchFront, assert_quantized

FRONT = TorchFront("cpu")
SEED = 0xFEDCBA9876543210
STOCHASTIC = NVFP4.with_options(rounding="stochastic")
every_usage = pytest.mark.parametrize("usage", [*Usage, Usage.BOTH], ids=lambda usage: usage.name)


@pytest.mark.parametrize("fmt", [fmt for fmt in VARIANTS if stochastic(fmt) and not fmt.hadamard], ids=str)
@every_usage
def test_shards_draw_the_bits_of_the_whole(fmt, usage):
    """Random bits belong to the place in the whole tensor; seed and place may be tensors."""
    x = awkward_values((64, 96), 1, kinds=TAME)
    x[0::16, 0::32] = 77.0  # Each shard has the amax of the whole.
    words = torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32]).to(torch.uint32)
    for rows in (slice(0, 16), slice(16, 64)):
        first = rows.start * 96
        place = torch.tensor([first, 0], dtype=torch.int32)
        for options in ({"seed": SEED, "offset": first}, {"seed": words, "offset": place}):
            q = FRONT.quantize(x[rows], fmt, usage=usage, **options)
            assert_quantized(FRONT, q, reference.quantize(x[rows], fmt, usage, seed=SEED, offset=first))
    columns = np.ascontiguousarray(x[:, 32:64])
    q = FRONT.quantize(columns, fmt, usage=usage, seed=SEED, offset=32, row_step=96)
    assert_quantized(FRONT, q, reference.quantize(columns, fmt, usage, seed=SEED, offset=32, row_step=96))


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


@pytest.mark.each_value
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
    with pytest.raises(NotImplementedError, match=r"is not supported on codes; call .dequantize\(\)"):
        use(q_of_both())


def test_what_gradients_are_made_of_is_plain():
    q = q_of_both()
    for like in (torch.zeros_like(q), torch.empty_like(q), torch.ones_like(q), q.new_zeros(4, 6), q.new_empty((4, 6))):
        assert type(like) is torch.Tensor
        assert (like.shape, like.dtype) == (q.shape, q.dtype)
    assert torch.zeros_like(q, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_it_prints_what_it_is_and_no_values():
    assert repr(q_of_both()) == "QuantizedTensor(FP8_E4M3, shape=(4, 6), dtype=torch.float32, device=cpu)"
