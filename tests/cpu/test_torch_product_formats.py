"""Formats of single products in PyTorch: planes that are cast, layers, torch.compile, FSDP2 and ZeRO."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from qshard.recipes import MXFP8, NVFP4, Recipe
from qshard.torch_bridge import (
    GroupedLinear,
    Linear,
    MoE,
    ZeroOptimizer,
    convert,
    linear,
    numerics_of,
    swiglu,
    switch_recipe,
)

TAIL = NVFP4(wgrad="bf16")


class Casts(TorchDispatchMode):
    """Records the names of ops that quantize."""

    def __init__(self):
        self.names, self.shapes = [], []
        super().__init__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "qshard" and "quantize" in func.__name__ and "dequantize" not in func.__name__:
            self.names.append(func.__name__.removesuffix(".default"))
            self.shapes.append(tuple(args[0].shape))
        return func(*args, **(kwargs or {}))


def test_experts_of_separate_weights_are_refused():
    """As experts in 3-D parameters are: before, the first call raised."""

    def moe():
        return nn.ModuleList([MoE(64, 64, num_experts=2, top_k=1, recipe="MXFP8")])

    layers = convert(nn.ModuleList([nn.Linear(64, 64)]), TAIL)
    for call in (lambda: convert(moe(), TAIL), lambda: switch_recipe(moe(), TAIL), lambda: GroupedLinear.of(layers)):
        with pytest.raises((ValueError, NotImplementedError), match="has formats of single products"):
            call()


def test_planes_that_no_product_reads_are_not_cast():
    x, w = torch.randn(32, 64, requires_grad=True), nn.Parameter(torch.randn(32, 64))
    with Casts() as casts:
        linear(x, w, None, TAIL, seed=1).sum().backward()
    # x and w rowwise; dy rowwise; w columnwise.
    assert len(casts.names) == 4
    assert not any("both" in name for name in casts.names)
    with Casts() as casts:
        linear(x, w, None, NVFP4(forward="bf16", dgrad="bf16", wgrad="bf16")).sum().backward()
    assert casts.names == []


class Branches(nn.Module):
    """Layers that receive one x, whose norm autograd does not save."""

    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(64), nn.ModuleList(nn.Linear(64, 32) for _ in range(3))

    def forward(self, x):
        x = self.norm(x)
        return sum(layer(x) for layer in self.layers)


@pytest.mark.parametrize("wgrad", ["MXFP8", "BlockScaling"])
def test_layers_share_the_codes_of_x_in_each_format(wgrad):
    recipe = MXFP8(wgrad=wgrad, activation="MXFP8_E4M3", gradient="MXFP8_E4M3")
    model, x = convert(Branches(), recipe), torch.randn(96, 64)
    with Casts() as casts:
        model(x).sum().backward()
    assert casts.shapes.count((96, 64)) == 2
    mine = [p.grad for p in model.parameters()]
    model.zero_grad()
    y = model.norm(x)  # Outside of the module, nothing is shared.
    sum(layer(y) for layer in model.layers).sum().backward()
    assert equal(mine, [p.grad for p in model.parameters()])


def model_of(recipe):
    torch.manual_seed(0)
    model = convert(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), recipe)
    for layer in (model[0], model[2]):
        if layer.seed is not None:
            layer.seed.copy_(torch.tensor([3, 0], dtype=torch.int32))
    return model


def gradients(model, run=None, columns=64):
    x = torch.randn(32, columns, generator=torch.Generator().manual_seed(1))
    (run or model)(x).square().mean().backward()
    return [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("recipe", [TAIL, NVFP4(forward="MXFP8", dgrad="bf16")], ids=str)
def test_compiled_layers_have_the_same_bits(recipe):
    model = model_of(recipe)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert equal(gradients(model, run), gradients(model_of(recipe)))


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 64)

    def forward(self, x):
        return self.down(swiglu(self.gate(x), self.up(x)))


@pytest.mark.parametrize("recipe", [MXFP8(wgrad="bf16"), MXFP8(forward="bf16", wgrad="CurrentScaling")], ids=str)
def test_x_is_recomputed_in_the_format_of_its_product(recipe):
    """SwiGLU saves the factors of x, so `down` saves nothing for x, unless hooks may replace saved tensors."""
    torch.manual_seed(0)
    model = convert(Gated(), recipe)
    recomputed, saved = gradients(model, columns=128), []
    model.zero_grad()

    def with_hooks(x):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            return model(x)

    assert equal(recomputed, gradients(model, with_hooks, columns=128))
    assert saved


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_weights_with_two_formats_are_not_gathered_as_codes(one_rank):
    recipe = NVFP4(dgrad="bf16")
    with pytest.raises(NotImplementedError, match=r"fully_shard: 0\.weight has two formats.*changes wgrad alone"):
        fully_shard(model_of(recipe))
    model = model_of(recipe)
    ZeroOptimizer(model, shard_weights=True)
    assert torch.equal(model(torch.ones(32, 64)), model_of(recipe)(torch.ones(32, 64)))


def test_statistics_are_not_supported():
    with pytest.raises(NotImplementedError, match=r"numerics_of: 0 .* has formats of single products"):
        numerics_of(model_of(TAIL))


def test_layers_that_do_not_support_them_are_left_out():
    class Head(nn.Module):
        def __init__(self):
            from qshard.torch_bridge import LinearCrossEntropy

            super().__init__()
            self.body, self.head = nn.Linear(64, 64), LinearCrossEntropy(64, 32)

    with pytest.warns(UserWarning, match="head .*has formats of single products"):
        convert(Head(), TAIL)


@pytest.mark.parametrize(
    ("recipe", "shape", "text"),
    [
        (NVFP4(wgrad="MXFP8"), (48, 48), None),
        (NVFP4(wgrad="MXFP8"), (40, 48), "16x16 blocks of NVFP4"),
        (NVFP4(dgrad="MXFP8"), (48, 48), "32x32 blocks of MXFP8"),
        (
            NVFP4(wgrad=Recipe(weight="FP8_E4M3", activation="MXFP8_32x32", gradient="MXFP8_E5M2")),
            (64, 48),
            "activations",
        ),
        (NVFP4(forward="MXFP8", dgrad="bf16"), (32, 48), "32x32 blocks of MXFP8"),
        (
            Recipe(weight="MXFP8_E4M3", activation="MXFP8_E4M3", gradient="FP8_E5M2", dgrad="bf16", wgrad="bf16"),
            (5, 32),
            None,
        ),
    ],
    ids=str,
)
def test_only_the_planes_of_products_need_whole_blocks(recipe, shape, text):
    """A layer takes the weights that its products take: wgrad reads no weight."""

    def train():
        layer = Linear(shape[1], shape[0], bias=False, recipe=recipe)
        x = torch.randn(32, shape[1], requires_grad=True)
        layer(x).sum().backward()
        return x.grad, layer.weight.grad

    if text is None:
        assert all(each.isfinite().all() for each in train())
    else:
        with pytest.raises(ValueError, match=text):
            train()
