"""Passes of a layer in one call: the results of the ops one after another, wherever the GPU would take them so.

On a CPU no tensor cores take codes, so the question whether they do is answered for them; the product is then the op's
own, whose sums have another order than PyTorch's.
"""

import pytest
import torch

from qshard.recipes import BlockScaling, CurrentScaling, DelayedScaling
from qshard.torch_bridge import Linear, linear, one_call, quantize, update_scales
from support.formats import every_recipe

RECIPES = {"current": CurrentScaling(), "delayed": DelayedScaling(), "block": BlockScaling()}


@pytest.fixture
def calls(monkeypatch):
    """Tensor cores take everything; how often steps were asked, by name."""
    counts: dict[str, int] = {}

    def takes(a, b, sizes, device):
        return 0 if all(size % 16 == 0 for size in sizes) else None

    monkeypatch.setattr(one_call, "workspace_of", takes)
    for name in ("_multiply_weight", "_gradients"):
        steps = getattr(one_call, name)

        def counted(*args, name=name, steps=steps, **kwargs):
            counts[name] = counts.get(name, 0) + 1
            return steps(*args, **kwargs)

        monkeypatch.setattr(one_call, name, counted)
    one_call._forward.clear()
    one_call.backward_of.clear()
    yield counts
    one_call._forward.clear()
    one_call.backward_of.clear()


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
    return linear(x, quantize(weight, recipe.weight), None, recipe)


@pytest.mark.parametrize("kind", ["plain", "bias", "relu", "swiglu", "input", "frozen", "coded"])
@pytest.mark.parametrize("name", RECIPES)
def test_results_are_those_of_the_ops_one_after_another(name, kind, request):
    recipe = RECIPES[name]
    if kind == "coded" and recipe.stateful:
        pytest.skip("codes of a weight have a scale already")
    want = run(recipe, kind)
    counts = request.getfixturevalue("calls")
    got = run(recipe, kind)
    assert counts.get("_gradients", 0) == 2
    assert counts.get("_multiply_weight", 0) == (0 if kind == "coded" else 2)
    assert got.keys() == want.keys()
    for key, value in want.items():
        # Sums of up to 256 products in float32, in two orders; then codes of what they are.
        torch.testing.assert_close(got[key], value, rtol=2e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


@every_recipe
def test_what_tensor_cores_do_not_take_goes_as_ever(recipe, calls):
    torch.manual_seed(0)
    layer = Linear(64, 32, bias=False, recipe=recipe)
    x = torch.randn(33, 64, requires_grad=True)  # 33 is no multiple of 16.
    layer(x).sum().backward()
    assert not calls
    assert layer.weight.grad is not None


def test_large_layers_hold_no_more_than_one_product_needs(calls, monkeypatch):
    monkeypatch.setattr(one_call, "LARGE", 2**10)
    layer = Linear(64, 32, bias=False, recipe=CurrentScaling())
    layer(torch.randn(32, 64)).sum().backward()
    assert not calls
