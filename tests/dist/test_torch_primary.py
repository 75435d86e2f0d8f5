"""Primary weights: codes in the parameter, masters in the optimizer; bit-exact with float32 weights."""

import copy
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import Adam, WithMasters, convert, quantized_init
from support import torch_ranks
from support.formats import GATHERED, nearest
from support.pairs import turns
from support.torch_models import (
    FRONT,
    Wire,
    assert_gathers_the_whole,
    batch,
    linears,
    losses_of,
    model_of,
    planes,
    shard,
    sizes_for,
)
from support.torch_ranks import on_ranks

SIZES = (32, 96, 64, 32)


def made(recipe, primary, bias=True, dtype=torch.float32, **options):
    model = convert(model_of(bias, dtype, sizes=sizes_for(recipe)), recipe, primary=primary)
    return shard(model, **options)


def masters_of(model):
    state = {name: value for name, value in model.state_dict().items() if isinstance(value, DTensor)}
    return {name: value.full_tensor().detach().clone() for name, value in state.items()}


def assert_same(models):
    for mine, other in zip(*(masters_of(model).values() for model in models), strict=True):
        assert torch.equal(mine, other)
    for mine, other in zip(*map(planes, models), strict=True):
        for a, b in zip(mine, other, strict=True):
            assert (a is None and b is None) or torch.equal(a.float(), b.float())


OPTIMIZERS = {
    "Adam": lambda model: Adam(model.parameters(), lr=1e-2),
    "SGD": lambda model: WithMasters(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": lambda model: WithMasters(model.parameters(), torch.optim.AdamW, lr=1e-2, fused=True),
}
PLAIN = {
    "Adam": OPTIMIZERS["Adam"],
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
}


@turns(1, recipe=GATHERED, world=[1, 2, 3, 4, (2, 2)])
@on_ranks()
def test_losses_are_those_of_float32_shards(recipe):
    """Bit for bit, with the same masters and gathered codes; with micro-batches and uneven or empty shards."""
    recipe = nearest(recipe)
    models = [made(recipe, primary) for primary in (False, True)]
    kind = sorted(OPTIMIZERS)[dist.get_world_size() % 3]
    optimizers = [PLAIN[kind](models[0]), OPTIMIZERS[kind](models[1])]
    before = masters_of(models[1])
    losses = [losses_of(m, o, steps=3, micro_batches=2) for m, o in zip(models, optimizers, strict=True)]
    assert losses[0] == losses[1]
    assert_same(models)
    after = masters_of(models[1])
    assert not any(torch.equal(after[name], old) for name, old in before.items())
    if not recipe.stateful:
        masters = masters_of(models[1])
        assert_gathers_the_whole(models[1], [FRONT.numpy(v) for k, v in masters.items() if k.endswith("weight")])


@pytest.mark.each_value
@on_ranks(1, 2)
@pytest.mark.parametrize("name", ["CurrentScaling", "NVFP4", "DelayedScaling"])
def test_offloaded(name):
    """Masters and codes stay on the CPU and losses are unchanged. Only GPUs copy: tests/gpu."""
    recipe = nearest(GATHERED[name])
    policy = CPUOffloadPolicy(pin_memory=torch_ranks.device == "cuda")
    models = [made(recipe, primary, offload_policy=policy) for primary in (False, True)]
    for kind in ("Adam", "SGD"):
        optimizers = [PLAIN[kind](models[0]), OPTIMIZERS[kind](models[1])]
        losses = [losses_of(m, o, steps=2, micro_batches=2) for m, o in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1]
    for plain, primary in zip(*map(linears, models), strict=True):
        of_weight = primary.weight.to_local().scale_state.primary
        assert of_weight.master.is_cpu
        assert of_weight.codes is None or of_weight.codes.is_cpu
        assert torch.equal(of_weight.master, plain.weight.to_local().shard)


@on_ranks(2)
def test_cut_along_columns():
    along = {"shard_placement_fn": lambda p: Shard(p.ndim - 1)}
    models = [made(GATHERED["MXFP8"], primary, **along) for primary in (False, True)]
    losses = [losses_of(m, Adam(m.parameters(), lr=1e-2)) for m in models]
    assert losses[0] == losses[1]
    assert_same(models)


@on_ranks(2)
def test_what_travels_and_what_is_cast():
    """The optimizer updates scales once a step, and gathers cast nothing."""
    model = made(GATHERED["MXFP8"], True, bias=False)
    optimizer = Adam(model.parameters(), lr=1e-2)
    losses_of(model, optimizer, steps=2, micro_batches=3)
    with Wire() as wire:
        model(batch(columns=32)).square().mean().backward()
    assert wire.of("allreduce") == []
    assert not [name for name in wire.launches if "slices" in name]
    with Wire() as wire:
        optimizer.step()
    assert [dtype for dtype, _ in wire.of("allreduce")] == [torch.int32]


@on_ranks(2, 3)
def test_memory():
    """The parameter has no values; an element takes its codes and a float32 master."""
    model = made(CurrentScaling(), True, bias=False, dtype=torch.bfloat16)
    optimizer = Adam(model.parameters(), lr=1e-2)
    model(batch(columns=20).to(torch.bfloat16)).float().sum().backward()
    optimizer.step()
    for layer in linears(model):
        local = layer.weight.to_local()
        state = local.scale_state
        assert local.shard.is_meta
        assert state.primary.master.dtype == torch.float32
        assert state.primary.codes.dtype == torch.uint8
        assert state.primary.codes.numel() <= local.numel() + local.shape[1]
        assert {value.dtype for value in optimizer.state[layer.weight].values()} == {torch.float32}


@on_ranks(2)
def test_what_a_sealed_weight_refuses():
    model = made(CurrentScaling(), True)
    model(batch()).sum().backward()
    weight = model[0].weight
    for wrong in (
        lambda: torch.optim.SGD(model.parameters(), lr=0.1).step(),
        lambda: torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False).step(),
        lambda: weight.mul_(2),
        lambda: weight.to_local().norm(),
        lambda: weight.full_tensor(),
        lambda: weight.to_local() + 1,
    ):
        with (
            torch.no_grad(),
            pytest.raises(NotImplementedError, match=r"0.weight .primary. has only codes.*WithMasters"),
        ):
            wrong()
    with pytest.raises(NotImplementedError, match="move the model before its first forward"):
        model.to(torch.float64)
    zeros = torch.zeros_like(weight)
    assert type(zeros.to_local()) is torch.Tensor
    assert "primary" in repr(weight.to_local())
    model.zero_grad()
    losses_of(model, Adam(model.parameters(), lr=1e-2), steps=1)  # The model is unchanged.


