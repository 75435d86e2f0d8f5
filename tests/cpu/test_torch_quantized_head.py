"""`linear_cross_entropy` under recipes, and heads that `convert` makes: the bits of `linear` and `cross_entropy`."""

import copy
import io
from collections import Counter

import pytest
import torch
from torch import nn

import qshard.torch_bridge as qt
from qshard.recipes import CurrentScaling, DelayedScaling
from support.formats import STATEFUL, STATELESS
from support.torch_models import Wire

K, CLASSES = 128, 256
RULE = {"label_smoothing": 0.1, "z_loss": 1e-3}


def drawn(rows=(2, 20), dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*rows, K, generator=generator).to(dtype).requires_grad_()
    w = (torch.randn(CLASSES, K, generator=generator) / 5).requires_grad_()
    labels = torch.randint(CLASSES, rows, generator=generator)
    labels.view(-1)[1] = -100
    return x, w, labels


def two_calls(x, w, labels, recipe, seed=None, **options):
    return qt.cross_entropy(qt.linear(x, w, None, recipe, seed=seed), labels, **options)


def step(loss, leaves):
    gradients = torch.autograd.grad(loss, leaves, torch.full(loss.shape, 0.5))
    return loss.detach(), *gradients


@pytest.mark.parametrize("reduction", ["sum", "none"])
@pytest.mark.parametrize("recipe", STATELESS.values(), ids=STATELESS)
def test_is_the_two_calls(recipe, reduction):
    """In bits, where all rows are one chunk, and gradients are made of that of the loss ("none")."""
    x, w, labels = drawn()
    given = {"recipe": recipe, "seed": 7 if recipe.stochastic else None, "reduction": reduction, **RULE}
    for leaves in ((x, w), (x,), (w,)):
        actual = step(qt.linear_cross_entropy(x, w, labels, **given), leaves)
        want = step(two_calls(x, w, labels, **given), leaves)
        for mine, other in zip(actual, want, strict=True):
            assert mine.dtype == other.dtype
            if reduction == "none" or mine.ndim == 0:
                assert torch.equal(mine, other)
            else:  # Half a gradient of the loss is rounded before, or after.
                torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2 * other.abs().max().item())
    with torch.no_grad():
        assert torch.equal(qt.linear_cross_entropy(x, w, labels, **given), actual[0])


@pytest.mark.parametrize("recipe", ["MXFP8", "BlockScaling"])
def test_chunks_of_whole_blocks_have_the_bits_of_one(recipe):
    """Except for sums over chunks. No block of rows crosses a chunk boundary."""
    x, w, labels = drawn((512,))
    given = {"recipe": recipe, "reduction": "none"}
    one = step(qt.linear_cross_entropy(x, w, labels, chunk=512, **given), (x, w))
    many = step(qt.linear_cross_entropy(x, w, labels, chunk=128, **given), (x, w))
    assert torch.equal(one[0], many[0])
    assert torch.equal(one[1], many[1])
    torch.testing.assert_close(one[2], many[2], rtol=1e-4, atol=1e-5)


def test_the_weight_is_quantized_once():
    x, w, labels = drawn((32,))
    with Wire() as wire:
        qt.linear_cross_entropy(x, w, labels, recipe="CurrentScaling", chunk=8).backward()
    casts = Counter(shape for op, shape in wire.shapes if op.startswith(("cast", "quantize_")))
    assert casts == {(CLASSES, K): 1, (8, K): 4, (8, CLASSES): 4}  # The weight, chunks of x, and their gradients.


def test_chunks_draw_other_numbers():
    """Else equal rows in two chunks would be rounded alike."""
    x, w, labels = drawn((2,))
    x = x.detach()[:1].expand(32, K).contiguous().requires_grad_()
    recipe = STATELESS["NVFP4"]
    loss = qt.linear_cross_entropy(x, w, labels[:1].expand(32), recipe=recipe, seed=3, chunk=16, reduction="none")
    (dx,) = torch.autograd.grad(loss, x, torch.ones(32))
    assert not torch.equal(dx[:16], dx[16:])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_codes_for_a_weight(reduction):
    """Gathered codes, as from FSDP2, give the bits of the weight that they encode."""
    x, w, labels = drawn(dtype=torch.float32)
    given = {"recipe": CurrentScaling(), "reduction": reduction}
    codes = qt.quantize(w.detach(), CurrentScaling().weight)
    want = step(qt.linear_cross_entropy(x, w.detach(), labels, **given), (x,))
    for mine, other in zip(step(qt.linear_cross_entropy(x, codes, labels, **given), (x,)), want, strict=True):
        assert torch.equal(mine, other)


