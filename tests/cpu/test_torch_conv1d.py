"""`convert` of GPT-2's `Conv1D`, and `linear(weight_layout="KN")`: the numbers of `nn.Linear`, the shapes of before."""

import copy

import pytest
import torch
from torch import nn

from qshard.recipes import CurrentScaling, Recipe
from qshard.torch_bridge import (
    ZeroOptimizer,
    convert,
    freeze,
    linear,
    numerics_of,
    prepare_modules_for_fsdp1,
    quantize,
    stream_weights,
    update_scales,
)
from support.conv1d import Conv1D, as_linears, gpt2_mlp
from support.formats import RECIPES
from support.torch_linears import value, x_of
from support.travel import WAYS

VECTORS = Recipe(weight="MXFP8_E4M3", activation="MXFP8_E4M3", gradient="MXFP8_E4M3")
"""Whose weights have planes of different numbers."""
STATELESS = {name: recipe for name, recipe in RECIPES.items() if not recipe.stateful} | {"vectors": VECTORS}


def gradients_of(call, *leaves):
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    y = call(*leaves)
    y.backward(x_of(*y.shape, seed=9).to(y.dtype))
    return [y.detach(), *(leaf.grad for leaf in leaves)]


def assert_alike(got, want):
    """The same codes: a wrong one would differ by 2^-4 of itself. The order of fp32 sums may be another."""
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


@pytest.mark.parametrize("name", STATELESS)
def test_a_weight_as_k_n_is_that_of_n_k(name):
    x, w, bias, seed = x_of(40, 256), x_of(256, 128, seed=1), x_of(1, 128, seed=2)[0], {}
    if STATELESS[name].stochastic:
        seed = {"seed": 3}
    got = gradients_of(lambda x, w, b: linear(x, w, b, STATELESS[name], weight_layout="KN", **seed), x, w, bias)
    want = gradients_of(lambda x, w, b: linear(x, w.t().contiguous(), b, STATELESS[name], **seed), x, w, bias)
    assert_alike(got, want)


@pytest.mark.parametrize("usage", ["rowwise", "both"])
def test_codes_as_k_n(usage):
    """As FSDP2 and ZeRO gather them: the rowwise plane, or both."""
    from qshard.formats import Usage

    recipe, x, w = RECIPES["MXFP8"], x_of(64, 96), x_of(96, 64, seed=1)
    codes = quantize(w, recipe.weight, usage=Usage.ROWWISE if usage == "rowwise" else Usage.BOTH)
    got = gradients_of(lambda x: linear(x, codes, None, recipe, weight_layout="KN"), x)
    assert_alike(got, gradients_of(lambda x: linear(x, w.t().contiguous(), None, recipe), x))


@pytest.mark.parametrize("name", RECIPES)
def test_a_model_trains_as_that_of_linears(name):
    torch.manual_seed(0)
    model = gpt2_mlp(128)
    names, plain = list(model.state_dict()), as_linears(model)
    kinds = [type(layer) for layer in model]
    weights = [layer.weight for layer in model[::2]]
    convert(model, RECIPES[name])
    convert(plain, RECIPES[name])
    assert [layer.weight is w for layer, w in zip(model[::2], weights, strict=True)] == [True, True]
    assert all(isinstance(layer, kind) for layer, kind in zip(model, kinds, strict=True))
    assert not isinstance(model[0], nn.Linear), "tools that look for nn.Linear take the weight for [out, in]"
    assert list(model.state_dict()) == names
    assert model.state_dict()["0.weight"].shape == (128, 256)
    for each in (model, plain):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.05)
        for layer in each[::2]:
            if layer.seed is not None:
                layer.seed.fill_(7)
        for step in range(3):
            optimizer.zero_grad()
            each(x_of(64, 128, seed=step)).square().mean().backward()
            optimizer.step()
            update_scales(each)
    for mine, theirs in zip(model[::2], plain[::2], strict=True):
        torch.testing.assert_close(value(mine.weight), value(theirs.weight).t(), rtol=1e-4, atol=1e-6)


def test_state_dicts_load_both_ways():
    plain, model = gpt2_mlp(), convert(gpt2_mlp(), "CurrentScaling")
    model.load_state_dict(plain.state_dict())
    want = model(x_of(8, 64))
    other = gpt2_mlp()
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x_of(8, 64)), plain(x_of(8, 64)), rtol=0, atol=0)
    assert torch.equal(convert(other, "CurrentScaling")(x_of(8, 64)), want)