@on_ranks(2)
def test_a_copy_of_another_weight_has_its_values():
    """Sealed or not, on either side."""
    recipe = CurrentScaling()
    sealed, other, unsealed, values = (made(recipe, primary) for primary in (True, True, True, False))
    for model in (sealed, other):
        model(batch())
    optimizer = Adam(other.parameters(), lr=1e-2)
    losses_of(other, optimizer, steps=1)
    want = {name: value for name, value in masters_of(other).items() if name.endswith("weight")}
    assert not torch.equal(want["0.weight"], masters_of(sealed)["0.weight"])
    for target in (sealed, unsealed, values):
        with torch.no_grad():
            for mine, its in zip(linears(target), linears(other), strict=True):
                mine.weight.copy_(its.weight)
        assert all(torch.equal(masters_of(target)[name], value) for name, value in want.items())
        assert_gathers_the_whole(target, [FRONT.numpy(value) for value in want.values()])
    with torch.no_grad():
        for mine, its in zip(linears(sealed), linears(made(recipe, True)), strict=True):
            mine.weight.copy_(its.weight)
    assert torch.equal(masters_of(sealed)["0.weight"], masters_of(made(recipe, False))["0.weight"])


@on_ranks(2)
def test_norms_and_averages_of_sealed_weights():
    """Gradient norms are right; weight norms and averages raise, and work on the state dict."""
    model = made(CurrentScaling(), True)
    model(batch()).sum().backward()
    parameters, weight = list(model.parameters()), model[0].weight
    locals_ = [p.to_local() for p in parameters]
    for wrong in (
        lambda: nn.utils.get_total_norm(parameters),
        lambda: torch._foreach_norm(locals_),
        lambda: torch._foreach_mul_(locals_, 0.5),
        lambda: torch._foreach_copy_(locals_, [torch.zeros_like(p) for p in locals_]),
        lambda: torch.linalg.vector_norm(weight),
        lambda: weight.data.mul_(0.5),
        lambda: torch.zeros_like(weight).lerp_(weight, 0.5),
        lambda: weight.detach().clone(),
        lambda: copy.deepcopy(weight),
        lambda: torch.equal(weight.to_local(), weight.to_local()),
    ):
        with (
            torch.no_grad(),
            pytest.raises(NotImplementedError, match=r"primary. has only codes.* values in state_dict"),
        ):
            wrong()
    with pytest.raises(ValueError, match=r"data of 0.weight .primary. is the master .* with load_state_dict"):
        weight.to_local().data = torch.zeros(1)
    average = {name: torch.zeros_like(value).lerp_(value, 0.5) for name, value in model.state_dict().items()}
    assert torch.equal(average["0.weight"].full_tensor(), masters_of(model)["0.weight"] / 2)


def test_primary_weights_want_to_be_sharded():
    model = convert(nn.Sequential(nn.Linear(32, 32)), CurrentScaling(), primary=True)
    with pytest.raises(ValueError, match=r"linear: 0.weight .primary. is not gathered; call fully_shard"):
        model(torch.ones(1, 32))


