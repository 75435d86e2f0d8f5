"""Sharding law for stacks of experts: ranks gather the bits of each expert quantized alone, for any sharding."""

import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qshard.formats import FP8_E4M3, FP8_E5M2, FP8_128x128, Usage
from qshard.recipes import Recipe
from qshard.torch_bridge import MoE, QuantizedStack, ShardedWeight, ZeroOptimizer, convert, quantize, scaling_state
from support import torch_ranks
from support.awkward import awkward_values
from support.formats import SCALINGS, SQUARES
from support.torch_models import FRONT, Wire
from support.torch_ranks import on_ranks, rarely


class Stacks(nn.Module):
    """Weights of experts as torchtitan has them."""

    def __init__(self, values):
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value.to(torch_ranks.device)))

    def forward(self, x, offs):
        return sum(self._grouped_mm(A=x, B_t=weight.transpose(-2, -1), offs=offs) for weight in self.parameters())

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


def shapes_of(fmt):
    """Return experts of whole blocks, which 2 and 4 ranks split, and experts that end within a block."""
    block = max(fmt.block or (16,))
    shapes = [(5, 3 * block, 3 * block)] if dist.get_world_size() == 3 else [(5, 2 * block, 2 * block), (2, block, 128)]
    if not fmt.scaling.whole_blocks:
        shapes.append((3, 12 * 11, 12 * 16))
    return shapes


def values_of(fmt):
    shapes = enumerate(shapes_of(fmt))
    return {
        f"w{i}": FRONT.array(awkward_values((math.prod(shape[:2]), shape[2]), i)).view(shape) for i, shape in shapes
    }


def fits(fmt, shape, axis, world):
    """FSDP2 shards axes after the first evenly, and no byte is split."""
    unit = fmt.element.codes_per_byte if axis == 2 else 1
    return axis == 0 or shape[axis] % (world * unit) == 0


def assert_bytes(got, want):
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.shape == other.shape
            assert torch.equal(*(part.contiguous().view(-1).view(torch.uint8) for part in (one, other)))


def assert_gathers_the_whole(module, values, fmt):
    module.unshard()
    assert_codes(module, values, fmt)
    module.reshard()


def assert_codes(module, values, fmt):
    for name, value in values.items():
        stack = getattr(module, name)
        assert isinstance(stack, QuantizedStack)
        for expert, whole in enumerate(value.to(torch_ranks.device)):
            want = quantize(whole, fmt).parts(Usage.ROWWISE)
            assert_bytes(stack[expert].parts(Usage.ROWWISE), want)
        each = torch.stack([quantize(whole, fmt).dequantize() for whole in value.to(torch_ranks.device)])
        assert torch.equal(stack.dequantize().nan_to_num(nan=7), each.nan_to_num(nan=7))


@on_ranks(3, (2, 2), *rarely(1, 2, 4))
def test_gathered_codes():
    """Every axis of the weights: whole experts on some ranks, none on others, or parts of all; every format, on 2."""
    world = torch_ranks.shape[-1]
    for fmt in SQUARES if torch_ranks.shape == (2,) else SCALINGS:
        for axis in range(3):
            values = {name: w for name, w in values_of(fmt).items() if fits(fmt, w.shape, axis, world)}
            model = convert(Stacks(values), Recipe(weight=fmt, activation=FP8_E4M3, gradient=FP8_E5M2))
            root = nn.Sequential(model)
            fully_shard(model, mesh=torch_ranks.mesh(), shard_placement_fn=lambda _, axis=axis: Shard(axis))
            fully_shard(root, mesh=torch_ranks.mesh())
            assert_gathers_the_whole(model, values, fmt)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(-3)
        assert_gathers_the_whole(model, {name: -3 * value for name, value in values.items()}, fmt)


@on_ranks(1, 3)
def test_zero():
    """Slices of a `ZeroOptimizer` may end within an expert, a row and a block. Both stages train alike."""
    for fmt in SCALINGS:
        values, losses = {"w": values_of(fmt)["w0"].clamp(-4, 4).nan_to_num()}, []
        for stage in (False, True):
            model = convert(Stacks(values), Recipe(weight=fmt, activation=FP8_E4M3, gradient=FP8_E5M2))
            optimizer = ZeroOptimizer(model, lr=0.1, shard_weights=stage)
            if not stage:
                assert_codes(model, values, fmt)
            x = torch.ones(8, values["w"].shape[2], device=torch_ranks.device, requires_grad=True)
            offs = torch.arange(1, len(values["w"]) + 1, dtype=torch.int32, device=x.device)
            losses.append([])
            for _ in range(3):
                loss = model(x, offs).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses[-1].append(loss.item())
        assert losses[0] == losses[1]
        assert losses[0][-1] < losses[0][0]


@pytest.mark.slow
@on_ranks(2)
@pytest.mark.parametrize("recipe", ["CurrentScaling", *rarely("BlockScaling", "MXFP8", "NVFP4")])
def test_compiled_without_a_break(recipe):
    """Also with gathered codes, the experts of a compiled block are one graph, with the bits of eager calls."""
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)  # From dynamo itself.
    torch._dynamo.reset()
    made = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = MoE(128, 128, num_experts=4, top_k=2, recipe=recipe, stacked=True).to(torch_ranks.device)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        fully_shard(model, mesh=torch_ranks.mesh())
        x = torch.randn(24, 128, device=torch_ranks.device)
        y = model(x)
        y.square().sum().backward()
        made.append([y, *(weight.grad.to_local() for weight in model.parameters())])
    assert_bytes(*made)


