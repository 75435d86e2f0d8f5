"""Experts in one parameter on GPUs: products of a stack, the sharding law over NCCL, and capture."""

import pytest

torch = pytest.importorskip("torch")

from qshard.formats import Usage  # noqa: E402
from qshard.torch_bridge import (  # noqa: E402
    GroupedLinear,
    QuantizedStack,
    grouped_linear,
    quantize,
    scaling_state,
    update_scales,
)
from qshard.torch_bridge._quantized.target_gpu import multiply_for, target_of  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.experts import GatedExperts, OpenExperts, PlainExperts  # noqa: E402
from support.formats import SQUARES, STATELESS, nearest  # noqa: E402
from support.torch_ranks import run  # noqa: E402

EXPERTS, K, N = 4, 512, 256
SIZES = torch.tensor([300, 0, 17, 640])
GATHERED = sorted(name for name, recipe in STATELESS.items() if recipe.weight in SQUARES)


@pytest.fixture(params=["ops", "no ops"])
def way(request):
    """Products by ops, and by what there is without them."""
    target = target_of(torch.device("cuda", 0))
    if request.param == "no ops":
        target = target._replace(gpu=target.gpu._replace(grouped_cublaslt=0))
    with multiply_for(target):
        yield


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


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("name", "bias"), [("DelayedScaling", False), ("DelayedScaling", True), ("MXFP8", True)])
def test_delayed_scales_and_biases(name, bias):
    """Three steps of a stacked layer and of a list: results, gradients and scales."""
    layers, made = [], {"bias": bias, "recipe": name, "device": "cuda", "dtype": torch.bfloat16}
    for stacked in (False, True):
        torch.manual_seed(0)
        layers.append(GroupedLinear(EXPERTS, K, N, stacked=stacked, **made))
    listed, stacked = layers
    listed.load_state_dict(stacked.state_dict())
    tokens = torch.randn(int(SIZES.sum()), K, device="cuda", dtype=torch.bfloat16)
    for step in range(3):
        found = []
        for layer in layers:
            x = (tokens * (1 + step)).requires_grad_()
            y = layer(x, SIZES.cuda())
            y.float().square().mean().backward()
            grads = [each.grad.clone() for each in layer.parameters()]
            if layer is listed:
                grads = [torch.stack(grads[i :: 1 + bias]) for i in range(1 + bias)]
            found.append((y.detach(), x.grad, *grads))
            layer.zero_grad()
            update_scales(layer)
        for got, want in zip(*found, strict=True):
            assert (got - want).float().norm() <= 2**-6 * want.float().norm()
    of_list, of_stack = scaling_state(listed), scaling_state(stacked)
    for key, value in of_stack.items():
        parts = [of_list[key.replace("experts.", f"experts.{expert}.")] for expert in range(EXPERTS)]
        torch.testing.assert_close(value, torch.stack(parts), rtol=2**-6, atol=0)


@pytest.mark.parametrize(
    ("name", "bias"), [("CurrentScaling", False), ("BlockScaling", False), ("CurrentScaling", True)]
)
def test_captured(name, bias):
    """A CUDA graph of a stacked layer reads new values and sizes in a replay."""
    made = {"recipe": name, "bias": bias, "device": "cuda", "dtype": torch.bfloat16}
    layer = GroupedLinear(EXPERTS, K, N, stacked=True, **made)
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


PARALLEL = "dist/test_torch_stacked_parallel.py"


@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "NVFP4"])
def test_stacks_that_ranks_share(name):
    """`MoE(stacked=True, ep_group=)` against a parameter for each expert."""
    run(2, f"{PARALLEL}::test_one_parameter_is_one_for_each_expert", on="cuda", name=name)


def test_stacks_that_ranks_share_with_biases():
    run(2, f"{PARALLEL}::test_other_recipes_biases_and_meta", on="cuda")


def test_stacks_that_ranks_share_with_fsdp2():
    run((2, 2), f"{PARALLEL}::test_fsdp2_and_checkpoints", on="cuda")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (GatedExperts, "CurrentScaling"),
        (GatedExperts, "BlockScaling"),
        (OpenExperts, "MXFP8"),
        (PlainExperts, "CurrentScaling"),
    ],
)
def test_parallelize_experts(kind, name):
    run(2, f"{PARALLEL}::test_experts_of_transformers", on="cuda", kind=kind, name=name)