class Model(nn.Module):
    def __init__(self, **loss):
        super().__init__()
        self.body, self.head = nn.Linear(K, K), qt.LinearCrossEntropy(K, CLASSES, **loss)

    def forward(self, x, labels=None):
        return self.head(self.body(x).relu(), labels)


@pytest.mark.parametrize("recipe", ["CurrentScaling", "MXFP8", "NVFP4"])
def test_convert_takes_the_head(recipe):
    """It gives logits and losses by quantized products, and is saved, copied and converted again as other layers."""
    torch.manual_seed(0)
    model = qt.convert(Model(reduction="sum", **RULE), recipe)
    assert isinstance(model.head, (qt.Linear, qt.LinearCrossEntropy))
    x, _, labels = drawn(dtype=torch.float32)
    x, head = x.detach(), model.head
    if head.seed is not None:
        head.seed.copy_(torch.tensor([5, 0]))
    loss = head(x, labels)
    seed = None if head.seed is None else torch.tensor([5, 0], dtype=torch.int32)
    assert torch.equal(loss, two_calls(x, head.weight, labels, recipe, seed, reduction="sum", **RULE))
    loss.backward()
    loss = loss.detach()
    assert head.weight.grad.shape == (CLASSES, K)
    assert head(x).shape == (2, 20, CLASSES)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False), qt.convert(model, recipe)):
        if head.seed is not None:
            other.head.seed.copy_(torch.tensor([5, 0]))
        assert torch.equal(other.head(x, labels), loss)


def test_convert_leaves_heads_that_would_need_a_state():
    with pytest.warns(UserWarning, match=r"convert: 1 of 2 layers were not converted: head \(DelayedScaling"):
        model = qt.convert(Model(), DelayedScaling())
    assert type(model.head) is qt.LinearCrossEntropy


def test_under_autocast():
    torch.manual_seed(0)
    head = qt.convert(Model(), "CurrentScaling").head
    x, _, labels = drawn(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        loss = head(x, labels)
    want = two_calls(x.bfloat16(), head.weight, labels, "CurrentScaling")
    torch.testing.assert_close(loss, want)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # Dynamo's own.
def test_compiled_it_is_the_same():
    x, w, labels = drawn((40,))

    def loss(x):
        return qt.linear_cross_entropy(x, w, labels, recipe="CurrentScaling", chunk=32)

    (want,) = torch.autograd.grad(loss(x), x)
    (actual,) = torch.autograd.grad(torch.compile(loss, backend="aot_eager")(x), x)
    assert torch.equal(actual, want)


@pytest.mark.parametrize("recipe", STATEFUL.values(), ids=STATEFUL)
def test_recipes_with_a_state_are_refused(recipe):
    x, w, labels = drawn()
    with pytest.raises(ValueError, match=r"linear_cross_entropy: recipe .* is not supported: chunks"):
        qt.linear_cross_entropy(x, w, labels, recipe=recipe)


def test_what_does_not_fit():
    x, w, labels = drawn()
    with pytest.raises(ValueError, match=r"linear_cross_entropy: w \(FP8_E4M3\) is not"):
        qt.linear_cross_entropy(x, qt.quantize(w.detach(), "FP8_E4M3"), labels, recipe="MXFP8")
    with pytest.raises(TypeError, match=r"linear_cross_entropy: w \(QuantizedTensor, FP8_E4M3\) is already quantized"):
        qt.linear_cross_entropy(x, qt.quantize(w.detach(), "FP8_E4M3"), labels)
    with pytest.raises(ValueError, match="linear_cross_entropy: NVFP4 uses stochastic rounding and needs"):
        qt.linear_cross_entropy(x, w, labels, recipe="NVFP4")
    with pytest.raises(ValueError, match=r"linear_cross_entropy: w \(100, 128\) is not a whole number of 32x32"):
        qt.linear_cross_entropy(x, w[:100], labels % 100, recipe="MXFP8")
