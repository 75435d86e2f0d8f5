"""Converted layers under FSDP2 match plain layers: gradient dtypes on the wire, inference mode, copies and averages.

Unsupported uses raise a one-line error on every rank.
"""

import copy
import io
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim.swa_utils import AveragedModel

from qshard.recipes import MXFP8, NVFP4, CurrentScaling, DelayedScaling
from qshard.torch_bridge import ShardedWeight, convert, update_scales
from support import torch_ranks
from support.pairs import turns
from support.torch_models import (
    BLOCK_SIZES,
    Wire,
    assert_gathers_the_whole,
    batch,
    losses_of,
    model_of,
    shard,
    whole,
)
from support.torch_ranks import on_ranks

RECIPES = {"fp8": CurrentScaling(), "delayed": DelayedScaling(), "mxfp8": MXFP8(), "nvfp4": NVFP4()}
every_recipe = pytest.mark.parametrize("name", RECIPES)
DTYPES = (None, torch.float32, torch.bfloat16)


def reduced(model, x):
    """Run one backward pass and return the reduce-scatters (dtype, elements) and the gradient dtypes."""
    with Wire() as wire:
        model(x).float().square().mean().backward()
    found = wire.of("reduce_scatter_tensor") or wire.of("reduce_scatter")
    assert found
    return found, [p.grad.dtype for p in model.parameters()]


