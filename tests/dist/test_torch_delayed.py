"""Delayed scaling over ranks: the first step, calibration, stages of a pipeline, and updates that are forgotten."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

from qshard import reference
from qshard.formats import E4M3
from qshard.recipes import CurrentScaling, DelayedScaling
from qshard.torch_bridge import QuantizedTensor, ZeroOptimizer, convert, scaling_state, update_scales
from support import torch_ranks
from support.awkward import awkward_values
from support.torch_models import FRONT, Wire, assert_gathers_the_whole, batch, linears, losses_of, model_of, shard
from support.torch_models import side_by_side as layers_of
from support.torch_ranks import on_ranks


def first_scale(w, margin=0):
    return reference.delayed_scale(0, reference.amax(w), E4M3, margin=margin)


@pytest.mark.each_value
@on_ranks(1, 3, (2, 2))
@pytest.mark.parametrize("margin", [0, 2])
def test_first_scales_are_of_the_whole_weight(margin):
    """With one reduction a pass. A weight of zeros has none until it has another value."""
    values = [awkward_values((rows, 20), i, kinds=["normal", "outlier"]) for i, rows in enumerate((64, 5, 33))]
    values[1][:] = 0
    model = shard(convert(layers_of(values), DelayedScaling(margin=margin)))
    x = torch.randn(6, 20).to(torch_ranks.device)
    with Wire() as wire:
        model(x).sum().backward()
    shards = torch_ranks.shape[-1]
    assert wire.of("allreduce").count((torch.int32, 3)) == (2 if shards > 1 else 0)
    assert_gathers_the_whole(model, values, [first_scale(w, margin) for w in values])
    for _ in range(2):
        update_scales(model)
        model(x).sum().backward()
    update_scales(model)
    values[1][:] = np.linspace(-0.01, 0.003, values[1].size, dtype=np.float32).reshape(values[1].shape)
    with torch.no_grad():
        model[1].weight.to_local().copy_(FRONT.array(values[1][torch_ranks.own_rows(5)]) if shards == 3 else 0)
    if shards == 3:
        with Wire() as wire:
            model(x)
        assert wire.of("allreduce") == [(torch.int32, 1)], "of the one weight without a scale"
        assert model[1].delayed["weight"].scale == 0
        assert_gathers_the_whole(model, values, [first_scale(w, margin) for w in values])


@on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_calibration(reshard):
    """Batches without gradients, each with an update, while the weight of the root stays gathered; then training."""
    losses = []
    for recipe in (DelayedScaling(history=2), CurrentScaling()):
        model = shard(convert(model_of(), recipe), reshard_after_forward=reshard)
        for i in range(3):
            with torch.no_grad():
                model(10 * batch(i))
            gathered = linears(model)[-1].weight  # Not resharded, if FSDP2 has kept it.
            before = gathered.dequantize() if isinstance(gathered, QuantizedTensor) else None
            assert (before is None) is reshard
            update_scales(model)
            if before is not None:
                assert torch.equal(linears(model)[-1].weight.dequantize(), before)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for i in range(6):
            loss = (model(batch(i)) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            update_scales(model)
            losses.append(loss.item())
        if recipe.stateful:
            scales = [layer.delayed["weight"].scale for layer in linears(model)]
            assert_gathers_the_whole(model, scales=[FRONT.numpy(scale) for scale in scales])
    assert losses[:6] == pytest.approx(losses[6:], rel=0.03), str(losses)  # Of E4M3 with other scales.
    if reshard:  # FSDP2 itself does not train what it has gathered without gradients and kept.
        assert losses[5] < 0.9 * losses[0], str(losses)


@on_ranks(4)
@pytest.mark.parametrize("way", ["group", "mesh"])
def test_stages_of_a_pipeline_have_scales_of_their_own(way):
    """Of ranks 0 and 1, and of 2 and 3: by group=, or as their weights are cut."""
    rank = dist.get_rank()
    stage = rank // 2
    pair = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("stage", "shard"))["shard"]
    model = convert(nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(stage + 1))), DelayedScaling())
    model.to(torch_ranks.device)
    if way == "mesh":
        fully_shard(model, mesh=pair)
    x = torch.full((2, 16), 2.0**rank, device=torch_ranks.device)
    model(x).sum().backward()
    update_scales(model, pair.get_group() if way == "group" else None)
    assert model[0].delayed["activation"].amax_history[-1] == 2.0 ** (2 * stage + 1)


class Recomputed(nn.Module):
    """A stage under activation checkpointing."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return checkpoint(self.layer, x, use_reentrant=False)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_call_keeps_no_frames_of_its_callers(checkpointed):
    """Layers look for `PipelineStage` among their callers, whose variables must not outlive them."""
    layer = convert(nn.Sequential(nn.Linear(32, 32)), DelayedScaling())

    def step():
        variable, x = nn.Identity(), torch.randn(4, 32, requires_grad=True)
        y = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        y.sum().backward()
        return weakref.ref(variable)

    gc.disable()
    try:
        assert step()() is None
    finally:
        gc.enable()


