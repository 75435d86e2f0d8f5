"""Experts in PyTorch on Blackwell: the ops that multiply codes of MXFP8 and NVFP4, run on the CPU in place of the GPU.

Operands are exact, as in `test_torch_grouped.py`. Sums of NVFP4 are rounded, because global scales are not powers of
two.
"""

import copy

import pytest
import torch

from qshard.formats import Usage
from qshard.gemm_dispatch import Gpu
from qshard.recipes import Recipe
from qshard.torch_bridge import GroupedLinear, grouped_linear, quantize
from qshard.torch_bridge._experts.tiles import GroupedRows, tile_rows_of, tiles_of
from qshard.torch_bridge._quantized.target_gpu import Target, multiply_for
from support.formats import RECIPES
from support.torch_models import Wire

SIZES = (40, 0, 3, 129, 0, 17)
E, M, N, K = len(SIZES), 200, 64, 96
ENDS = torch.tensor(SIZES).cumsum(0).tolist()
BLACKWELL = Target(Gpu((10, 0), 130802, 130802))
PRODUCTS = {
    "MXFP8": {"gemm_grouped_block": 2, "gemm_grouped_mxfp8_tn": 1},
    "NVFP4": {"gemm_grouped_nvfp4": 2, "gemm_grouped_nvfp4_k": 1},
}
every_recipe = pytest.mark.parametrize("name", PRODUCTS)


@pytest.fixture
def blackwell():
    with multiply_for(BLACKWELL):
        yield


def exact(*shape, seed=0):
    """Signed numbers of {4, 5, 6, 7}."""
    generator = torch.Generator().manual_seed(seed)
    signs, numbers = (torch.randint(*range_, shape, generator=generator) for range_ in ((0, 2), (4, 8)))
    return ((2 * signs - 1) * numbers).float()


X, W, DY = exact(M, K), exact(E, N, K, seed=1), exact(M, N, seed=2)


def step(weights, recipe, groups=None, call=grouped_linear):
    """y, and the gradients of x and of each weight."""
    x, groups = X.clone().requires_grad_(), torch.tensor(SIZES) if groups is None else groups
    how = {"weight_layout": "NK"} if len(weights) == 1 else {}
    seeds = torch.arange(2 * E, dtype=torch.int32).view(E, 2)
    given = weights[0] if how else weights
    y = call(x, given, groups, recipe, seeds=seeds, **how)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], DY)]


def values(stacked=False):
    return [W.clone().requires_grad_()] if stacked else [one.clone().requires_grad_() for one in W]


def products(wire):
    """Count the products that ran."""
    names = [name.removeprefix("qshard.").removesuffix(".default") for name in wire.launches]
    return {name: names.count(name) for name in names if "gemm" in name or "mm" in name.split(".")[-1]}


def assert_near(got, want, name):
    for a, b in zip(got, want, strict=True):
        if name == "NVFP4":
            assert torch.allclose(a, b, rtol=1e-6, atol=1e-6 * b.abs().max().item())
        else:
            assert torch.equal(a, b)


@pytest.mark.parametrize("stacked", [False, True], ids=["list", "stacked"])
@every_recipe
def test_a_step_multiplies_codes(name, stacked):
    """Three products, one op each, with the results of values on the CPU, also if the host does not know the sizes."""
    want = step(values(stacked), name)
    with multiply_for(BLACKWELL):
        with Wire() as wire:
            got = step(values(stacked), name)
        assert products(wire) == PRODUCTS[name]
        rows, _ = tiles_of(tile_rows_of(X.device, RECIPES[name]), M, torch.tensor(SIZES))
        again = step(values(stacked), name, GroupedRows(rows, rows))
    assert_near(got, want, name)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    assert not got[0][ENDS[-1] :].any()


@every_recipe
def test_a_cpu_multiplies_values(name):
    with Wire() as wire:
        step(values(), name)
    assert products(wire) == {f"gemm_grouped_values_{layout}": 1 for layout in ("nt", "nn", "tn")}


@every_recipe
def test_older_libraries_multiply_no_codes_in_groups(name):
    with multiply_for(Target(Gpu((10, 0), 130802, 130301))), Wire() as wire:
        step(values(), name)
    assert not set(products(wire)) & set(PRODUCTS[name])


@pytest.mark.parametrize("usage", [Usage.ROWWISE, Usage.BOTH], ids=str)
@every_recipe
def test_gathered_codes(name, usage, blackwell):
    """Codes in separate memory give the bits of values. Backward transposes the plane that is not there."""
    weights = [quantize(one, RECIPES[name].weight, usage=usage).requires_grad_() for one in W]
    with Wire() as wire:
        got = step(weights, name)
    want = {"MXFP8": {"gemm_grouped_block_list": 1 + (usage is Usage.BOTH), "gemm_grouped_mxfp8_tn": 1}}
    if usage is Usage.ROWWISE:
        want["MXFP8"]["gemm_grouped_block"] = 1
    assert products(wire) == want.get(name, PRODUCTS[name])
    assert all(torch.equal(a, b) for a, b in zip(got, step(values(), name), strict=True))


def test_blocks_along_one_axis(blackwell):
    """A weight in 1x32 has no plane of codes that backward can contract: its values are multiplied."""
    recipe = Recipe(weight="MXFP8_E4M3", activation="MXFP8_E4M3", gradient="MXFP8_E4M3")
    with Wire() as wire:
        got = step(values(), recipe)
    assert {name: n for name, n in products(wire).items() if "grouped" in name} == {
        "gemm_grouped_block": 1,
        "gemm_grouped_mxfp8_tn": 1,
    }
    assert_near(got, step(values(), "MXFP8"), "MXFP8")


def test_rows_of_tiles():
    """Rows of 4-bit codes that are contracted begin at 16 bytes, so a tile has 32."""
    units = [tile_rows_of(X.device, RECIPES[name]) for name in PRODUCTS]
    with multiply_for(BLACKWELL):
        assert [tile_rows_of(X.device, RECIPES[name]) for name in PRODUCTS] == [32, 32]
    with multiply_for(Target(Gpu((9, 0), 130802, 130802))):
        assert [tile_rows_of(X.device, RECIPES[name]) for name in PRODUCTS] == units == [32, 16]


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@every_recipe
def test_compiled_without_a_break(name, blackwell):
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = GroupedLinear(E, K, N, recipe=name)
    eager = copy.deepcopy(layer)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = []
    for call in (eager, compiled):
        x = X.clone().requires_grad_()
        y = call(x, torch.tensor(SIZES))
        y.backward(DY)
        results.append([y, x.grad])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