@on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_travel_as_those_of_plain_layers(dtype):
    """For every combination of policy dtypes a third of the recipes, in turn: each recipe meets every dtype."""
    for i, (param_dtype, reduce_dtype) in enumerate(itertools.product(DTYPES, DTYPES)):
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        x = batch(0, BLOCK_SIZES[0]).to(dtype)
        expected = reduced(shard(model_of(True, dtype, BLOCK_SIZES), mp_policy=policy), x)
        wire = reduce_dtype or param_dtype or dtype
        assert {kind for kind, _ in expected[0]} == {wire}
        for recipe in list(RECIPES.values())[(i + i // 3) % 3 :: 3]:
            model = shard(convert(model_of(True, dtype, BLOCK_SIZES), recipe), mp_policy=policy)
            assert reduced(model, x) == expected, (param_dtype, reduce_dtype, recipe)


@turns(1, name=list(RECIPES), world=[1, 2, 3])
@on_ranks()
def test_inference_mode(name):
    """Also as the first forward pass, with the bits of `no_grad`.

    Training continues afterwards where it does with plain layers.
    """
    x = batch(0, BLOCK_SIZES[0])

    def infer(model):
        with torch.inference_mode():
            return model(x)

    plain, model = shard(model_of(sizes=BLOCK_SIZES)), shard(convert(model_of(sizes=BLOCK_SIZES), RECIPES[name]))
    refusal = outcome(lambda: infer(plain))  # On one rank, FSDP2 of torch 2.13 cannot start in inference mode.
    got = outcome(lambda: infer(model))
    assert got == refusal, got
    if refusal is not None:
        return
    outputs = []
    for mode in (torch.inference_mode, torch.no_grad):
        model = shard(convert(model_of(sizes=BLOCK_SIZES), RECIPES[name]))
        with mode():
            outputs += [model(x), model(x)]
        assert outputs[-1].is_inference() == (mode is torch.inference_mode)
    if name != "nvfp4":  # NVFP4 draws new random bits in each forward pass, but not for weights.
        for y in outputs[1:]:
            assert torch.equal(y, outputs[0])
    trained = shard(convert(model_of(sizes=BLOCK_SIZES), RECIPES[name]))
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    losses_of(trained, optimizer, steps=1)
    with torch.inference_mode():
        trained(x)
    if name != "delayed":
        assert_gathers_the_whole(trained)
    assert all(torch.isfinite(torch.tensor(losses_of(trained, optimizer, steps=2))))


@on_ranks(4)
@every_recipe
def test_fewer_ranks_after_forward_are_refused(name):
    """FSDP2 cannot reshard to fewer ranks weights that have gather hooks: nested, in the root, or set later."""
    text = r"fully_shard: \w+.weight \(reshard_after_forward=2\) is gathered as codes, .*; pass reshard_after_forward="
    model = shard(convert(model_of(sizes=BLOCK_SIZES), RECIPES[name]), reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=text):
        model(batch(0, BLOCK_SIZES[0]))
    if name == "fp8":
        partly = model_of(sizes=BLOCK_SIZES)
        fully_shard(partly[0], mesh=torch_ranks.mesh(), reshard_after_forward=2)  # Plain weights support it.
        convert(partly, CurrentScaling(), filter=lambda layer, layer_name: layer_name != "0")
        shard_rest(partly)
        partly(batch(0, BLOCK_SIZES[0])).sum().backward()


def shard_rest(model):
    for layer in list(model)[1:]:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=torch_ranks.mesh())
    fully_shard(model, mesh=torch_ranks.mesh())


@on_ranks(2)
def test_uneven_columns_are_refused_as_fsdp2_does():
    texts = []
    for recipe in (None, CurrentScaling()):
        model = nn.Sequential(nn.Linear(9, 16))
        with pytest.raises(NotImplementedError, match="FSDP does not support uneven sharding on dim 1") as error:
            shard(convert(model, recipe) if recipe else model, shard_placement_fn=lambda p: Shard(p.ndim - 1))
        texts.append(str(error.value))
    assert texts[0] == texts[1]


def outcome(call):
    """Return the type and text of the error that the call raises, or None."""
    try:
        call()
    except Exception as error:
        return type(error), str(error)
    return None


def through_file(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "deepcopy of a layer": lambda model: copy.deepcopy(model[0]),
    "deepcopy of weights": lambda model: copy.deepcopy(list(model.parameters())),
    "deepcopy of a state": lambda model: copy.deepcopy(model.state_dict()),
    "save": through_file,
    "save of a layer": lambda model: through_file(model[0]),
    "save of weights": lambda model: through_file(list(model.parameters())),
    "save of a state": lambda model: through_file(model.state_dict()),
    "average": AveragedModel,
}


@on_ranks(2)
@every_recipe
def test_sharded_models_are_copied_as_far_as_plain_ones(name):
    """FSDP2's refusals, and their texts, do not depend on the layers."""
    plain = shard(model_of(True, sizes=BLOCK_SIZES))
    model = shard(convert(model_of(True, sizes=BLOCK_SIZES), RECIPES[name]))
    for each in (plain, model):
        each(batch(0, BLOCK_SIZES[0])).square().mean().backward()
        each.zero_grad()  # torch does not copy a DTensor that has a gradient.
    for what, make in COPIES.items():
        assert outcome(lambda: make(model)) == outcome(lambda: make(plain)), what  # noqa: B023
    weights = copy.deepcopy(list(model.parameters()))
    for a, b in zip(weights, model.parameters(), strict=True):
        assert isinstance(a, DTensor)
        assert torch.equal(a.full_tensor(), b.full_tensor())
        assert type(a.to_local()) is type(b.to_local())
    before = whole(model)
    with torch.no_grad():
        weights[0].mul_(2)
    assert all(torch.equal(a, b) for a, b in zip(whole(model).values(), before.values(), strict=True))


@on_ranks(2)
@every_recipe
def test_averages_of_models(name):
    """An average created before sharding and sharded alike has the average of the weights, and computes with it."""
    torch.manual_seed(0)
    model = convert(model_of(True, sizes=BLOCK_SIZES), RECIPES[name])
    averaged = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    shard(averaged.module)
    shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected = None
    for number in range(3):
        losses_of(model, optimizer, steps=1 + (number > 1))
        averaged.update_parameters(model)
        now = whole(model)
        expected = now if expected is None else {k: expected[k] + 0.5 * (now[k] - expected[k]) for k in now}
    for key, value in whole(averaged.module).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-6, atol=1e-7)
    if name != "delayed":
        assert_gathers_the_whole(averaged.module)
    with torch.no_grad():
        averaged(batch(0, BLOCK_SIZES[0]))
    update_scales(averaged.module)
    assert isinstance(averaged.module[0].weight.to_local(), ShardedWeight)
    assert dist.get_world_size() == 2
