"""Weights gathered without FSDP2, parametrized as in SimpleFSDP: codes are gathered."""

import copy
import functools
import warnings
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qshard import reference
from qshard.recipes import MXFP8, NVFP4, CurrentScaling, DelayedScaling
from qshard.torch_bridge import (
    GroupedLinear,
    convert,
    gathered_weight,
    is_converted,
    linear,
    quantized_state_dict,
    stream_weights,
    update_scales,
)
from support import torch_ranks
from support.awkward import TAME, awkward_values
from support.formats import GATHERED
from support.fronts import TorchFront, assert_plane
from support.pairs import turns
from support.torch_models import BLOCK_SIZES, batch, linears, model_of, shard, side_by_side
from support.torch_ranks import on_ranks

FRONT = TorchFront("cpu")


def placements():
    return (Replicate(),) * (len(torch_ranks.shape) - 1) + (Shard(0),)


def replicated(parameter):
    """Replicate a parameter as SimpleFSDP does."""
    axes = parameter.device_mesh.ndim
    return parameter.redistribute(placements=[Replicate()] * axes).to_local(grad_placements=[Partial()] * axes)


def parametrized(model, gather, mesh=None):
    """Turn parameters into DTensors and attributes into `gather`'s results, as torchtitan's own code does."""
    mesh = mesh or torch_ranks.mesh()
    for module in list(model.modules()):
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        if not names:
            continue
        for name in names:
            parameter = distribute_tensor(module._parameters[name], mesh, placements())
            module.register_parameter(name, nn.Parameter(parameter))
        made = {name: property(lambda self, n=name: gather(self._parameters[n])) for name in names}
        module.__class__ = type(f"Simple{type(module).__name__}", (type(module),), made)
    return model


def as_codes(parameter):
    return gathered_weight(parameter) if is_converted(parameter) else replicated(parameter)


VALUES = [awkward_values((rows, 64), rows, kinds=TAME) for rows in (128, 96, 32)]


def law_of(weight, value, fmt):
    q = gathered_weight(weight)
    assert (tuple(q.shape), q.dtype) == (value.shape, weight.dtype)
    assert_plane(FRONT, q.rowwise, reference.quantize(value, fmt).rowwise, f"weight of {fmt}")


@turns(1, name=[name for name in GATHERED if "Delayed" not in name], world=[1, 3, (2, 2)])
@on_ranks()
def test_what_is_gathered_is_the_whole_quantized(name):
    """Also where shard boundaries split blocks, and with fewer rows than ranks."""
    recipe = GATHERED[name]
    model = parametrized(convert(side_by_side(VALUES), recipe), as_codes)
    for layer, value in zip(model, VALUES, strict=True):
        law_of(layer._parameters["weight"], value, recipe.weight)


