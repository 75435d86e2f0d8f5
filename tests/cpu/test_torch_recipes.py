"""`Linear` with operands in blocks: codes as weights, seeds, checkpoints, and a training loop for every recipe."""

import copy

import pytest
import torch
from torch import nn

from qshard.formats import MXFP8_E4M3, Usage
from qshard.recipes import MXFP8, NVFP4, CurrentScaling, Role
from qshard.torch_bridge import Linear, convert, linear, quantize, update_scales
from support.formats import RECIPES, STATELESS

every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


def test_a_weight_of_vectors_that_is_codes_already():
    """Its columnwise plane is no transpose of the other."""
    x, w, dy = torch.randn(32, 64), torch.randn(32, 64), torch.randn(32, 32)
    whole, codes = w.clone().requires_grad_(), nn.Parameter(quantize(w, MXFP8_E4M3, usage=Usage.BOTH))
    recipe, gradients = MXFP8(weight=MXFP8_E4M3), []
    for weight in (whole, codes):
        tx = x.clone().requires_grad_()
        linear(tx, weight, None, recipe).backward(dy)
        gradients.append(tx.grad)
    assert torch.equal(*gradients)
    with pytest.raises(ValueError, match=r"linear: weight .MXFP8_E4M3, rowwise. has no columnwise plane"):
        linear(x.requires_grad_(), quantize(w, MXFP8_E4M3), None, recipe)


def test_seeds_of_stochastic_rounding():
    """Each forward takes the next one; the same run again gives the same bits; copies go their own way."""
    torch.manual_seed(0)
    layer, x, dy = Linear(32, 32, recipe=NVFP4()), torch.randn(16, 32), torch.randn(16, 32)

    def gradient(module):
        module.zero_grad()
        module(x).backward(dy)
        return module.weight.grad.clone()

    saved, seed = copy.deepcopy(layer.state_dict()), layer.seed.clone()
    first, second = gradient(layer), gradient(layer)
    assert not torch.equal(first, second)
    assert torch.equal(layer.seed, seed + torch.tensor([2, 0], dtype=torch.int32))
    layer.load_state_dict(saved)
    other = copy.deepcopy(layer)
    assert torch.equal(gradient(layer), first)
    assert torch.equal(gradient(other), first)
    torch.manual_seed(0)
    assert torch.equal(Linear(32, 32, recipe=NVFP4()).seed, seed)
    torch.library.opcheck(torch.ops.qshard.take_seed.default, (seed.clone(), 3))
    with pytest.raises(ValueError, match=r"linear: stochastic rounding needs a seed"):
        linear(x, layer.weight, None, NVFP4())


def test_checkpoints_of_one_recipe_load_under_another():
    state = convert(nn.Sequential(nn.Linear(32, 32)), NVFP4()).state_dict()
    for recipe in (CurrentScaling(), MXFP8()):
        other = convert(nn.Sequential(nn.Linear(32, 32)), recipe)
        other.load_state_dict(state)
        assert torch.equal(other[0].weight.shard, state["0.weight"])
        convert(nn.Sequential(nn.Linear(32, 32)), NVFP4()).load_state_dict(other.state_dict())


@every_recipe
def test_every_recipe_learns(recipe):
    """Nearly as fast as without quantization."""
    losses = {}
    for quantized in (False, True):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        module = convert(module, recipe) if quantized else module
        optimizer, x = torch.optim.AdamW(module.parameters(), lr=3e-3), torch.randn(48, 32)
        for _ in range(40):
            optimizer.zero_grad()
            loss = (module(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            update_scales(module)
        losses[quantized] = loss.item()
    assert losses[False] < 0.3
    assert losses[True] < losses[False] + (0.1 if min(recipe.format(role).element.bits for role in Role) == 4 else 0.03)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", sorted(RECIPES.keys() & STATELESS.keys()))
def test_compiled_steps_give_the_same_bits(name, backend):
    """In one graph. Seeds advance in it, and the backward pass of two microbatches has that of each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Without biases, whose gradients are sums, in another order under Inductor.
    eager = convert(nn.Sequential(nn.Linear(32, 64, False), nn.Linear(64, 32, False)), RECIPES[name])
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    for _ in range(2):
        xs, dy = torch.randn(2, 32, 32), torch.randn(32, 32)
        for module, call in ((eager, eager), (compiled, run)):
            module.zero_grad()
            ys = [call(x) for x in xs]
            for y in ys:
                y.backward(dy)
        for a, b in zip(eager.parameters(), compiled.parameters(), strict=True):
            assert torch.equal(a.grad, b.grad)
        for a, b in zip(eager.buffers(), compiled.buffers(), strict=True):
            assert torch.equal(a, b)
