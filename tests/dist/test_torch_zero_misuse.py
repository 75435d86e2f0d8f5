"""Misuse of ZeRO raises on every rank: freed weights, moves, later changes of the model, wrappers."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import ZeroOptimizer, convert
from qshard.torch_bridge._zero.placeholders import WeightPlaceholder
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.torch_ranks import on_ranks
from support.zero import OPTIONS, every_stage, model_of, train

READS = {
    "norm": lambda p: p.norm(),
    "arithmetic": lambda p: p + 1,
    "in place": lambda p: p.detach().mul_(2),
    "elements": lambda p: p[0],
    "views": lambda p: p.view(-1),
    "tolist": lambda p: p.tolist(),
    "numpy": lambda p: p.detach().numpy(),
    "asarray": lambda p: np.asarray(p.detach()),
    "dlpack": torch.from_dlpack,
    "numpy's dlpack": np.from_dlpack,
    "address": lambda p: p.data_ptr(),
    "clone": lambda p: p.clone(),
    "data": lambda p: p.data.sum(),
    "dtype": lambda p: p.to(torch.float16),
    "bits": lambda p: p.detach().view(torch.int32),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "save": lambda p: torch.save(p, "/dev/null"),
    "shared memory": lambda p: p.share_memory_(),
    "vector": lambda p: nn.utils.parameters_to_vector([p]),
    "all_reduce": lambda p: dist.all_reduce(p.detach()),
    "initialization": nn.init.normal_,
    "AdamW": lambda p: torch.optim.AdamW([p]).zero_grad() or torch.zeros_like(p),
}


@on_ranks(1, 2)
def test_freed_weights_raise():
    """Plain and quantized weights, before and after steps; metadata stays readable."""
    model = model_of(RECIPES["CurrentScaling"], torch.bfloat16)
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True)
    for step in range(2):
        for name in ("1.up.weight", "1.up.bias", "1.norm.weight", "0.weight"):
            p = model.get_parameter(name)
            assert (type(p), p.dtype, p.requires_grad, p.is_leaf) == (WeightPlaceholder, torch.bfloat16, True, True)
            assert repr(p).startswith(f"WeightPlaceholder(shape={tuple(p.shape)}, dtype=torch.bfloat16")
            for read in READS.values():
                with pytest.raises(RuntimeError, match=rf"{name} .*\(sharded weights\) is freed between uses"):
                    read(p)
        assert sum(p.numel() for p in model.parameters()) == sum(w.numel() for w in optimizer.full_weights().values())
        train(model, optimizer, range(step, step + 1))
    with pytest.raises(RuntimeError, match="is freed between uses"):
        model.share_memory()
    for change in (model.float, lambda: model.to_empty(device=torch_ranks.device)):
        with pytest.raises(RuntimeError, match=r"0.weight cannot be moved after the optimizer was made"):
            change()
    assert model.to(torch_ranks.device) is model
    train(model, optimizer, range(2, 3))


class Lookup(nn.Module):
    """A parent that uses its child's weight without calling the child, or returns its own weight."""

    def __init__(self):
        super().__init__()
        self.embed, self.own = nn.Embedding(8, 8), nn.Parameter(torch.ones(8, 8))

    def forward(self, x):
        return self.own if x is None else self.embed(x) @ self.embed.weight.t()


@on_ranks(2)
def test_weights_of_other_modules():
    tokens = torch.arange(4, device=torch_ranks.device)
    model = Lookup().to(torch_ranks.device)
    optimizer = ZeroOptimizer(model, shard_weights=True)
    with pytest.raises(RuntimeError, match=r"embed.weight .* is freed between .*; call the module that owns it"):
        model(tokens)
    with pytest.raises(RuntimeError, match=r"output of a unit \(Lookup\) is its own weight, which is freed now"):
        model(None)
    del optimizer
    model = Lookup().to(torch_ranks.device)
    optimizer = ZeroOptimizer(model, shard_weights=True, units=[])
    model(tokens).sum().backward()
    optimizer.step()
    attention = nn.MultiheadAttention(8, 2).to(torch_ranks.device)  # It uses its child's weight too.
    optimizer = ZeroOptimizer(attention, shard_weights=True)
    x = torch.randn(3, 2, 8, device=torch_ranks.device)
    attention(x, x, x)[0].square().sum().backward()
    optimizer.step()


