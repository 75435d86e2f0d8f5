"""The law, for FSDP2 weights: ranks gather the bits of the whole weight quantized at once, however it is cut."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import torch_ranks
from awkward import KINDS, TAME, assert_bits_equal, awkward_values
from fronts import TorchFront
from qshard import reference
from qshard.formats import FP8_E4M3, FP8_E5M2, Usage
from qshard.recipes import CurrentScaling
from qshard.sharding import shard_rows
from qshard.torch_bridge import QuantizedTensor, convert, quantize, update_scales
from torch_ranks import run

FRONT = TorchFront("cpu")
# For 1 to 4 ranks: rows that are even, uneven, fewer than ranks, and so few that the last ranks have none.
ROWS = (1, 3, 8, 100, 104, 105, 128)
COLUMNS = 20
FORMATS = [FP8_E4M3, FP8_E5M2, FP8_E4M3.with_options(pow2=True, eps=1.0)]
every_world = pytest.mark.parametrize("world", [1, 2, 3, 4])


def weights(kinds=TAME, dtype=np.float32):
    return [awkward_values((rows, COLUMNS), seed, dtype, kinds=kinds) for seed, rows in enumerate(ROWS)]


def model_of(values, device=None):
    """One linear layer for each weight. All take the same input, so that the model has a forward."""

    class Layers(nn.Sequential):
        def forward(self, x):
            return torch.cat([layer(x) for layer in self], dim=-1)

    layers = Layers(*(nn.Linear(COLUMNS, w.shape[0], bias=False, dtype=FRONT.array(w).dtype) for w in values))
    with torch.no_grad():
        for layer, w in zip(layers, values, strict=True):
            layer.weight.copy_(FRONT.array(w))
    return layers.to(device or torch_ranks.device)


def shard(model, **options):
    options.setdefault("mesh", torch_ranks.mesh())
    for layer in model:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def assert_gathers(model, values, fmt, dtype=None):
    for i, (layer, w) in enumerate(zip(model, values, strict=True)):
        layer.unshard()
        gathered, expected = layer.weight, reference.quantize(w, fmt, Usage.ROWWISE).rowwise
        assert isinstance(gathered, QuantizedTensor)
        assert gathered.dtype == (dtype or FRONT.array(w).dtype)
        data, scale_inv = (
            t.clone() for t in gathered.rowwise
        )  # NumPy's view would keep FSDP2 from freeing the memory.
        assert_bits_equal(FRONT.numpy(data), expected.data, f"codes of weight {i}")
        assert_bits_equal(FRONT.numpy(scale_inv), expected.scale_inv, f"scale of weight {i}")
        layer.reshard()


def gather(fmt, kinds, dtype):
    values = weights(kinds, np.dtype(dtype))
    model = shard(convert(model_of(values), CurrentScaling(weight=fmt)))
    assert_gathers(model, values, fmt)  # Scales are made as the first layer asks for its own.
    update_scales(model)
    assert_gathers(model, values, fmt)


@every_world
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])
def test_gathered_codes_are_those_of_the_whole(world, fmt, kinds):
    run(world, gather, fmt=fmt, kinds=kinds, dtype="float32")


@every_world
def test_gathered_codes_of_bfloat16_weights(world):
    run(world, gather, fmt=FP8_E4M3, kinds=TAME, dtype="bfloat16")


def gather_on_mesh(mesh_shape):
    values = weights()
    model = shard(convert(model_of(values), CurrentScaling()), mesh=torch_ranks.mesh(mesh_shape))
    assert_gathers(model, values, FP8_E4M3)
    update_scales(model)
    model(torch.ones(2, COLUMNS, device=torch_ranks.device)).sum().backward()
    assert_gathers(model, values, FP8_E4M3)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1), (1, 4), (3, 1), (1, 2), (1, 1)], ids=str)
def test_replicated_groups(mesh_shape):
    """HSDP: scales are agreed on in each group of shards; replicas hold the same weights."""
    run(mesh_shape[0] * mesh_shape[1], gather_on_mesh, mesh_shape=mesh_shape)


def gather_columns():
    values = [w for w in weights() if w.shape[0] > 1]
    model = convert(model_of(values), CurrentScaling())
    shard(model, shard_placement_fn=lambda parameter: Shard(1))
    assert_gathers(model, values, FP8_E4M3)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_weights_cut_along_columns(world):
    run(world, gather_columns)


def gather_mixed_precision():
    """The fp32 shard is what is quantized; `param_dtype` is what activations and gradients have."""
    values = weights()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(convert(model_of(values), CurrentScaling()), mp_policy=policy)
    y = model(torch.ones(2, COLUMNS, device=torch_ranks.device))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_gathers(model, values, FP8_E4M3, torch.bfloat16)


@every_world
def test_mixed_precision(world):
    run(world, gather_mixed_precision)


def gather_offloaded():
    values = weights()
    model = shard(convert(model_of(values), CurrentScaling()), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_gathers(model, values, FP8_E4M3)
    model(torch.ones(2, COLUMNS, device=torch_ranks.device)).sum().backward()
    assert_gathers(model, values, FP8_E4M3)


def test_offloaded_shards():
    run(3, gather_offloaded)


def gather_from_meta():
    values = weights()
    with torch.device("meta"):
        model = model_of(values, device="meta")
    shard(convert(model, CurrentScaling())).to_empty(device=torch_ranks.device)
    with torch.no_grad():
        for layer, w in zip(model, values, strict=True):
            local = shard_rows(w.shape[0], dist.get_world_size(), dist.get_rank())
            layer.weight.to_local().copy_(FRONT.array(w[local.start : local.stop]))
    assert_gathers(model, values, FP8_E4M3)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(-3)
    update_scales(model)
    assert_gathers(model, [FRONT.numpy(layer.weight.full_tensor().clone()) for layer in model], FP8_E4M3)


@every_world
def test_models_made_without_memory(world):
    run(world, gather_from_meta)


def quantize_in_group(kinds):
    for w in weights(kinds):
        part = shard_rows(w.shape[0], dist.get_world_size(), dist.get_rank())
        rows = slice(part.start, part.stop)
        q = quantize(FRONT.array(w[rows]).to(torch_ranks.device), FP8_E4M3, group=dist.group.WORLD)
        expected = reference.quantize(w, FP8_E4M3, Usage.ROWWISE).rowwise
        assert_bits_equal(FRONT.numpy(q.rowwise.data), expected.data[rows])
        assert_bits_equal(FRONT.numpy(q.rowwise.scale_inv), expected.scale_inv)


@every_world
@pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])
def test_quantize_over_a_group(world, kinds):
    """Also where only one rank has the NaN, or no row at all."""
    run(world, quantize_in_group, kinds=kinds)


def quantize_dtensor():
    x = dist.tensor.distribute_tensor(torch.ones(8, 4), torch_ranks.mesh(), [Shard(0)])
    with pytest.raises(TypeError, match=r"quantize: x .DTensor. is not a plain tensor; pass x.to_local"):
        quantize(x, FP8_E4M3)


def test_quantize_refuses_a_dtensor():
    run(2, quantize_dtensor)
