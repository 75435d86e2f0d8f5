"""Experts in one parameter that ranks share: against a parameter for each expert, under FSDP2 and in checkpoints."""

import tempfile
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from qshard.torch_bridge import (
    GroupedLinear,
    MoE,
    QuantizedStack,
    convert,
    load_scaling_state,
    parallelize_experts,
    scaling_state,
    update_scales,
)
from support import torch_ranks
from support.experts import GatedExperts, OpenExperts, PlainExperts
from support.torch_ranks import on_ranks

WIDTH, HIDDEN, EXPERTS = 128, 128, 8


def layer_of(recipe, stacked, ep_group=None):
    torch.manual_seed(0)
    options = {"num_experts": EXPERTS, "top_k": 2, "stacked": stacked, "device": torch_ranks.device}
    return MoE(WIDTH, HIDDEN, recipe=recipe, ep_group=ep_group, **options)


def tokens(step=0):
    """Return tokens of this rank: ranks have different numbers."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(30 + 23 * rank, WIDTH, generator=generator).to(torch_ranks.device) * (1 + 3 * rank)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def tensors_of(model, get=lambda parameter: parameter):
    """Return whole tensors by name, with those of the local experts stacked."""
    each = {}
    for name, parameter in model.named_parameters():
        layer, _, rest = name.partition(".experts.")
        key = f"{layer}.experts.{rest.split('.')[-1]}" if rest else name
        each.setdefault(key, []).append(whole(get(parameter)).detach())
    return {key: torch.stack(values) if len(values) > 1 else values[0] for key, values in each.items()}


def own(values, group):
    """Return the experts of this rank."""
    return values.chunk(group.size())[group.rank()] if len(values) == EXPERTS and values.ndim == 3 else values


def steps(model, optimizer, group):
    found = []
    for step in range(3):
        y = model(tokens(step))
        y.square().mean().backward()
        grads = tensors_of(model, lambda parameter: parameter.grad)
        found.append([y.detach().clone(), *(own(grads[key], group) for key in sorted(grads))])
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
    return found


def assert_equal(one, other):
    """The same bits. On GPUs products add in another order: close, after steps that learn from them."""
    for step in zip(one, other, strict=True):
        for a, b in zip(*step, strict=True):
            if torch_ranks.device == "cpu":
                assert torch.equal(a, b)
            else:
                assert (a - b).norm() <= 2**-4 * b.norm()


@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "NVFP4"])
def test_one_parameter_is_one_for_each_expert(name):
    """Outputs, gradients and steps, from the state dict and the seeds of one device with a parameter each."""
    group, found = dist.group.WORLD, []
    one = layer_of(name, False)
    for stacked in (False, True):
        model = layer_of(name, stacked, group)
        model.load_state_dict(one.state_dict(), strict=stacked)
        if name == "NVFP4":
            state = scaling_state(one)
            load_scaling_state(model, state if stacked else {key: state[key] for key in scaling_state(model)})
        found.append(steps(model, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False), group))
    assert_equal(*found)
    if name == "NVFP4":  # Checkpoints of ranks together have the seeds of all experts.
        seeds = scaling_state(layer_of(name, True, group))["w2.experts.seed"]
        assert torch.equal(seeds.full_tensor(), scaling_state(layer_of(name, True))["w2.experts.seed"])


def wrapped(name, stacked, mesh):
    model = layer_of(name, stacked, mesh["ep"])
    for experts in (model.w13, model.w2):
        fully_shard(experts, mesh=mesh["dp"])
        experts.set_gradient_divide_factor(dist.get_world_size())
        experts.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums.
    return fully_shard(model, mesh=init_device_mesh(torch_ranks.device, (dist.get_world_size(),)))


@on_ranks((2, 2))
def test_fsdp2_and_checkpoints():
    """FSDP2 gathers the local experts as codes. Any number of ranks loads parameters and states of the optimizer."""
    mesh, found = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("dp", "ep")), []
    for stacked in (False, True):
        model = wrapped("BlockScaling", stacked, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found.append(steps(model, optimizer, mesh["ep"].get_group()))
    assert_equal(*found)
    model.w13.unshard()
    assert isinstance(model.w13.experts.weight.to_local(), QuantizedStack)
    model.w13.reshard()
    assert model.w13.experts.weight.shape == (EXPERTS, 2 * HIDDEN, WIDTH)

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    saved = get_state_dict(model, optimizer)
    dcp.save(dict(enumerate(saved)), checkpoint_id=folder[0])
    one = layer_of("BlockScaling", True)
    own = torch.optim.AdamW(one.parameters())
    loaded = get_state_dict(one, own)
    dcp.load(dict(enumerate(loaded)), checkpoint_id=folder[0])
    set_state_dict(one, own, model_state_dict=loaded[0], optim_state_dict=loaded[1])
    for key, value in tensors_of(model).items():
        assert torch.equal(value, one.get_parameter(key))
        state = optimizer.state[model.get_parameter(key)]["exp_avg"]
        assert torch.equal(whole(state), own.state[one.get_parameter(key)]["exp_avg"])
    listed = layer_of("BlockScaling", False)
    listed.load_state_dict(one.state_dict())
    for plain in (one, listed):  # Whole tensors load into shards, in both forms.
        other = wrapped("BlockScaling", True, mesh)
        other.load_state_dict({key: value for key, value in plain.state_dict().items() if "router" not in key}, False)
        for key in ("w13.experts.weight", "w2.experts.weight"):
            assert torch.equal(other.get_parameter(key).full_tensor(), one.get_parameter(key))


@on_ranks(2)
def test_other_recipes_biases_and_meta():
    """`convert` changes the recipe and keeps the parameters, biases are shards too, and models on meta get values."""
    model = layer_of("CurrentScaling", True, dist.group.WORLD)
    before = [*model.parameters()]
    for name in ("NVFP4", "BlockScaling"):
        convert(model, name)
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
        model(tokens()).square().mean().backward()
    with pytest.warns(UserWarning, match="DelayedScaling has no scales by expert"):
        convert(torch.nn.ModuleList([model, torch.nn.Linear(32, 32)]), "DelayedScaling")
    rank, sizes = dist.get_rank(), torch.tensor([5, 9, 0, 3])
    x = torch.randn(EXPERTS * 5, WIDTH).to(torch_ranks.device)
    layers, options = [], {"bias": True, "recipe": "MXFP8", "stacked": True, "device": torch_ranks.device}
    for ep_group in (None, dist.group.WORLD):
        torch.manual_seed(0)
        layers.append(GroupedLinear(EXPERTS, WIDTH, HIDDEN, ep_group=ep_group, **options))
    alone, layer = layers
    rows, found = torch.split(alone(x, sizes.repeat(2)), 17)[rank], layer(x[17 * rank : 17 * (rank + 1)], sizes)
    torch.testing.assert_close(found, rows, rtol=0, atol=0 if torch_ranks.device == "cpu" else 2**-6)
    assert layer.experts.bias.placements == (Shard(0),)
    with torch.device("meta"):
        shared = {"num_experts": EXPERTS, "top_k": 2, "stacked": True, "ep_group": dist.group.WORLD}
        empty = MoE(WIDTH, HIDDEN, recipe="CurrentScaling", **shared)
    empty.to_empty(device=torch_ranks.device)
    one = layer_of("CurrentScaling", True).w13.experts
    for experts in (empty.w13.experts, one):
        torch.manual_seed(1)
        experts.reset_parameters()
    values = empty.w13.experts.weight.full_tensor()
    assert torch.equal(values, one.weight)


@on_ranks(2)
def test_errors():
    group = dist.group.WORLD
    with pytest.raises(ValueError, match="ep_group has 2 ranks, which do not divide num_experts"):
        GroupedLinear(3, WIDTH, HIDDEN, recipe="MXFP8", ep_group=group)
    for stacked in (False, True):
        with pytest.raises(NotImplementedError, match="DelayedScaling is not supported with ep_group"):
            layer_of("DelayedScaling", stacked, group)
    model = layer_of("CurrentScaling", False, group)
    convert(model, "DelayedScaling")
    with pytest.raises(NotImplementedError, match="DelayedScaling is not supported with ep_group"):
        model(tokens())
    with pytest.raises(TypeError, match=r"GroupedLinear: ep_group .* is not a ProcessGroup"):
        GroupedLinear(4, WIDTH, HIDDEN, recipe="MXFP8", ep_group=range(2))
    many = layer_of("CurrentScaling", True, group)
    experts = [name for name, _ in many.named_parameters() if ".experts." in name]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(many, experts)
    DistributedDataParallel(many)(tokens()).square().mean().backward()


@on_ranks(2)
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (GatedExperts, "CurrentScaling"),
        (GatedExperts, "NVFP4"),
        (OpenExperts, "MXFP8"),
        (PlainExperts, "CurrentScaling"),
    ],
)
def test_experts_of_transformers(kind, name):
    """`parallelize_experts`: outputs and gradients of one device that has all experts and the tokens of all ranks.

    A norm after the experts is on all ranks, and so is its gradient, over the rows of all experts.
    """
    rank, found = dist.get_rank(), []
    config = SimpleNamespace(sizes=(EXPERTS, WIDTH, HIDDEN), _experts_implementation="eager")
    generator = torch.Generator().manual_seed(3)
    x, dy = (torch.randn(2, 40, WIDTH, generator=generator) for _ in range(2))
    indices = torch.randint(EXPERTS - 1, (2, 40, 2), generator=generator)  # The last expert has no tokens.
    weights = torch.rand(2, 40, 2, generator=generator)
    for shared in (False, True):
        torch.manual_seed(0)
        model = convert(torch.nn.Sequential(kind(config)).to(torch_ranks.device), name)
        if model[0].seed is not None:
            model[0].seed.zero_()
        if shared:
            assert parallelize_experts(model, dist.group.WORLD) is model
        given = [each[rank] if shared else each.flatten(0, 1) for each in (x, indices, weights, dy)]
        leaf = given[0].to(torch_ranks.device).requires_grad_()
        y = model[0](leaf, *(each.to(leaf.device) for each in given[1:3]))
        y.backward(given[3].to(y.device))
        own = [y, leaf.grad] if shared else [each.view(2, 40, WIDTH)[rank] for each in (y, leaf.grad)]
        found.append([*own, *(whole(p.grad) for p in model.parameters())])
    for a, b in zip(*found, strict=True):
        if name != "NVFP4" and torch_ranks.device == "cpu":  # With NVFP4 each rank draws other random bits.
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert a.shape == b.shape
        assert (a - b).norm() < 0.3 * b.norm()
    assert {tuple(p.shape) for p in model.parameters()} == {tuple(p.shape) for p in kind(config).parameters()}
    with pytest.raises(ValueError, match=r"parallelize_experts: 0 \(DTensor\) is sharded already; call it once"):
        parallelize_experts(model, dist.group.WORLD)
    with pytest.raises(ValueError, match="has no converted experts of transformers; call convert first"):
        parallelize_experts(torch.nn.Linear(2, 2), dist.group.WORLD)
