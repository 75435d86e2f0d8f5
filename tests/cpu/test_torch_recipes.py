"""`Linear` with operands in blocks: three products, seeds, and a training loop for every recipe."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from qshard import reference
from qshard.formats import FP8_E4M3, MXFP8_E4M3, MXFP8_E5M2, FP8_1x128, MXFP8_32x32, NVFP4_16x16, Usage
from qshard.formats import NVFP4 as NVFP4_1x16
from qshard.recipes import MXFP8, NVFP4, ROLE_SEEDS, BlockScaling, CurrentScaling, DelayedScaling, Recipe, Role
from qshard.torch_bridge import Linear, convert, linear, quantize, update_scales
from support.fronts import TorchFront
from support.products import DTYPES, assert_is_product, operands

FRONT = TorchFront("cpu")
BLOCK_RECIPES = {
    "blocks": BlockScaling(),
    "mxfp8": MXFP8(),
    "nvfp4": NVFP4(),
    "vectors": MXFP8(weight=MXFP8_E5M2),
    "squares": Recipe(weight=NVFP4_16x16, activation=MXFP8_32x32, gradient=FP8_1x128),
    "mix": Recipe(weight=FP8_E4M3, activation=NVFP4_1x16.with_options(rounding="stochastic"), gradient=MXFP8_E4M3),
}
SEED = 0x123456789ABCDEF


def plane_values(x, fmt, usage, rows=None, role=Role.GRADIENT):
    """What a plane holds, as the matrix `x`, to which rows of zeros are added until there are `rows`."""
    x = x.reshape(-1, x.shape[-1])
    if rows is not None:
        x = np.concatenate([x, np.zeros((rows - x.shape[0], x.shape[1]), x.dtype)])
    q = reference.quantize(x, fmt, usage, seed=SEED ^ ROLE_SEEDS[role])
    return q.dequantize(np.float32, usage=usage).astype(np.float64)


@pytest.mark.parametrize("name", BLOCK_RECIPES)
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("shape", [(32, 64), (3, 7, 32), (1, 128)], ids=str)
def test_the_three_products_in_blocks(name, dtype, shape):
    """Each operand has blocks along the axis that is contracted. The number of rows of x need not be whole blocks."""
    recipe, (x, w, dy) = BLOCK_RECIPES[name], operands(shape, 96, dtype)
    tx, tw = FRONT.array(x).requires_grad_(), FRONT.array(w).requires_grad_()
    seed = torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32]).to(torch.uint32).view(torch.int32)
    y = linear(tx, tw, None, recipe, seed=seed)
    y.backward(FRONT.array(dy))
    rows = -(-int(np.prod(shape[:-1])) // 32) * 32
    row, col = Usage.ROWWISE, Usage.COLUMNWISE
    x_row, x_col = (plane_values(x, recipe.activation, usage, rows, Role.ACTIVATION) for usage in (row, col))
    w_row, w_col = (plane_values(w, recipe.weight, usage) for usage in (row, col))
    dy_row, dy_col = (plane_values(dy, recipe.gradient, usage, rows) for usage in (row, col))
    count = int(np.prod(shape[:-1]))
    assert_is_product(FRONT.numpy(y), x_row[:count], w_row)
    assert_is_product(FRONT.numpy(tx.grad), dy_row[:count], w_col.T)
    assert_is_product(FRONT.numpy(tw.grad), dy_col.T, x_col.T)


@pytest.mark.parametrize("recipe", [BlockScaling(), MXFP8(), NVFP4()], ids=lambda r: type(r).__name__)
def test_gradients_are_near_those_without_quantization(recipe):
    """Rotations cancel, and random rounding has no bias, so the direction of each product is that of the exact one."""
    torch.manual_seed(0)
    x, w, dy = torch.randn(160, 128), torch.randn(96, 128), torch.randn(160, 96)
    exact = [x @ w.t(), dy @ w, dy.t() @ x]
    x.requires_grad_()
    w.requires_grad_()
    y = linear(x, w, None, recipe, seed=torch.tensor([1, 2], dtype=torch.int32))
    y.backward(dy)
    least = 0.97 if isinstance(recipe, NVFP4) else 0.998
    for got, want in zip((y, x.grad, w.grad), exact, strict=True):
        assert torch.cosine_similarity(got.detach().flatten(), want.flatten(), dim=0) > least


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
    with pytest.raises(ValueError, match=r"linear: seed .None. is not what stochastic rounding needs"):
        linear(x, layer.weight, None, NVFP4())


def test_checkpoints_of_one_recipe_load_under_another():
    state = convert(nn.Sequential(nn.Linear(32, 32)), NVFP4()).state_dict()
    for recipe in (CurrentScaling(), MXFP8()):
        other = convert(nn.Sequential(nn.Linear(32, 32)), recipe)
        other.load_state_dict(state)
        assert torch.equal(other[0].weight.shard, state["0.weight"])
        convert(nn.Sequential(nn.Linear(32, 32)), NVFP4()).load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    "recipe", [CurrentScaling(), DelayedScaling(), BlockScaling(), MXFP8(), NVFP4()], ids=lambda r: type(r).__name__
)
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
    assert losses[True] < losses[False] + (0.1 if isinstance(recipe, NVFP4) else 0.03)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("recipe", [BlockScaling(), MXFP8(), NVFP4()], ids=lambda r: type(r).__name__)
def test_compiled_steps_give_the_same_bits(recipe, backend):
    """In one graph. Seeds advance in it, and the backward pass of two microbatches has that of each."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Without biases, whose gradients are sums, in another order under Inductor.
    eager = convert(nn.Sequential(nn.Linear(32, 64, False), nn.Linear(64, 32, False)), recipe)
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
