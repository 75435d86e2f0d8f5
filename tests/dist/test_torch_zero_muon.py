"""ZeRO with Muon: the bits of `qt.Muon` on one device, for any number of ranks, in both stages; its states."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

from qshard.torch_bridge import AdamW, GroupedLinear, Muon, ZeroOptimizer, convert
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.torch_models import Wire
from support.torch_ranks import on_ranks, run
from support.zero import every_stage, in_one_process, loss_of, train

MUON = {"lr": 0.02, "adamw": {"lr": 1e-3}, "rules": {"*.router.*": "adamw"}}
OF_MUON = ["blocks.0.up", "blocks.0.down", "blocks.0.experts.experts", "blocks.1.up", "blocks.1.down"]
EXPERTS, WIDTH = 11, 32


class Block(nn.Module):
    """An MLP without a matrix of the same shape as another, and experts in one parameter, which all get rows."""

    def __init__(self, recipe, experts):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH, bias=False)
        if experts:
            self.router = nn.Linear(WIDTH, EXPERTS)
            self.experts = GroupedLinear(EXPERTS, WIDTH, WIDTH, recipe=recipe, stacked=True)

    def forward(self, x):
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        if hasattr(self, "experts"):
            sizes = torch.full((EXPERTS,), 2, device=x.device)
            rows = x.repeat(4, 1)[: 2 * EXPERTS]
            x = x + self.experts(rows, sizes)[: len(x)] * self.router(x).softmax(-1)[:, :1]
        return x


class Model(nn.Module):
    def __init__(self, recipe, tied):
        super().__init__()
        self.embed = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList([Block(recipe, True), Block(recipe, False)])
        self.head = nn.Linear(WIDTH, 7, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def model_of(recipe, dtype=torch.float32, *, seed=0, tied=False):
    torch.manual_seed(seed)
    model = Model(recipe, tied).to(torch_ranks.device, dtype)
    return convert(model, recipe, filter=lambda layer, name: name != "head" and "router" not in name)


def tied_model_of(recipe, dtype=torch.float32):
    return model_of(recipe, dtype, tied=True)


def made(stage, recipe="CurrentScaling", seed=0, build=model_of, dtype=torch.float32, **options):
    model = build(RECIPES[recipe], dtype, seed=seed) if build is model_of else build(RECIPES[recipe], dtype)
    units = [*model.blocks] if stage == "units" else [] if build is tied_model_of and stage else None
    given = {"optimizer_class": Muon, "shard_weights": bool(stage), "units": units, **MUON, **options}
    return model, ZeroOptimizer(model, **given)


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        assert torch.equal(got[name].view(torch.int32), value.detach().view(torch.int32)), name


IN_FP8 = {"ns_fp8_steps": 3, "ns_fp8_min_side": 16}
CASES = {
    "float32": ("CurrentScaling", torch.float32, {}, {}),
    "bfloat16": ("MXFP8", torch.bfloat16, {"adjust_lr_fn": "match_rms_adamw"}, {"reduce_dtype": torch.bfloat16}),
    "clipped": ("DelayedScaling", torch.float32, {"nesterov": False, "weight_decay": 0.5} | IN_FP8, {"clip": 0.1}),
}


@pytest.mark.parametrize(
    ("kind", "world"),
    [("float32", 3), ("bfloat16", 2), ("clipped", 2), *(pytest.param(k, 1, marks=pytest.mark.slow) for k in CASES)],
)
@on_ranks()
def test_bits_of_one_process(kind):
    """Losses and masters: slices that begin within matrices, and experts in two units of Newton-Schulz."""
    recipe, dtype, muon, options = CASES[kind]
    losses, weights = in_one_process(RECIPES[recipe], 3, dtype, **options, build=model_of, muon={**MUON, **muon})
    assert len(set(losses)) > 1
    clip, options = options.get("clip"), {name: own for name, own in options.items() if name != "clip"}
    for stage in (False, True, "units"):
        model, optimizer = made(stage, recipe, dtype=dtype, **muon, **options)
        assert [group["algorithm"] for group in optimizer.param_groups] == ["muon", "adamw"]
        assert optimizer.param_groups[0]["param_names"] == [f"{name}.weight" for name in OF_MUON]
        assert train(model, optimizer, range(3), clip) == losses, stage
        assert_same(optimizer.full_weights(), weights)


@on_ranks(2)
def test_a_tied_head_is_updated_once_by_adamw():
    losses, weights = in_one_process(RECIPES["CurrentScaling"], 3, torch.float32, build=tied_model_of, muon=MUON)
    for stage in (False, True):
        model, optimizer = made(stage, build=tied_model_of)
        assert model.head.weight is model.embed.weight
        assert train(model, optimizer, range(3)) == losses, stage
        assert_same(optimizer.full_weights(), weights)


@on_ranks(3)
@every_stage
def test_collectives(stage):
    """A bucket is two all-to-alls, also if units divide it. Buckets of one matrix have the same bits.

    A matrix that one rank has whole is not sent, if its bucket has no other.
    """
    weights = []
    for owned in (Muon.owned_elements, 1):
        model, optimizer = made(stage)
        optimizer.owned_elements = owned
        train(model, optimizer, range(1))
        optimizer.zero_grad()
        loss_of(model, 1, dist.get_rank()).backward()
        with Wire() as wire:
            optimizer.step()
        matrices = [w for w in optimizer._weights if w.name.removesuffix(".weight") in OF_MUON]
        split = sum(sum(start < stop for start, stop in w.slices) > 1 for w in matrices)
        assert 0 < split <= len(OF_MUON)
        exchanges = ["alltoall"] * 2 * (split if owned == 1 else 1)
        gradients, codes = ([], []) if stage else (["alltoall"], ["allgather"])
        assert [name for name, *_ in wire.calls] == [*gradients, *exchanges, "allreduce", *codes]
        weights.append(optimizer.full_weights())
    assert_same(*weights)


@on_ranks(3)
@every_stage
def test_ranks_without_elements_take_part(stage):
    """They may own matrices too. Gradients of several passes are added, and `inv_grad_scale` multiplies them."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 2, bias=False)}).to(torch_ranks.device)
    alone = copy.deepcopy(model)
    x = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)).to(torch_ranks.device)
    optimizer = ZeroOptimizer(model, shard_weights=stage, optimizer_class=Muon, lr=0.25)
    assert 0 in [own for flat in optimizer._flats for own in flat.lengths]
    single = Muon(alone.named_parameters(), lr=0.25)
    for _ in range(2):
        for each, passes in ((model, 2), (alone, 1)):
            for _ in range(passes):
                each["b"](each["a"](x)).square().sum().backward()
        optimizer.step(inv_grad_scale=0.5)
        single.step()
        optimizer.zero_grad()
        single.zero_grad()
    assert_same(optimizer.full_weights(), dict(alone.named_parameters()))


