"""Experts in one parameter on GPUs: products of a stack, the sharding law over NCCL, and capture."""

import pytest

torch = pytest.importorskip("torch")

from qshard.formats import Usage  # noqa: E402
from qshard.torch_bridge import GroupedLinear, QuantizedStack, grouped_linear, quantize  # noqa: E402
from qshard.torch_bridge._experts import products  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.formats import SQUARES, STATELESS, nearest  # noqa: E402
from support.torch_ranks import run  # noqa: E402

EXPERTS, K, N = 4, 512, 256
SIZES = torch.tensor([300, 0, 17, 640])
GATHERED = sorted(name for name, recipe in STATELESS.items() if recipe.weight in SQUARES)


@pytest.fixture(params=["ops", "no ops"])
def way(request, monkeypatch):
    """Products by ops, and by what there is without them."""
    if request.param == "no ops":
        monkeypatch.setattr(products, "grouped_runs_on", lambda *_: False)


def stack_of(fmt, usage=Usage.ROWWISE):
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(EXPERTS, N, K, generator=generator, device="cuda", dtype=torch.bfloat16)
    return QuantizedStack.of([quantize(value, fmt, usage=usage) for value in values])


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", GATHERED)
def test_products_of_a_stack_are_those_of_a_list(name, on_host):
    """In both layouts; the same codes are multiplied, in the same order of sums or another."""
    recipe, found = nearest(STATELESS[name]), []
    generator = torch.Generator("cuda").manual_seed(1)
    tokens = torch.randn(int(SIZES.sum()), K, generator=generator, device="cuda", dtype=torch.bfloat16)
    for weights, layout in (
        ([each.detach().requires_grad_() for each in stack_of(recipe.weight).unbind()], None),
        (stack_of(recipe.weight).requires_grad_(), "NK"),
        (stack_of(recipe.weight, Usage.BOTH).requires_grad_(), "NK"),
        (stack_of(recipe.weight).mT.detach().requires_grad_(), "KN"),
    ):
        x = tokens.clone().requires_grad_()
        y = grouped_linear(x, weights, SIZES if on_host else SIZES.cuda(), recipe, weight_layout=layout)
        y.float().square().mean().backward()
        grads = weights.grad if layout else torch.stack([each.grad for each in weights])
        found.append((y, x.grad, grads.mT if layout == "KN" else grads))
    for other in found[1:]:
        for got, want in zip(other, found[0], strict=True):
            # Algorithms of GEMMs may add in another order, which bfloat16 rounds.
            assert (got - want).float().norm() <= 2**-7 * want.float().norm()


@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling"])
def test_captured(name):
    """A CUDA graph of a stacked layer reads new values and sizes in a replay."""
    layer = GroupedLinear(EXPERTS, K, N, recipe=name, stacked=True, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(int(SIZES.sum()), K, device="cuda", dtype=torch.bfloat16)
    sizes = SIZES.cuda()
    with torch.no_grad():
        graph, y = capture(lambda: layer(x, sizes), warm_up=2)
        layer.experts.weight.mul_(-2)
        x.mul_(0.5)
        sizes.copy_(SIZES.flip(0))
        graph.replay()
        assert torch.equal(y, layer(x, sizes))


@pytest.mark.parametrize("world", [1, 2, 4])
def test_law(world):
    """Codes that FSDP2 gathers, by whole experts and by parts of all."""
    run(world, "dist/test_torch_stacks.py::test_gathered_codes", on="cuda")


@pytest.mark.parametrize("case", ["test_zero", "test_blocks_of_two_experts_are_apart"])
def test_slices_and_partial_blocks(case):
    run(2, f"dist/test_torch_stacks.py::{case}", on="cuda")


def test_expert_parallelism():
    run((2, 2), "dist/test_torch_stacks.py::test_expert_parallelism", on="cuda", axis=0)
