"""ZeRO of models on meta: values that no cut changes, and never more than a module whole."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qshard.torch_bridge import ZeroOptimizer, convert
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.torch_models import linears
from support.torch_ranks import on_ranks, run
from support.zero import OPTIONS, Block, train


class Scaled(nn.Module):
    """It fills itself by `init_weights`, and has a buffer to fill."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(32))
        self.register_buffer("offset", torch.empty(32))

    def init_weights(self):
        nn.init.normal_(self.gain, 1.0, 0.1)
        self.offset.fill_(0.25)

    def forward(self, x):
        return x * self.gain + self.offset


def on_meta(recipe, tied=True):
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(7, 32), Block(32), Scaled(), Block(32), nn.Linear(32, 5))
        if tied:
            model[3].up.weight = model[1].up.weight
    return convert(model, RECIPES[recipe], filter=lambda layer, name: layer.out_features != 5)


def values(folder, recipe, stage, units):
    """The same in every file, whoever wrote it."""
    torch.manual_seed(5 + 10 * dist.get_rank())  # That of the first rank counts.
    before = torch.get_rng_state()
    model = on_meta(recipe)
    units = [model[0], model[2]] if units else []
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage, units=units, device=torch_ranks.device)
    assert torch.equal(torch.get_rng_state(), before), "the generator of the program is where it was"
    found = {**optimizer.full_weights(), **{name: b.clone().cpu() for name, b in model.named_buffers()}}
    found = {name: value.cpu() for name, value in found.items()}
    assert found["1.up.weight"].std() > 0.05
    assert not torch.equal(found["1.down.weight"], found["3.down.weight"])
    assert (found["2.offset"] == 0.25).all()
    assert {str(p.device.type) for p in model.parameters()} == {torch_ranks.device}
    if linears(model)[0].seed is not None:
        assert len({layer.seed[0].item() for layer in linears(model)}) == 4
    train(model, optimizer, range(2))
    if dist.get_rank() == 0:
        torch.save(found, f"{folder}/{dist.get_world_size()}{stage}{bool(units)}.pt")


@pytest.mark.parametrize("recipe", ["DelayedScaling", "NVFP4"])
def test_values(recipe, tmp_path):
    for world, stage, units in [(1, False, False), (2, False, False), (3, True, True), (2, True, False)]:
        run(world, values, folder=str(tmp_path), recipe=recipe, stage=stage, units=units)
    first, *others = [torch.load(path) for path in sorted(tmp_path.iterdir())]
    for other in others:
        for name, value in first.items():
            assert torch.equal(value, other[name]), name


@on_ranks(2)
@pytest.mark.parametrize("stage", [False, True])
def test_never_more_than_a_module_is_whole(stage):
    model = on_meta("CurrentScaling", tied=False)
    most = []

    def init(module):
        whole = [p for p in model.parameters() if type(p).__name__ not in ("QuantizedTensor", "WeightPlaceholder")]
        most.append(sum(p.numel() for p in whole if not p.is_meta and p.ndim > 1))
        for p in module.parameters(recurse=False):
            nn.init.ones_(p)
        for b in module.buffers(recurse=False):
            b.zero_()

    optimizer = ZeroOptimizer(model, shard_weights=stage, init=init, device=torch_ranks.device)
    assert max(most) <= 64 * 32 + (0 if stage else 7 * 32), "a weight, and in stage 1 the embedding, which stays"
    assert all((value == 1).all() for value in optimizer.full_weights().values())


@on_ranks(2)
def test_modules_that_do_not_say_how():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.empty(4, device="meta"))

    with pytest.raises(ValueError, match=r"0 \(Bare, on meta\) has no reset_parameters or init_weights; pass init="):
        ZeroOptimizer(nn.Sequential(Bare()), device=torch_ranks.device)