def whole_state(model, optimizer):
    full = StateDictOptions(full_state_dict=True)
    states = get_optimizer_state_dict(model, optimizer, options=full)["state"]
    return {
        **get_model_state_dict(model, options=full),
        **{f"{name} {key}": value for name, state in states.items() for key, value in state.items()},
    }


def save(folder):
    model, optimizer = made(False)
    train(model, optimizer, range(2))
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=f"{folder}/saved")
    whole = whole_state(model, optimizer)
    of_muon = {name for name in whole if name.endswith("momentum_buffer")}
    assert of_muon == {f"{name}.weight momentum_buffer" for name in OF_MUON}
    assert not {f"{name}.weight exp_avg_sq" for name in OF_MUON} & whole.keys()
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")


def load(folder, fsdp2):
    if fsdp2:
        model = fully_shard(model_of(RECIPES["CurrentScaling"], seed=1), mesh=torch_ranks.mesh())
        optimizer = Muon(model.named_parameters(), **MUON)
        loss_of(model, 0, dist.get_rank()).backward()
        optimizer.step()
    else:
        model, optimizer = made("units", seed=1)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=f"{folder}/saved")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    whole, wanted = whole_state(model, optimizer), torch.load(f"{folder}/whole.pt")
    assert_same({name: getattr(value, "shard", value) for name, value in whole.items()}, wanted)
    loss_of(model, 2, dist.get_rank()).backward()
    optimizer.step()


def test_a_checkpoint_goes_to_other_ranks_and_to_fsdp2(tmp_path):
    run(3, save, folder=tmp_path)
    run(2, load, folder=tmp_path, fsdp2=False)
    run(2, load, folder=tmp_path, fsdp2=True)