@on_ranks(2)
def test_a_pipeline_that_infers_shapes_has_the_scales_of_one_process():
    """Before its first step, `PipelineStage` runs a stage forward and backward on uninitialized memory."""
    rank, device = dist.get_rank(), torch.device(torch_ranks.device)
    alone = [dist.new_group([each]) for each in range(2)][rank]
    torch.manual_seed(0)
    layers = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), DelayedScaling()).to(device)
    whole = copy.deepcopy(layers)
    stage = PipelineStage(Recomputed(layers[rank]), rank, 2, device)
    schedule = Schedule1F1B(stage, 2, loss_fn=nn.functional.mse_loss, scale_grads=False)
    x = torch.randn(8, 16, device=device) / 16
    torch.use_deterministic_algorithms(True)  # Fills uninitialized memory with NaN.
    try:
        schedule.step(*[x] * (rank == 0), target=x if rank == 1 else None)
    finally:
        torch.use_deterministic_algorithms(False)
    for part in x.chunk(2):
        nn.functional.mse_loss(whole(part), part).backward()
    for model in (layers[rank], whole):
        update_scales(model, group=alone)
    found, expected = scaling_state(layers[rank], alone), scaling_state(whole[rank], alone)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@on_ranks(4)
@pytest.mark.parametrize("sharded", [False, True])
def test_scales_of_zero_over_some_ranks(sharded):
    """An update is theirs alone, and changes nothing after that of the step. Copies of a model know of no group."""
    pair = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("stage", "data"))["data"].get_group()
    rank = dist.get_rank()
    if rank >= 2:
        return
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), DelayedScaling()).to(torch_ranks.device)
    optimizer = ZeroOptimizer(model, group=pair, shard_weights=sharded)
    for step in range(2):
        model(torch.full((2, 16), 2.0 ** (rank + step), device=torch_ranks.device)).sum().backward()
        optimizer.step()
        before = {name: value.clone() for name, value in scaling_state(model).items()}
        update_scales(model)
        assert before["0.delayed.activation.amax_history"][-1] == 2.0 ** (1 + step)
        assert all(torch.equal(value, before[name]) for name, value in scaling_state(model).items())
    assert model[0].delayed["weight"].group is pair
    assert copy.deepcopy(model[0].delayed)["weight"].group is None
    with pytest.raises(ValueError, match=r"layers are trained by 2 groups of ranks; pass grou"):
        update_scales(nn.ModuleList([model, convert(nn.Linear(4, 4), DelayedScaling()).to(torch_ranks.device)]))


@on_ranks(4)
def test_ranks_whose_models_differ_all_hear_of_it():
    for stages in (True, False):  # One layer or two; or other options of the same layers.
        late = dist.get_rank() // 2
        recipe = DelayedScaling(margin=0 if stages else late)
        model = convert(nn.Sequential(*(nn.Linear(16, 16) for _ in range(1 + late * stages))), recipe)
        model.to(torch_ranks.device)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"update_scales: ranks have different tensors .* pass group="):
                update_scales(model)
    whole = init_device_mesh(torch_ranks.device, (4,))
    parts = init_device_mesh(torch_ranks.device, (2, 2), mesh_dim_names=("a", "b"))
    model = convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), DelayedScaling()).to(torch_ranks.device)
    fully_shard(model[0], mesh=parts["a"])
    fully_shard(model[1], mesh=parts["b"])
    with pytest.raises(ValueError, match=r"on two meshes.*pass group="):
        update_scales(model)
    update_scales(model, whole.get_group())


@on_ranks(2)
def test_a_forgotten_update_is_an_error_on_every_rank():
    model = shard(convert(model_of(), DelayedScaling()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(RuntimeError, match=r"DelayedScaling: .*weight .* call update_scales\(model\)"):
        losses_of(model, optimizer, steps=2, update=False)
    update_scales(model)
    losses_of(model, optimizer, steps=2)