@on_ranks(2)
@every_stage
def test_a_move_moves_nothing(stage):
    """A move of any module raises before any tensor moves; a no-op move is allowed."""
    model, same = (model_of(RECIPES["CurrentScaling"]) for _ in range(2))
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
    others = ZeroOptimizer(same, **OPTIONS, shard_weights=stage)
    losses, want = (train(*pair, range(1)) for pair in ((model, optimizer), (same, others)))
    for part, name in ((model, "0.weight"), (model[1].up, "1.up.weight"), (model[1].norm, "1.norm.weight")):
        for move in (part.half, part.double, lambda part=part: part.to("meta")):
            with pytest.raises(
                RuntimeError, match=f"{name} cannot be moved after the optimizer was made, as its maste"
            ):
                move()
    for swap in (False, True):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            assert model.to(torch_ranks.device).float() is model
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        losses += train(model, optimizer, range(1, 3))
        want += train(same, others, range(1, 3))
    assert losses == want
    if not stage:
        assert copy.deepcopy(model).to(torch.device("meta"))[1].up.weight.is_meta


@on_ranks(2)
@every_stage
def test_changes_after_construction(stage):
    """The step raises where it would ignore the change."""

    def freeze(model):
        model[1].norm.requires_grad_(False)

    def replace(model):
        model[1].norm.weight = nn.Parameter(torch.ones(32, device=torch_ranks.device))

    def add(model):
        model[1].register_parameter("scale", nn.Parameter(torch.ones(1, device=torch_ranks.device)))

    def write(model):
        with torch.no_grad():
            model[1].norm.weight.fill_(2.0)

    def assign(model):
        model[1].norm.weight.data = model[1].norm.weight.data.clone()

    def shard(model):
        fully_shard(model[1].norm, mesh=torch_ranks.mesh())

    for change, text in [
        (freeze, "1.norm.weight was frozen after the optimizer was made; freeze it before"),
        (replace, "1.norm.weight was replaced after the optimizer was made; change the model before"),
        (add, "1.scale became trainable after the optimizer was made; add and unfreeze parameters before"),
        (write, "1.norm.weight was written after the optimizer was made; use load_state_dict"),
        (assign, "1.norm.weight was moved after the optimizer was made; call .to"),
        (shard, "1.norm.weight was replaced after the optimizer was made"),
    ]:
        model = model_of(RECIPES["CurrentScaling"])
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
        train(model, optimizer, range(1))
        if stage and change in (write, assign, shard):
            with pytest.raises(RuntimeError, match="is freed between uses"):
                change(model)
            train(model, optimizer, range(1))
            continue
        optimizer.zero_grad()
        change(model)
        with pytest.raises(RuntimeError, match=text):
            optimizer.step()


@on_ranks(2)
@every_stage
def test_wrappers_and_second_optimizers(stage):
    recipe = CurrentScaling()
    for make in (lambda: model_of(recipe), lambda: nn.Linear(4, 4).to(torch_ranks.device)):
        model = make()
        with pytest.raises(ValueError, match=r"model \(DistributedDataParallel\) reduces gradients itself"):
            ZeroOptimizer(DistributedDataParallel(model), shard_weights=stage)
        model = make()
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
        with pytest.raises(ValueError, match="is already trained by another ZeroOptimizer; use one per model"):
            ZeroOptimizer(model, **OPTIONS, shard_weights=not stage)
        with pytest.raises((RuntimeError, NotImplementedError), match=r"ZeroOptimizer: |QuantizedTensor: "):
            DistributedDataParallel(model)(torch.zeros(1, 4, device=torch_ranks.device))
        del optimizer
    if not stage:
        with pytest.raises(ValueError, match=r"\(QuantizedTensor\) has no float32 values; make the model from"):
            ZeroOptimizer(copy.deepcopy(convert_and_take()))


def convert_and_take():
    model = convert(nn.Sequential(nn.Linear(4, 4, bias=False)).to(torch_ranks.device), CurrentScaling())
    ZeroOptimizer(model)
    return model