@on_ranks(2)
@every_stage
def test_resumed_runs(stage):
    """From a state dict of this class, and from a full one, in the other stage."""
    model, optimizer = made(stage)
    train(model, optimizer, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    everything = copy.deepcopy(get_state_dict(model, optimizer, options=full))
    losses = train(model, optimizer, range(2, 4))
    again, resumed = made(stage, seed=1)
    resumed.load_state_dict(state)
    assert train(again, resumed, range(2, 4)) == losses
    again, resumed = made(not stage, seed=1)
    from_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, everything[0], options=from_first)
    set_optimizer_state_dict(again, resumed, everything[1], options=from_first)
    assert train(again, resumed, range(2, 4)) == losses


@on_ranks(2)
def test_settings_and_schedules():
    """`settings` may choose an algorithm, and groups have learning rates that schedules change."""

    def settings(name, parameter):
        if name == "blocks.0.up.weight":
            return {"algorithm": "adamw", "lr": 0.5}
        return {"momentum": 0.5} if name == "blocks.1.up.weight" else {}

    model, optimizer = made(False, settings=settings)
    found = [(group["algorithm"], group["lr"], group["momentum"]) for group in optimizer.param_groups]
    assert found == [("muon", 0.02, 0.95), ("adamw", 1e-3, 0.95), ("adamw", 0.5, 0.95), ("muon", 0.02, 0.5)]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step == 0))
    train(model, optimizer, range(1))
    schedule.step()
    before = optimizer.full_weights()
    train(model, optimizer, range(1, 2))
    assert_same(optimizer.full_weights(), before)


@pytest.mark.timeout(60)
@on_ranks(2)
def test_what_is_wrong_on_one_rank_raises_on_all():
    first = dist.get_rank() == 0
    differs = "|rank . differs from rank .: it has another model or other options"
    for bad, error, text in [
        ({"optimizer_class": torch.optim.Muon}, TypeError, r"optimizer_class \(.*Muon.*\) is not Adam, AdamW or Muon"),
        ({"rules": {"*.gate": "adamw"}}, ValueError, r"ZeroOptimizer: .*'\*.gate'"),
        ({"rules": {"*.norm.*": "muon"}}, ValueError, r"blocks.0.norm.weight \(32,\) is not a matrix"),
        ({"adamw": {"beta": 0.9}}, TypeError, r"adamw\['beta'\] is not a setting of AdamW"),
        ({"momentum": 1.5}, ValueError, r"momentum \(1.5\) must be a number"),
        ({"settings": lambda *_: {"decay": 0.0}}, ValueError, r"settings \('decay'\) is not an option of Muon"),
        ({"rules": {"*.up.*": "adamw"}}, ValueError, "differs"),
        ({"ns_steps": 3}, ValueError, "differs"),
    ]:
        with pytest.raises((error, ValueError), match=text + differs):
            made(False, **(bad if first else {}))


@on_ranks(2)
@every_stage
def test_a_state_of_other_algorithms_raises_and_changes_nothing(stage):
    """On all ranks, also if one rank alone loads it."""
    model, optimizer = made(stage)
    other = ZeroOptimizer(model_of(RECIPES["CurrentScaling"]), shard_weights=stage, optimizer_class=AdamW)
    train(model, optimizer, range(1))
    before = copy.deepcopy(optimizer.state_dict())
    state = other.state_dict() if dist.get_rank() == 0 else before
    text = r"the state has groups of \[None\], and this optimizer of \['muon', 'adamw'\]|cannot load its state"
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"the state has groups of \['muon', 'adamw'\], and this optimizer of \[None\]"
    ):
        other.load_state_dict(before)
    losses = train(model, optimizer, range(1, 3))
    again, resumed = made(stage)
    resumed.load_state_dict(before)
    assert train(again, resumed, range(1, 3)) == losses


@pytest.mark.timeout(60)
@on_ranks(2)
def test_other_buckets_on_a_rank_raise_on_all_and_change_nothing():
    model, optimizer = made(True)
    before = optimizer.full_weights()
    loss_of(model, 0, dist.get_rank()).backward()
    optimizer.owned_elements = 1 + dist.get_rank()
    with pytest.raises(ValueError, match=r"owned_elements \([12]\) differs from rank [01]; set it alike on all ranks"):
        optimizer.step()
    assert_same(optimizer.full_weights(), before)
    optimizer.owned_elements = 1
    optimizer.step()
