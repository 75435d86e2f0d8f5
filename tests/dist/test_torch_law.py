"""The law, for FSDP2 weights: ranks gather the bits of the whole weight quantized at once, however it is cut."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from qshard import reference
from qshard.formats import FP8_E4M3, FP8_E5M2, MXFP8_E4M3, NVFP4, MXFP8_32x32, NVFP4_16x16, Usage
from qshard.layout import plane
from qshard.recipes import CurrentScaling, Recipe
from qshard.torch_bridge import QuantizedTensor, convert, quantize, update_scales
from support import torch_ranks
from support.awkward import KINDS, TAME, assert_bits_equal, awkward_values
from support.formats import SCALINGS, SQUARES
from support.fronts import TorchFront
from support.torch_ranks import run

FRONT = TorchFront("cpu")
every_world = pytest.mark.parametrize("world", [1, 2, 3, 4])


def weights_of(fmt, kinds=TAME, dtype=np.float32):
    shapes = FRONT.shapes_to_cut(fmt, 4)
    return [awkward_values(shape, seed, dtype, kinds=kinds) for seed, shape in enumerate(shapes)]


def recipe_of(fmt):
    return Recipe(weight=fmt, activation=FP8_E4M3, gradient=FP8_E5M2)


def model_of(values, device=None):
    """One linear layer for each weight. All take the same input, so that the model has a forward."""

    class Layers(nn.Sequential):
        def forward(self, x):
            return torch.cat([layer(x) for layer in self], dim=-1)

    layers = Layers(*(nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=FRONT.array(w).dtype) for w in values))
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
        for part in expected.__dataclass_fields__:
            got, want = getattr(gathered.rowwise, part), getattr(expected, part)
            assert (got is None) == (want is None)
            if got is not None:  # NumPy's view would keep FSDP2 from freeing the memory.
                assert_bits_equal(FRONT.numpy(got.clone()), want, f"{part} of weight {i}")
        layer.reshard()


def gather(fmt, kinds, dtype):
    gather_values(fmt, weights_of(fmt, kinds, np.dtype(dtype)))


def gather_values(fmt, values):
    model = shard(convert(model_of(values), recipe_of(fmt)))
    assert_gathers(model, values, fmt)  # Scales are made as the first layer asks for its own.
    update_scales(model)
    model(torch.ones(2, values[0].shape[1], dtype=model[0].weight.dtype, device=torch_ranks.device)).sum().backward()
    assert_gathers(model, values, fmt)


def refuses_to_shard(fmt):
    """By whoever sees first that it cannot be: a recipe of a rotated weight, `convert`, or `fully_shard`."""
    with pytest.raises((ValueError, NotImplementedError), match=r"^(Recipe: |convert: 0: |fully_shard: 0.weight )"):
        fully_shard(convert(model_of(weights_of(MXFP8_32x32)), recipe_of(fmt))[0], mesh=torch_ranks.mesh())


def gather_on_mesh(mesh_shape, fmt):
    values = weights_of(fmt)
    model = shard(convert(model_of(values), recipe_of(fmt)), mesh=torch_ranks.mesh(mesh_shape))
    assert_gathers(model, values, fmt)
    update_scales(model)
    model(torch.ones(2, values[0].shape[1], device=torch_ranks.device)).sum().backward()
    assert_gathers(model, values, fmt)


@pytest.mark.parametrize("mesh_shape", [(2, 2), (4, 1), (1, 4), (3, 1), (1, 2), (1, 1)], ids=str)
@pytest.mark.parametrize("fmt", SCALINGS[::2], ids=str)
def test_replicated_groups(mesh_shape, fmt):
    """HSDP: scales are agreed on in each group of shards; replicas hold the same weights."""
    run(mesh_shape[0] * mesh_shape[1], gather_on_mesh, mesh_shape=mesh_shape, fmt=fmt)


def gather_columns(fmt):
    values = [w for w in weights_of(fmt, KINDS if fmt.block else TAME) if w.shape[0] > 1]
    model = convert(model_of(values), recipe_of(fmt))
    shard(model, shard_placement_fn=lambda parameter: Shard(1))
    assert_gathers(model, values, fmt)
    model(torch.ones(2, values[0].shape[1], device=torch_ranks.device)).sum().backward()
    assert_gathers(model, values, fmt)


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("fmt", SQUARES, ids=str)
def test_weights_cut_along_columns(world, fmt):
    run(world, gather_columns, fmt=fmt)


def gather_mixed_precision():
    """The fp32 shard is what is quantized; `param_dtype` is what activations and gradients have."""
    values = weights_of(FP8_E4M3)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = shard(convert(model_of(values), CurrentScaling()), mp_policy=policy)
    y = model(torch.ones(2, values[0].shape[1], device=torch_ranks.device))
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert_gathers(model, values, FP8_E4M3, torch.bfloat16)


@every_world
def test_mixed_precision(world):
    run(world, gather_mixed_precision)


def gather_offloaded(fmt):
    values = weights_of(fmt)
    model = shard(convert(model_of(values), recipe_of(fmt)), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert_gathers(model, values, fmt)
    model(torch.ones(2, values[0].shape[1], device=torch_ranks.device)).sum().backward()
    assert_gathers(model, values, fmt)


@pytest.mark.parametrize("fmt", SCALINGS, ids=str)
def test_offloaded_shards(fmt):
    run(3, gather_offloaded, fmt=fmt)


def gather_from_meta(fmt):
    values = weights_of(fmt)
    with torch.device("meta"):
        model = model_of(values, device="meta")
    shard(convert(model, recipe_of(fmt))).to_empty(device=torch_ranks.device)
    with torch.no_grad():
        for layer, w in zip(model, values, strict=True):
            local = torch_ranks.own_rows(w.shape[0])
            layer.weight.to_local().copy_(FRONT.array(w[local]))
    assert_gathers(model, values, fmt)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(-3)
    update_scales(model)
    assert_gathers(model, [FRONT.numpy(layer.weight.full_tensor().clone()) for layer in model], fmt)


@every_world
@pytest.mark.parametrize("fmt", SCALINGS[::2], ids=str)
def test_models_made_without_memory(world, fmt):
    run(world, gather_from_meta, fmt=fmt)


def quantize_in_group(kinds):
    for w in weights_of(FP8_E4M3, kinds):
        rows = torch_ranks.own_rows(w.shape[0])
        q = quantize(FRONT.array(w[rows]).to(torch_ranks.device), FP8_E4M3, group=dist.group.WORLD)
        expected = reference.quantize(w, FP8_E4M3, Usage.ROWWISE).rowwise
        assert_bits_equal(FRONT.numpy(q.rowwise.data), expected.data[rows])
        assert_bits_equal(FRONT.numpy(q.rowwise.scale_inv), expected.scale_inv)


@every_world
@pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])
def test_quantize_over_a_group(world, kinds):
    """Also where only one rank has the NaN, or no row at all."""
    run(world, quantize_in_group, kinds=kinds)


def quantize_blocks_in_group(fmt, usage):
    """Each rank holds whole blocks; the global scale, and the places of random bits, are of the whole."""
    rows = 32 * dist.get_world_size()
    part = slice(32 * dist.get_rank(), 32 * dist.get_rank() + 32)
    x = awkward_values((rows, 64), 3, kinds=TAME)
    random = {"seed": 5} if fmt.rounding == "stochastic" else {}
    mine = FRONT.array(x[part]).to(torch_ranks.device)
    q = quantize(mine, fmt, usage=usage, group=dist.group.WORLD, **random, first=part.start * 64)
    whole = reference.quantize(x, fmt, usage, **random)
    for one in usage:
        got, want = (getattr(q, one.name.lower()), getattr(whole, one.name.lower()))
        transposed = plane(fmt, x.shape, one).transposed
        for name in ("data", "scale_inv"):
            of_whole = getattr(want, name)
            axis = 1 if transposed else 0
            expected = np.split(of_whole, dist.get_world_size(), axis=axis)[dist.get_rank()]
            assert_bits_equal(FRONT.numpy(getattr(got, name)), np.ascontiguousarray(expected), f"{one} {name}")
        if want.global_scale_inv is not None:
            assert_bits_equal(FRONT.numpy(got.global_scale_inv), want.global_scale_inv)


GROUPED = [
    MXFP8_E4M3,
    MXFP8_32x32,
    NVFP4,
    NVFP4_16x16,
    NVFP4.with_options(four_over_six="mse"),
    NVFP4.with_options(hadamard=True, rounding="stochastic"),
]


@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("fmt", GROUPED, ids=str)
def test_quantize_blocks_over_a_group(world, fmt):
    run(world, quantize_blocks_in_group, fmt=fmt, usage=Usage.BOTH)


def quantize_dtensor():
    x = dist.tensor.distribute_tensor(torch.ones(8, 4), torch_ranks.mesh(), [Shard(0)])
    with pytest.raises(TypeError, match=r"quantize: x .DTensor. is not a plain tensor; pass x.to_local"):
        quantize(x, FP8_E4M3)


def test_quantize_refuses_a_dtensor():
    run(2, quantize_dtensor)
