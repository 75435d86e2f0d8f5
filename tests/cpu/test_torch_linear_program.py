"""Passes of a layer in one call: the results of the ops one after another, dispatched as on a GPU and run on the CPU.

Sums of the ops have another order than PyTorch's.
"""

from contextlib import nullcontext

import pytest
import torch

from qshard import formats
from qshard.formats import Usage
from qshard.gemm_dispatch import Gpu
from qshard.recipes import MXFP4, MXFP6, MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, Recipe
from qshard.torch_bridge import Linear, linear, quantize, update_scales
from qshard.torch_bridge._ops.programs import Steps
from qshard.torch_bridge._quantized.target_gpu import Target, multiply_for
from support.formats import every_recipe
from support.observe import calls_of
from support.torch_graphs import compile_and_keep

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


# Each multiplies the codes of other formats, and values of the rest.
HOPPER, BLACKWELL = Gpu((9, 0), 130800), Gpu((10, 0), 130800)
every_gpu = pytest.mark.parametrize("gpu", [HOPPER, BLACKWELL], ids=["Hopper", "Blackwell"])


STEPS = 2


def run(recipe, kind, *, dtype=torch.float32):
    """Steps of a layer after what makes its x; y and all gradients of the last."""
    torch.manual_seed(0)
    layer = Linear(256, 128, bias=kind == "bias", recipe=recipe, dtype=dtype)
    first = torch.nn.Linear(64, 256, dtype=dtype)
    weight = torch.randn(128, 256)
    for _ in range(STEPS):
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


def run_and_count(recipe, kind):
    with calls_of(Steps.__call__) as programs:
        made = run(recipe, kind)
    return made, len(programs)


def _with_codes(x, weight, recipe):
    return linear(x, quantize(weight, recipe.weight, usage=Usage.BOTH), None, recipe, seed=5)


@pytest.mark.each_value
@every_gpu
@every_kind
@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8"])
def test_results_are_those_of_products_by_pytorch(name, kind, gpu):
    recipe = RECIPES[name]
    if kind == "coded" and recipe.stateful:
        pytest.skip("codes of a weight have a scale already")
    want = run(recipe, kind)
    with multiply_for(Target(gpu)):
        got = run(recipe, kind)
    assert got.keys() == want.keys()
    for key, value in want.items():
        # Sums of up to 256 products in float32, in two orders; then codes of what they are.
        torch.testing.assert_close(got[key], value, rtol=2e-3, atol=2e-4, msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.each_value
@every_gpu
@every_kind
@pytest.mark.parametrize("name", RECIPES)
def test_bits_are_those_of_the_ops_one_after_another(name, kind, gpu):
    """Programs quantize x, compute y, and compute both gradients; codes of a weight are transposed by one more."""
    recipe = RECIPES[name]
    if kind == "coded" and (recipe.stateful or recipe.weight.stochastic):
        pytest.skip("codes of a weight have a scale already, or a seed")
    made = []
    for large in (Target(gpu).large, 0):
        with multiply_for(Target(gpu, large)):
            made.append(run_and_count(recipe, kind))
    (got, programs), (want, programs_op_by_op) = made
    assert programs == STEPS * (4 if kind == "coded" else 3) < programs_op_by_op
    assert got.keys() == want.keys()
    for key, value in want.items():
        assert torch.equal(got[key], value), key


COMPILED = [("current", HOPPER), ("block", HOPPER), ("mxfp8", HOPPER), ("mxfp8", BLACKWELL), ("mix", BLACKWELL)]


# Dynamo of torch 2.13 does what torch.autograd 2.13 has deprecated.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    ("name", "gpu"), [("nvfp4", BLACKWELL), *(pytest.param(*case, marks=pytest.mark.slow) for case in COMPILED)]
)
def test_compiled_layers_have_the_same_bits(name, gpu):
    recipe = RECIPES[name]
    weight = torch.randn(128, 256, requires_grad=True)
    seed = torch.tensor([1, 2], dtype=torch.int32) if recipe.stochastic else None

    def layer(x):
        return linear(x, weight, None, recipe, seed=seed)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    with multiply_for(Target(gpu)):
        for rows in (32, 96):
            x, dy = torch.randn(rows, 256, requires_grad=True), torch.randn(rows, 128)
            found = [(y := one(x), *torch.autograd.grad(y, [x, weight], dy)) for one in (compiled, layer)]
            for got, want in zip(*found, strict=True):
                assert torch.equal(got, want)
    torch._dynamo.reset()