@on_ranks(1, 3)
def test_a_write_to_a_master_is_found():
    """Every write that PyTorch counts is found; `load_state_dict` accepts the written values as the weight."""
    model = made(CurrentScaling(), True)
    model(batch())
    state = model.state_dict()
    for write in (lambda t: t.mul_(2), lambda t: t.to_local().mul_(2)):
        with torch.no_grad():
            write(state["0.weight"])
        model[0].reshard()
        with pytest.raises(RuntimeError, match=r"master of 0.weight .primary. was written directly.*load_state_dict"):
            model[0].unshard()
        model.load_state_dict(state)
        values = [FRONT.numpy(v) for k, v in masters_of(model).items() if k.endswith("weight")]
        assert_gathers_the_whole(model, values)


@turns(1, name=["CurrentScaling", "NVFP4", "DelayedScaling"], world=[2, 3])
@on_ranks()
def test_checkpoints(name, tmp_path):
    """Masters are saved as plain tensors, load into float32 shards and back, and training continues bit for bit."""
    recipe = nearest(GATHERED[name])
    model, plain, other = (made(recipe, primary) for primary in (True, False, True))
    optimizer = Adam(model.parameters(), lr=1e-2)
    losses_of(model, optimizer, steps=2)
    state = get_model_state_dict(model)
    dcp.save({"model": state}, checkpoint_id=tmp_path / "one")
    kept = copy.deepcopy(optimizer.state_dict())
    again = get_model_state_dict(plain)
    dcp.load({"model": again}, checkpoint_id=tmp_path / "one")
    plain.load_state_dict(again, strict=False)
    if not recipe.stateful:
        assert_same([plain, model])
    losses_of(other, Adam(other.parameters(), lr=1e-2), steps=1)  # Sealed, with other values.
    target = get_model_state_dict(other)
    dcp.load({"model": target}, checkpoint_id=tmp_path / "one")
    set_model_state_dict(other, target)
    resumed = Adam(other.parameters(), lr=1e-2)
    resumed.load_state_dict(kept)
    if not recipe.stateful:
        assert_same([other, model])
        assert losses_of(other, resumed, steps=2) == losses_of(model, optimizer, steps=2)


@on_ranks(2)
def test_optimizers_of_torch_keep_their_states(tmp_path):
    model = made(CurrentScaling(), True)
    optimizer = OPTIMIZERS["AdamW"](model)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    losses_of(model, optimizer, steps=1)
    schedule.step()
    assert optimizer.inner.param_groups[0]["lr"] == 1e-2
    losses_of(model, optimizer, steps=1)
    assert optimizer.inner.param_groups[0]["lr"] == 5e-3
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        assert full["state"]["0.weight"]["exp_avg"].shape == (104, 20)
    weights = copy.deepcopy(masters_of(model))
    other = made(CurrentScaling(), True)
    for name, value in other.state_dict().items():
        part = dist.tensor.distribute_tensor(weights[name], value.device_mesh, value.placements)
        with torch.no_grad():
            value.copy_(part)
    resumed = OPTIMIZERS["AdamW"](other)
    full = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(other, resumed, full)
    assert losses_of(other, resumed, steps=2) == losses_of(model, optimizer, steps=2)


def initialized(recipe, init):
    torch.manual_seed(0)
    with torch.device("meta"), quantized_init(recipe):
        model = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 64))
    shard(model)
    model.to_empty(device=torch_ranks.device)
    torch.manual_seed(3)
    warnings.filterwarnings("ignore", "DTensor random operators may not have complete support", UserWarning)
    for layer in linears(model):
        init(layer.weight) if init else layer.reset_parameters()
        nn.init.zeros_(layer.bias)
    return model


def made_on_meta(folder, recipe):
    for i, init in enumerate((None, nn.init.normal_, nn.init.trunc_normal_, nn.init.xavier_uniform_)):
        model = initialized(recipe, init)
        values = masters_of(model)
        assert all(0.01 < v.std() < 2 for k, v in values.items() if k.endswith("weight"))
        model(batch(columns=32)).sum().backward()
        assert_gathers_the_whole(model, [FRONT.numpy(v) for k, v in values.items() if k.endswith("weight")])
        if not (folder / f"values{i}").exists() and dist.get_rank() == 0:
            torch.save(values, folder / f"values{i}")
        dist.barrier()
        for name, want in torch.load(folder / f"values{i}").items():
            assert torch.equal(values[name], want), (i, name)


def test_each_rank_makes_its_own_shard_alone(tmp_path):
    """Values do not depend on the number of ranks; no rank allocates a whole weight."""
    for world in (1, 2, 3, (2, 2)):
        torch_ranks.run(world, made_on_meta, folder=tmp_path, recipe="MXFP8")


@on_ranks(2)
def test_mixed_precision_and_clipping():
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    models = [made(CurrentScaling(), primary, mp_policy=policy) for primary in (False, True)]
    losses = []
    for model in models:
        optimizer, mine = Adam(model.parameters(), lr=1e-2), []
        for step in range(3):
            loss = model(batch(step)).float().square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
            mine.append(loss.item())
        losses.append(mine)
    assert losses[0] == losses[1]
    assert_same(models)
