"""Sharding law for FSDP2: ranks gather the bits of the whole weight quantized at once, for any sharding.

test_law.py covers rows of every format.
"""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from qshard import reference
from qshard.formats import FP8_E4M3, FP8_E5M2, MXFP8_32x32, Usage
from qshard.layout import plane
from qshard.recipes import MXFP8, NVFP4, Recipe
from qshard.torch_bridge import convert, quantize, update_scales
from qshard.torch_bridge._fsdp.refresh import refresh_scales, sharded_weights
from support import torch_ranks
from support.awkward import KINDS, TAME, assert_bits_equal, awkward_values, fits
from support.formats import (
    GATHERED,
    SCALINGS,
    SQUARES,
    STATELESS,
    VARIANTS,
    every_gathered_recipe,
    stochastic,
    usages_of,
)
from support.fronts import PARTS
from support.pairs import turns
from support.torch_models import FRONT, Wire, assert_gathers_the_whole, shard, side_by_side
from support.torch_ranks import on_ranks

every_scaling = pytest.mark.parametrize("fmt", SCALINGS, ids=str)
WAYS = {
    "rows": {},
    "columns": {"shard_placement_fn": lambda parameter: Shard(1)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
}
"""Options of `fully_shard`."""


def weights_of(fmt, kinds=TAME, dtype=np.float32):
    shapes = FRONT.shapes_to_cut(fmt, 4)
    return [awkward_values(shape, seed, dtype, kinds=kinds) for seed, shape in enumerate(shapes)]


def recipe_of(fmt):
    return Recipe(weight=fmt, activation=FP8_E4M3, gradient=FP8_E5M2)


def gather(fmt, kinds=TAME, dtype="float32", way="rows"):
    gather_values(fmt, weights_of(fmt, kinds, np.dtype(dtype)), way)


def gather_values(fmt, values, way="rows"):
    """Scales are computed in the first forward pass and by `update_scales`."""
    if way == "columns":
        values = [w for w in values if w.shape[0] > 1]
    model = shard(convert(side_by_side(values), recipe_of(fmt)), **WAYS[way])
    kept = model[0].weight.dtype
    used = torch.bfloat16 if way == "mixed" else kept
    assert_gathers_the_whole(model, values)
    update_scales(model)
    y = model(torch.ones(2, values[0].shape[1], dtype=kept, device=torch_ranks.device))
    y.sum().backward()
    # The shard itself is quantized; `param_dtype` is the dtype of activations.
    assert (y.dtype, {p.grad.dtype for p in model.parameters()}) == (used, {kept})
    assert_gathers_the_whole(model, values)


def refuses_to_shard(fmt):
    """The recipe (rotated weights), `convert` or `fully_shard` raises, whichever comes first."""
    with pytest.raises(
        (ValueError, NotImplementedError), match=r"^(Recipe: |convert: 0.weight |fully_shard: 0.weight )"
    ):
        fully_shard(convert(side_by_side(weights_of(MXFP8_32x32)), recipe_of(fmt))[0], mesh=torch_ranks.mesh())


@pytest.mark.each_value
@on_ranks((2, 2), (4, 1), (1, 4), (3, 1), (1, 2), (1, 1))
@pytest.mark.parametrize("fmt", SCALINGS[::2], ids=str)
def test_replicated_groups(fmt):
    """HSDP: each group of shards agrees on scales; replicas have the same weights."""
    gather(fmt)


@turns(1, fmt=SQUARES, world=[1, 2, 4])
@on_ranks()
def test_weights_cut_along_columns(fmt):
    gather(fmt, KINDS if fmt.block else TAME, way="columns")


@on_ranks(1, 2, 3, 4)
def test_mixed_precision():
    gather(FP8_E4M3, way="mixed")


@on_ranks(3)
@every_scaling
def test_offloaded_shards(fmt):
    gather(fmt, way="offloaded")


@pytest.mark.each_value
@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("fmt", SCALINGS[::2], ids=str)
def test_models_made_without_memory(fmt):
    values = weights_of(fmt)
    model = shard(convert(side_by_side(values).to("meta"), recipe_of(fmt))).to_empty(device=torch_ranks.device)
    with torch.no_grad():
        for layer, w in zip(model, values, strict=True):
            local = torch_ranks.own_rows(w.shape[0])
            layer.weight.to_local().copy_(FRONT.array(w[local]))
    assert_gathers_the_whole(model, values)
    with torch.no_grad():
        for layer in model:
            layer.weight.mul_(-3)
    update_scales(model)
    assert_gathers_the_whole(model)


@on_ranks(2, 4)
def test_rows_and_columns_together():
    """Column shards share the single reduction with row shards."""
    model = convert(side_by_side([awkward_values((96, 96), i, kinds=TAME) for i in range(4)]), NVFP4())
    for axis, layer in zip((1, 0, 1, 0), model, strict=True):
        shard(nn.Sequential(layer), shard_placement_fn=lambda _, axis=axis: Shard(axis))
    update_scales(model)
    assert_gathers_the_whole(model)


def refresh(model):
    """Refresh scales as the first gather of a pass does."""
    refresh_scales(list(sharded_weights(model)), None)


def launches_of(recipe, layers, dtypes):
    dtypes = [np.dtype(dtypes[i % len(dtypes)]) for i in range(layers * len(dtypes))]
    model = shard(convert(side_by_side([awkward_values((96, 64), 0, d, kinds=TAME) for d in dtypes]), recipe))
    refresh(model)  # Builds the plans.
    with Wire() as wire:
        refresh(model)
    assert_gathers_the_whole(model)
    return wire.launches


def counts(recipe, dtypes):
    few, many = (launches_of(recipe, layers, dtypes) for layers in (2, 8))
    assert few == many
    assert few.count("qshard.amax_slices.default") == len(dtypes)


@pytest.mark.each_value
@on_ranks(1, 3)
@pytest.mark.parametrize("name", sorted(GATHERED.keys() & STATELESS.keys()))
def test_launches_do_not_grow_with_the_model(name):
    counts(GATHERED[name], ["float32"])


@on_ranks(2)
def test_weights_of_two_dtypes_are_two_calls():
    counts(MXFP8(), ["float32", "bfloat16"])


@on_ranks(2)
@every_gathered_recipe
def test_an_infinity_in_one_shard_shows_on_all_ranks(recipe):
    torch.manual_seed(0)
    model = shard(convert(nn.Sequential(nn.Linear(64, 64, bias=False)).to(torch_ranks.device), recipe))
    losses = []
    for bad in (False, True):
        if bad and dist.get_rank() == 1:
            with torch.no_grad():
                model[0].weight.to_local()[1, 2] = float("inf")
        update_scales(model)
        losses.append(model(torch.ones(32, 64, device=torch_ranks.device)).square().mean())
        losses[-1].backward()
    assert [bool(loss.isfinite()) for loss in losses] == [True, False]


def quantize_over_a_group(fmt, rows, kinds):
    """Each rank's rows get the scales and the random bits of the whole tensor."""
    x = awkward_values((rows, 128), 3, kinds=kinds)
    part = torch_ranks.own_rows(rows)
    usage = usages_of(fmt)[-1] if rows % 128 == 0 else Usage.ROWWISE
    seed = {"seed": 5} if stochastic(fmt) else {}
    mine = FRONT.array(x[part]).to(torch_ranks.device)
    q = quantize(mine, fmt, usage=usage, group=dist.group.WORLD, **seed, offset=part.start * 128)
    expected = reference.quantize(x, fmt, usage, **seed)
    for one in usage:
        got, want = (getattr(each, one.name.lower()) for each in (q, expected))
        axis = 1 if plane(fmt, x.shape, one).transposed else 0
        for name in PARTS:
            array = getattr(want, name)
            if array is not None and array.ndim:
                places = [place * array.shape[axis] // rows for place in (part.start, part.stop)]
                array = np.ascontiguousarray(np.split(array, places, axis=axis)[1])
            assert (array is None) == (getattr(got, name) is None)
            if array is not None:
                assert_bits_equal(FRONT.numpy(getattr(got, name)), array, f"{one} {name} of {fmt}")


@pytest.mark.each_value
@on_ranks(1, 3)
@pytest.mark.parametrize("kinds", [TAME, KINDS], ids=["tame", "all"])
def test_quantize_over_a_group(kinds):
    """Whole blocks on each rank; without blocks along rows, also uneven shards and empty ranks.

    One rank has the NaN.
    """
    for fmt in VARIANTS:
        for rows in (128 * dist.get_world_size(), 7, 6, 2):
            if rows % 128 == 0 or (fits(fmt, (rows, 128), Usage.ROWWISE) and (fmt.block or (1,))[0] == 1):
                quantize_over_a_group(fmt, rows, kinds)


@on_ranks(2)
def test_quantize_refuses_a_dtensor():
    x = dist.tensor.distribute_tensor(torch.ones(8, 4), torch_ranks.mesh(), [Shard(0)])
    with pytest.raises(TypeError, match=r"quantize: x .DTensor. is not a plain tensor; pass x.to_local"):
        quantize(x, FP8_E4M3)
