"""Passes of a layer in one call: the results of the ops one after another, wherever a GPU would make the products so.

On a CPU PyTorch makes them, so the question how is answered for it: by the op for the codes of two formats, or by that
for values. Its sums have another order than PyTorch's.
"""

import pytest
import torch

from qshard import formats, gemm_dispatch
from qshard.formats import Usage
from qshard.gemm_dispatch import Way
from qshard.recipes import MXFP4, MXFP6, MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, Recipe
from qshard.torch_bridge import Linear, linear, quantize, update_scales
from qshard.torch_bridge._nn import linear_program
from qshard.torch_bridge._quantized import gemm
from support.formats import every_recipe

STOCHASTIC = {"rounding": "stochastic"}
RECIPES = {
    "current": CurrentScaling(),
    "delayed": DelayedScaling(),
    "block": BlockScaling(),
    "mxfp8": MXFP8(),
    "mxfp6": MXFP6(),
    "mxfp4": MXFP4(),
    "nvfp4": NVFP4(),
    "mix": Recipe(weight=formats.MXFP8_E4M3, activation=formats.MXFP8_32x32, gradient=formats.NVFP4),
    "random": Recipe(
        weight=formats.NVFP4_16x16.with_options(**STOCHASTIC),
        activation=formats.NVFP4.with_options(**STOCHASTIC),
        gradient=formats.MXFP8_E5M2,
    ),
    "four over six": Recipe(
        weight=formats.NVFP4_16x16, activation=formats.NVFP4.with_options(four_over_six="mse"), gradient=formats.NVFP4
    ),
}
every_kind = pytest.mark.parametrize("kind", ["plain", "bias", "relu", "swiglu", "input", "frozen", "coded"])


@pytest.fixture
def calls(monkeypatch):
    """Ops make all products; how often steps were asked, by name."""
    counts: dict[str, int] = {}

    def way_of(a, a_usage, b, b_usage, sizes, device, dtype):
        planes = (a, a_usage), (b, b_usage)
        is_coded = gemm_dispatch.kind_of(a, b) is not None and all(
            gemm_dispatch.contracts_last(*plane) for plane in planes
        )
        if any(size % 16 for size in sizes):
            return None
        return Way(*planes, 0, None if is_coded else torch.float32)

    monkeypatch.setattr(gemm, "PLATFORM", "cpu")
    for module in (gemm, linear_program):
        monkeypatch.setattr(module, "way_of", way_of)
    for name in ("_multiply_weight", "_gradients"):
        steps = getattr(linear_program, name)

        def counted(*args, name=name, steps=steps, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return steps(*args, **kwargs)

        monkeypatch.setattr(linear_program, name, counted)
    forget()
    yield counts
    forget()


def forget():
    for kept in (linear_program._forward, linear_program.plan_backward, gemm._ways):
        kept.clear()


def run(recipe, kind, *, dtype=torch.float32, steps=2):
    """Two steps of a layer after what makes its x; y and all gradients of the last."""
    torch.manual_seed(0)
    layer = Linear(256, 128, bias=kind == "bias", recipe=recipe, dtype=dtype)
    first = torch.nn.Linear(64, 256, dtype=dtype)
    weight = torch.randn(128, 256)
    for _ in range(steps):
        values = torch.randn(2, 64, 64, dtype=dtype, requires_grad=True)
        h = first(values)
        x = {"relu": h.relu, "swiglu": lambda h=h: torch.sigmoid(h) * h.tanh()}.get(kind, lambda h=h: h)()
        if kind == "input":
            x = x.detach()
        if kind == "frozen":
            layer.weight.requires_grad_(False)
        y = _with_codes(x, weight, recipe) if kind == "coded" else layer(x)
        y.square().mean().backward()
        if recipe.stateful:
            update_scales(layer)
    found = {"y": y, "values": values.grad, "first": first.weight.grad, "weight": layer.weight.grad}
    if recipe.stateful:
        found |= {
            f"{role} {name}": buffer for role, state in layer.delayed.items() for name, buffer in state.named_buffers()
        }
    return {name: value.detach().clone() for name, value in found.items() if value is not None}


def _with_codes(x, weight, recipe):
    return linear(x, quantize(weight, recipe.weight, usage=Usage.BOTH), None, recipe, seed=5)


@every_kind
@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8"])
def test_results_are_those_of_products_by_pytorch(name, kind, request):
    recipe = RECIPES[name]
    if kind == "coded" and recipe.stateful:
        pytest.skip("codes of a weight have a scale already")
    want = run(recipe, kind)
    counts = request.getfixturevalue("calls")
    got = run(recipe, kind)
    assert_few_calls(counts, kind)
    assert got.keys() == want.keys()
    for key, value in want.items():
        # Sums of up to 256 products in float32, in two orders; then codes of what they are.
        torch.testing.assert_close(got[key], value, rtol=2e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


def assert_few_calls(counts, kind):
    assert counts.get("_gradients", 0) == 2
    assert counts.get("_multiply_weight", 0) == (0 if kind == "coded" else 2)


@every_kind
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_the_ops_one_after_another(name, kind, calls, monkeypatch):
    """For large layers, whose products use the same ops."""
    recipe = RECIPES[name]
    if kind == "coded" and (recipe.stateful or recipe.weight.stochastic):
        pytest.skip("codes of a weight have a scale already, or a seed")
    got = run(recipe, kind)
    assert_few_calls(calls, kind)
    for module in (gemm, linear_program):
        monkeypatch.setattr(module, "LARGE", 0)
    forget()
    want = run(recipe, kind)
    assert_few_calls(calls, kind)  # No more of them.
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


# Dynamo of torch 2.13 does what torch.autograd 2.13 has deprecated.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", [*(pytest.param(name, marks=pytest.mark.slow) for name in ("mxfp8", "mix")), "nvfp4"])
def test_compiled_layers_have_the_same_bits(name, calls):
    recipe = RECIPES[name]
    weight = torch.randn(128, 256, requires_grad=True)
    seed = torch.tensor([1, 2], dtype=torch.int32) if recipe.stochastic else None

    def layer(x):
        return linear(x, weight, None, recipe, seed=seed)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (32, 96):
        x, dy = torch.randn(rows, 256, requires_grad=True), torch.randn(rows, 128)
        found = [(y := one(x), *torch.autograd.grad(y, [x, weight], dy)) for one in (compiled, layer)]
        for got, want in zip(*found, strict=True):
            assert torch.equal(got, want)


@every_recipe
def test_what_tensor_cores_do_not_take_goes_as_ever(recipe, calls):
    torch.manual_seed(0)
    layer = Linear(64, 32, bias=False, recipe=recipe)
    x = torch.randn(33, 64, requires_grad=True)  # 33 is no multiple of 16.
    layer(x).sum().backward()
    assert not calls
    assert layer.weight.grad is not None


def test_large_layers_hold_no_more_than_one_product_needs(calls, monkeypatch):
    monkeypatch.setattr(linear_program, "LARGE", 2**10)
    monkeypatch.setattr(gemm, "LARGE", 2**10)
    layer = Linear(64, 32, bias=False, recipe=CurrentScaling())
    layer(torch.randn(32, 64)).sum().backward()
    assert not calls