@pytest.mark.parametrize("way", WAYS)
def test_a_converted_conv1d_travels(way):
    model = convert(gpt2_mlp(), "DelayedScaling")
    other = WAYS[way](model)
    assert [type(layer) for layer in other] == [type(layer) for layer in model]
    assert torch.equal(other(x_of(8, 64)), model(x_of(8, 64)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled_checkpointed_and_under_autocast():
    model, x = convert(gpt2_mlp(), "CurrentScaling"), x_of(16, 64)
    want = gradients_of(lambda x: model(x), x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_alike(gradients_of(lambda x: compiled(x), x), want)
    again = torch.utils.checkpoint.checkpoint
    assert_alike(gradients_of(lambda x: again(model, x, use_reentrant=False), x), want)
    with torch.autocast("cpu", torch.bfloat16):
        assert model[0](x).dtype is torch.bfloat16


def test_tools_know_it():
    """numerics_of, FSDP1's preparation, ZeroOptimizer: as they know `Linear`."""
    model = convert(gpt2_mlp(), "MXFP8")
    with numerics_of(model) as seen:
        model(x_of(32, 64)).sum().backward()
    assert {row.layer for row in seen.stats().rows} == {"0", "2"}
    prepared = prepare_modules_for_fsdp1(copy.deepcopy(model))
    assert type(prepared[0].weight) is nn.Parameter
    assert torch.equal(prepared(x_of(8, 64)), model(x_of(8, 64)))
    want = model(x_of(8, 64)).detach()
    optimizer = ZeroOptimizer(model, lr=0.1)
    assert torch.equal(model(x_of(8, 64)), want)
    model(x_of(8, 64)).sum().backward()
    optimizer.step()
    assert not torch.equal(model(x_of(8, 64)), want)


class Scaled(Conv1D):
    def forward(self, x):
        return 2 * super().forward(x)


def test_what_is_no_conv1d_of_gpt2():
    """A subclass with a forward of its own stays, and so does a convolution of that name."""
    model = nn.Sequential(nn.Linear(64, 64), Scaled(64, 64))
    with pytest.warns(UserWarning, match=r"1 \(Scaled overrides forward\)"):
        convert(model, "CurrentScaling")

    class Conv1D_(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(64, 64))

        def forward(self, x):
            return x * self.weight

    Conv1D_.__name__ = "Conv1D"
    reason = r"1 \(Conv1D has its own weight; for the weight of a product use nn\.Linear\); exclude"
    with pytest.warns(UserWarning, match=reason):
        convert(nn.Sequential(nn.Linear(64, 64), Conv1D_()), "CurrentScaling")


def test_errors_name_the_weight_as_it_is_multiplied():
    with pytest.raises(ValueError, match=r"^convert: weight.T \(48, 64\) is not a whole number of 32x32 blocks"):
        convert(Conv1D(48, 64), "MXFP8")
    w = x_of(64, 32)
    with pytest.raises(ValueError, match=r"weight \(64, 32\) does not fit x \(4, 32\); pass weight as \[K, N\] and x"):
        linear(x_of(4, 32), w, None, CurrentScaling(), weight_layout="KN")
    with pytest.raises(ValueError, match=r"weight_layout \('TN'\) is not a layout; pass 'NK' for weight \[N, K\]"):
        linear(x_of(4, 32), w, None, CurrentScaling(), weight_layout="TN")


def test_streams_say_that_weights_are_sent_as_values():
    model = convert(nn.Sequential(Conv1D(64, 64)), "MXFP8")
    refusal = r"no quantized weight; 0.weight is \[K, N\], of Conv1D, which engines do not take as codes"
    with pytest.raises(ValueError, match=refusal):
        [*stream_weights(model, "qshard")]
    both = convert(nn.Sequential(Conv1D(64, 64), nn.Linear(64, 64)), "MXFP8")
    with pytest.warns(
        UserWarning, match=r"stream_weights: 0.weight \(\[K, N\], of Conv1D\) are sent as values"
    ) as warned:
        stream_weights(both, "qshard")
    assert warned[0].filename == __file__
    codes = dict(stream_weights(freeze(both), "qshard"))  # Without a warning: codes are sent.
    assert codes["0.weight.rowwise.data"].shape == codes["1.weight.rowwise.data"].shape