def run_steps(model, steps=2):
    """Train and return outputs and gradients, and the weights after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # Replicas get the same batch; otherwise the order of gradient sums would show.
    rank = dist.get_rank() if len(torch_ranks.shape) == 1 else 0
    seen = []
    for number in range(steps):
        y = model(batch(number + 10 * rank, BLOCK_SIZES[0]))
        y.square().sum().backward()
        seen += [y.detach(), *(p.grad.full_tensor() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        update_scales(model)
        seen += [p.full_tensor().detach().clone() for p in model.parameters()]
    return seen


RECIPES = {"fp8": CurrentScaling(), "delayed": DelayedScaling(), "nvfp4": NVFP4()}


@pytest.mark.each_value
@on_ranks(2, 3, (2, 2))
@pytest.mark.parametrize("name", ["fp8", "delayed"])
def test_training_is_that_of_weights_gathered_in_high_precision(name):
    """Outputs, gradients and weights, bit for bit: the same codes and the same reductions. Gathering values warns."""
    training_is_the_same(name)


@on_ranks(3)
def test_training_with_random_bits():
    """Random bits differ on each rank, so replicas would expose the order of sums: no HSDP here."""
    training_is_the_same("nvfp4")


def training_is_the_same(name):
    seen = []
    for gather in (as_codes, replicated):
        model = parametrized(convert(model_of(True, sizes=BLOCK_SIZES), RECIPES[name]), gather)
        torch.manual_seed(1)
        for layer in linears(model):
            layer._reset_state()  # The same seeds.
        if gather is as_codes:
            seen.append(run_steps(model))
        else:
            with pytest.warns(RuntimeWarning, match=r"Linear: weight .* was gathered in float32, 4 bytes"):
                seen.append(run_steps(model))
    for a, b in zip(*seen, strict=True):
        assert torch.equal(a, b)


class Collectives(TorchDispatchMode):
    """Count the bytes that collectives take on this rank, by name and dtype."""

    def __init__(self):
        super().__init__()
        self.bytes = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            name = str(func).removeprefix("c10d.").split(".")[0].strip("_")
            given = args["allreduce" not in name]  # Other collectives have their outputs before it.
            for tensor in given if isinstance(given, (list, tuple)) else [given]:
                self.bytes[name, tensor.dtype] += tensor.numel() * tensor.itemsize
        return func(*args, **(kwargs or {}))


@pytest.mark.each_value
@on_ranks(2, 3)
@pytest.mark.parametrize("name", RECIPES)
def test_codes_travel(name):
    """Gradients are reduced in the requested dtype."""
    for reduce_dtype in (None, torch.bfloat16):
        gather = functools.partial(gathered_weight, reduce_dtype=reduce_dtype)
        model = parametrized(convert(model_of(sizes=BLOCK_SIZES), RECIPES[name]), gather)
        with Collectives() as wire:
            model(batch(0, BLOCK_SIZES[0])).sum().backward()
        ranks = dist.get_world_size()
        rows = [-(-rows // ranks) for rows in BLOCK_SIZES[1:]]
        elements = sum(r * columns for r, columns in zip(rows, BLOCK_SIZES, strict=False))
        width = 2 if name == "nvfp4" else 1
        gathered = wire.bytes["allgather_into_tensor_coalesced", torch.uint8]
        scales_of_blocks = gathered - elements // width
        assert 0 <= scales_of_blocks <= (elements // 256 if name == "nvfp4" else 0), dict(wire.bytes)
        grads = reduce_dtype or torch.float32
        assert wire.bytes["reduce_scatter_base", grads] == ranks * elements * grads.itemsize
        scales = wire.bytes["allreduce", torch.int32]
        if name == "delayed":  # Its first scale is a scale of the whole weight.
            assert scales == 4 * (len(BLOCK_SIZES) - 1)
        assert scales == sum(wire.bytes.values()) - gathered - ranks * elements * grads.itemsize


@on_ranks(2)
def test_averages_and_dtypes():
    value = awkward_values((32, 16), 0, kinds=["normal"])
    whole = convert(side_by_side([value]), CurrentScaling())
    weight = parametrized(copy.deepcopy(whole), as_codes)[0]._parameters["weight"]
    q = gathered_weight(weight, param_dtype=torch.bfloat16, reduce_dtype=torch.float32, reduce_op="avg")
    assert q.dtype == torch.bfloat16
    x = torch.randn(8, 16).bfloat16() * (1 + dist.get_rank())
    linear(x, q, None, CurrentScaling()).sum().backward()
    assert weight.grad.dtype == torch.float32
    layer = convert(side_by_side([value]).bfloat16(), CurrentScaling())[0]
    grads = []
    for rank in range(2):
        layer.weight.grad = None
        layer(x / (1 + dist.get_rank()) * (1 + rank)).sum().backward()
        grads.append(layer.weight.grad.float())
    assert torch.equal(weight.grad.full_tensor(), (grads[0] + grads[1]) / 2)


@on_ranks(2)
def test_what_cannot_be_gathered_is_refused():
    model = convert(side_by_side([awkward_values((32, 32), 0)]), CurrentScaling())
    with pytest.raises(TypeError, match=r"gathered_weight: weight .* is not the sharded weight of a converted Linear"):
        gathered_weight(model[0].weight)
    columns = shard(copy.deepcopy(model), shard_placement_fn=lambda _: Shard(1))[0].weight
    with pytest.raises(NotImplementedError, match=r"0.weight \(32, 32\) \(placements .* is not sharded by rows"):
        gathered_weight(columns)
    rows = distribute_tensor(model[0].weight, torch_ranks.mesh(), [Shard(0)])
    with pytest.raises(ValueError, match=r"reduce_op \('mean'\) is not 'sum' or 'avg'"):
        gathered_weight(rows, reduce_op="mean")
    with pytest.raises(TypeError, match=r"gathered_weight: param_dtype"):
        gathered_weight(rows, param_dtype=torch.int8)


@on_ranks(2)
def test_stacks_of_experts_are_gathered_as_values():
    """Experts keep scales of their own."""
    torch.manual_seed(0)
    layer = GroupedLinear(3, 32, 32, recipe=CurrentScaling(), stacked=True)
    with torch.no_grad():
        layer.experts.weight[0] *= 100
    x, sizes = torch.randn(6, 32), torch.tensor([2, 1, 3], dtype=torch.int32)
    want = layer(x, sizes)
    model = parametrized(layer, as_codes)
    assert torch.equal(model(x, sizes), want)
    with pytest.raises(NotImplementedError, match=r"gathered_weight: \S+ \(3, 32, 32\) is a stack of experts"):
        gathered_weight(model.experts._parameters["weight"])


@on_ranks(2)
def test_errors_of_a_plan_name_the_call_that_needs_it():
    """A weight loses rows after `convert`, so that its blocks are not whole."""
    model = convert(side_by_side([awkward_values((64, 32), 0)]), MXFP8())
    weight, text = model[0].weight.detach()[:33], r": 0.weight \(33, 32\) is not a whole number of 32x32 blocks"
    model[0].weight = nn.Parameter(distribute_tensor(weight, torch_ranks.mesh(), [Shard(0)]))
    with pytest.raises(ValueError, match=f"^gathered_weight{text}"):
        gathered_weight(model[0].weight)
    with pytest.raises(ValueError, match=f"^quantized_state_dict{text}"):
        quantized_state_dict(model)
    with pytest.raises(ValueError, match=f"^stream_weights{text}"):
        stream_weights(model)
    model[0].weight = nn.Parameter(weight)
    with pytest.raises(ValueError, match=f"^fully_shard{text}"):
        shard(model)[0].unshard()


@pytest.mark.slow
@on_ranks(2)
def test_models_are_compiled_around_it():
    torch._dynamo.reset()
    # Dynamo of torch 2.13 triggers a deprecation warning of torch.autograd 2.13.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    # Dynamo reads `.grad` of the weight, which is an intermediate of two graphs.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)
    outputs = []
    for compiled in (False, True):
        model = parametrized(convert(model_of(sizes=BLOCK_SIZES[:3]), CurrentScaling()), as_codes)
        run = torch.compile(model, backend="aot_eager") if compiled else model
        y = run(batch(0, BLOCK_SIZES[0]))
        y.square().sum().backward()
        outputs.append([y.detach(), *(p.grad.full_tensor() for p in model.parameters())])
    for a, b in zip(*outputs, strict=True):
        assert torch.equal(a, b)