@on_ranks(2)
@pytest.mark.parametrize("recipe", ["CurrentScaling", *rarely("BlockScaling", "MXFP8", "NVFP4")])
def test_compiled_experts_of_a_model(recipe):
    """Codes that a model transposes before the product are intermediate results of the graph."""
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)  # From dynamo itself.
    torch._dynamo.reset()
    values, made = {"w": values_of(FP8_E4M3)["w0"].clamp(-4, 4).nan_to_num()}, []
    offs = torch.arange(1, len(values["w"]) + 1, dtype=torch.int32, device=torch_ranks.device) * 2
    for compiled in (False, True):
        torch.manual_seed(0)
        model = convert(Stacks(values), recipe)
        if compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        fully_shard(model, mesh=torch_ranks.mesh())
        x = torch.randn(2 * len(values["w"]), values["w"].shape[2], device=torch_ranks.device)
        y = model(x, offs)
        y.square().sum().backward()
        made.append([y, *(weight.grad.to_local() for weight in model.parameters())])
    assert_bytes(*made)


@on_ranks(2)
@pytest.mark.parametrize("experts", [4, 32])
def test_calls_do_not_grow_with_experts(experts):
    """A forward and a backward pass have a fixed number of launches, and one reduction."""
    for fmt in SCALINGS:
        counts = []
        for many in (2, experts):
            values = {f"w{i}": torch.randn(many, 128, 128) for i in range(2)}
            model = convert(Stacks(values), Recipe(weight=fmt, activation=FP8_E4M3, gradient=FP8_E5M2))
            fully_shard(model, mesh=torch_ranks.mesh())
            x = torch.randn(16, 128, requires_grad=True)
            offs = torch.full((many,), 8, dtype=torch.int32)
            for _ in range(2):  # The first time plans are built.
                with Wire() as wire:
                    model(x, offs).sum().backward()
            counts.append([*wire.launches, len(wire.of("allreduce"))])
        assert counts[0] == counts[1]


@on_ranks(3)
def test_blocks_of_two_experts_are_apart():
    values = {"w": torch.randn(4, 200, 128)}
    model = convert(Stacks(values), Recipe(weight=FP8_128x128, activation=FP8_E4M3, gradient=FP8_E5M2))
    assert isinstance(model.w, ShardedWeight)
    fully_shard(model, mesh=torch_ranks.mesh())
    assert_gathers_the_whole(model, values, FP8_128x128)


class Local(Stacks):
    """As torchtitan under expert parallelism: products of the local experts."""

    def forward(self, x, offs):
        weights = [weight.to_local() if isinstance(weight, DTensor) else weight for weight in self.parameters()]
        return sum(self._grouped_mm(A=x, B_t=weight.bfloat16().mT, offs=offs) for weight in weights)


@on_ranks((2, 2))
@pytest.mark.parametrize("axis", [0, 1])
def test_expert_parallelism(axis):
    """FSDP2 gathers codes of the local experts, and values of weights that are sharded within experts."""
    mesh, values = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("fsdp", "ep")), torch.randn(6, 256, 128)
    model = convert(Local({"w": values}), "BlockScaling")
    for name, weight in [*model.named_parameters()]:
        model.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh["ep"], [Shard(axis)])))
    fully_shard(model, mesh=mesh["fsdp"])
    own = values.chunk(2, axis)[mesh.get_local_rank("ep")]
    model.unshard()
    weight = model.w.to_local()
    assert isinstance(weight, QuantizedStack) == (axis == 0)
    for expert, whole in enumerate(own if axis == 0 else ()):
        want = quantize(whole.to(torch_ranks.device).contiguous(), model.recipe.weight).parts(Usage.ROWWISE)
        assert_bytes(weight[expert].parts(Usage.ROWWISE), want)
    x = torch.randn(24, 128, device=torch_ranks.device, dtype=torch.bfloat16)
    offs = torch.arange(1, len(own) + 1, device=x.device, dtype=torch.int32) * (24 // len(own))
    y = model(x, offs)
    y.square().mean().backward()
    assert y.shape == (24, own.shape[1])
    grad = model.w.grad.to_local()
    assert grad.shape == model.w.to_local().shape
    assert grad.isfinite().all()


@on_ranks(2)
def test_amaxes_of_experts_and_of_layers_are_merged_together():
    experts = MoE(64, 32, num_experts=4, top_k=2, recipe="DelayedScaling", stacked=True, shared_intermediate_size=32)
    model = experts.to(torch_ranks.device)
    own = {name: each for name, each in scaling_state(model).items() if name.endswith(".amax")}
    assert {tuple(each.shape) for each in own.values()} == {(), (4,)}
    for i, each in enumerate(own.values()):
        each.copy_(torch.arange(each.numel()).view(each.shape) + (i if dist.get_rank() == i % 2 else -1))
    merged = scaling_state(model, dist.group.WORLD)
    for i, (name, each) in enumerate(own.items()):
        want = (torch.arange(each.numel()).view(each.shape) + i).to(each)
        assert torch.equal(merged[name], want)
        assert torch.equal(each, want)