def run_compiled(layer, x, target):
    """Return y, all gradients, and the ops of qshard in the forward and in the backward graph."""
    torch._dynamo.reset()
    with multiply_for(target):
        compiled, graphs = compile_and_keep(layer, dynamic=False)
        y = compiled(x)
        y.square().mean().backward()
    found = [y.detach(), *(p.grad for p in (*layer.parameters(), x) if p.grad is not None)]
    layer.zero_grad()
    x.grad = None
    names = ([str(node.target) for node in graph.graph.nodes] for graph in graphs)
    return found, [[name.split(".")[1] for name in each if name.startswith("qshard.")] for each in names]


STATIC = {
    **{name: (RECIPES[name], {}) for name in ("current", "block", "mxfp8", "nvfp4", "mix", "random")},
    "frozen": (CurrentScaling(), {"frozen": True}),
    "input": (CurrentScaling(), {"needs_x": False}),
}


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("current", "random") else pytest.mark.slow) for name in STATIC]
)
def test_a_compiled_small_layer_takes_one_op_for_its_product_and_one_for_its_gradients(name):
    recipe, options = STATIC[name]

    def made(target):
        torch.manual_seed(0)
        layer = Linear(256, 128, recipe=recipe, dtype=torch.bfloat16)
        layer.weight.requires_grad_(not options.get("frozen"))
        x = torch.randn(64, 256, dtype=torch.bfloat16, requires_grad=options.get("needs_x", True))
        return run_compiled(layer, x, target)

    (got, (forward, backward)), (want, op_by_op) = made(Target(HOPPER)), made(Target(HOPPER, large=0))
    assert forward.count("run_program") == backward.count("run_program") == 1
    # The forward pass quantizes x by ops of its own: the compiler merges those of layers with the same x.
    assert not any(op.startswith(("gemm", "transpose")) for op in (*forward, *backward))
    assert not any("run_program" in ops for ops in op_by_op)
    assert sum(map(len, op_by_op)) > len(forward) + len(backward)
    assert len(got) == len(want) >= 3
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


class OwnRecipe(CurrentScaling):
    """A recipe class of the user's: a text cannot stand for it."""


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", [OwnRecipe(), DelayedScaling()], ids=["own class", "delayed"])
def test_compiled_layers_that_no_text_describes_run_op_by_op(recipe):
    layer = Linear(64, 32, bias=False, recipe=recipe, dtype=torch.bfloat16)
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    (_, dw, _), ops = run_compiled(layer, x, Target(HOPPER))
    assert not any("run_program" in each for each in ops)
    with multiply_for(Target(HOPPER)):
        layer(x).square().mean().backward()
    assert torch.equal(dw, layer.weight.grad)


@every_recipe
def test_rows_that_tensor_cores_do_not_take(recipe):
    """33 is no multiple of 16: PyTorch multiplies per-tensor codes, and an op the values of the others."""
    found = []
    for context in (nullcontext(), multiply_for(Target(HOPPER))):
        torch.manual_seed(0)
        layer = Linear(64, 32, bias=False, recipe=recipe)
        x = torch.randn(33, 64, requires_grad=True)
        with context:
            y = layer(x)
            y.backward(torch.randn(33, 32))
        found.append((y.detach(), x.grad, layer.weight.grad))
    for got, want in zip(*found, strict=True):
        assert (got - want).norm() <= 2**-7 * want.norm()  # Two operands of NVFP4 are rounded to bfloat16.


SIZES = {"32 rows": (32, Target(HOPPER), True), "33 rows": (33, Target(HOPPER), False)}
SIZES["large"] = (32, Target(HOPPER, large=2**10), False)


@pytest.mark.parametrize(("rows", "target", "is_one_call"), SIZES.values(), ids=SIZES)
def test_other_sizes_hold_no_more_than_one_product_needs(rows, target, is_one_call):
    layer, x = Linear(64, 32, bias=False, recipe=CurrentScaling()), torch.randn(rows, 64, requires_grad=True)
    with multiply_for(target), calls_of(Steps.__call__) as programs:
        layer(x).sum().backward()
    assert (len(programs) == 3) is is_one_call
