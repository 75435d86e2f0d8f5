"""Model, losses and single-process baseline for tests of ZeRO."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qshard.torch_bridge import Adam, Muon, ZeroOptimizer, convert, update_scales
from qshard.torch_bridge._fsdp.weight import plain
from support import torch_ranks
from support.torch_models import linears

OPTIONS = {"lr": 0.02, "weight_decay": 0.01, "decoupled_weight_decay": True}
FEW_BITS = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e5m2}
STAGES = (False, True)
every_stage = pytest.mark.parametrize("stage", STAGES)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def model_of(recipe, dtype=torch.float32, width=32, layers=2, seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(7, width), *(Block(width) for _ in range(layers)), nn.Linear(width, 5))
    model = model.to(torch_ranks.device, dtype)
    return convert(model, recipe, filter=lambda layer, name: layer.out_features != 5)


def loss_of(model, step, rank):
    tokens = torch.randint(7, (6, 2), generator=torch.Generator().manual_seed(1000 * step + rank))
    tokens = tokens.to(torch_ranks.device)
    logits = model(tokens[:, 0]).float()
    return nn.functional.cross_entropy(logits, tokens[:, 1] % 5)


def in_one_process(
    recipe, steps, dtype, clip=None, reduce_dtype=torch.float32, *, build=model_of, muon=None, **options
):
    """Train on all ranks' batches sequentially, with plain weights and float32 masters, without ZeRO code.

    Gradients are rounded to `reduce_dtype`. With `clip`, they are clipped to that norm, and norms follow losses. The
    optimizer is `Muon` with the options `muon`, or `Adam`.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    model = build(recipe, dtype)
    seeds = [layer.seed.clone() for layer in linears(model) if layer.seed is not None]
    values = [p.float().clone() for p in map(plain, model.parameters())]
    if muon is None:  # Flatten a weight to one row, along which states have scales.
        values = [each.view(1, -1) if each.ndim > 1 else each for each in values]
    masters = [nn.Parameter(each) for each in values]
    named = [(name, master) for (name, _), master in zip(model.named_parameters(), masters, strict=True)]
    optimizer = Adam(masters, **OPTIONS, **options) if muon is None else Muon(named, **muon)
    losses = [[] for _ in range(world)]
    for step in range(steps):
        total = [None] * len(masters)
        for r in range(world):
            for layer, seed in zip((one for one in linears(model) if one.seed is not None), seeds, strict=True):
                # Random numbers depend on the rank, and layers add this process's rank to the seed.
                layer.seed.copy_(seed + torch.tensor([step, r - rank], dtype=torch.int32, device=seed.device))
            loss = loss_of(model, step, r)
            loss.backward()
            losses[r].append(loss.item())
            for i, p in enumerate(model.parameters()):
                grad = p.grad.to(reduce_dtype).float()
                total[i] = grad if total[i] is None else total[i] + grad
                p.grad = None
        with torch.no_grad():
            for master, grad in zip(masters, total, strict=True):
                master.grad = (grad / torch.tensor(float(world), device=grad.device)).view(master.shape)
            if clip is not None:
                squares = torch.cat([master.grad.flatten() for master in masters]).double().square()
                norm = torch.tensor(math.sqrt(math.fsum(squares.tolist())), device=squares.device)
                nn.utils.clip_grads_with_norm_(masters, clip, norm)
                losses[rank].append(norm.item())
            optimizer.step()
            for master, p in zip(masters, model.parameters(), strict=True):
                plain(p).copy_(master.view(p.shape))
        update_scales(model)
    weights = [
        (name, master.view(p.shape)) for (name, p), master in zip(model.named_parameters(), masters, strict=True)
    ]
    return losses[rank], dict(weights)


def with_zero(recipe, steps, dtype, clip=None, units=None, sent_at_once=None, **options):
    model = model_of(recipe, dtype)
    optimizer = ZeroOptimizer(model, units=units and units(model), **OPTIONS, **options)
    for flat in optimizer._flats if sent_at_once else ():
        flat.gradient.sent_at_once = sent_at_once
    return train(model, optimizer, range(steps), clip), optimizer.full_weights()


def train(model, optimizer, steps, clip=None):
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of(model, step, dist.get_rank())
        loss.backward()
        losses.append(loss.item())
        if clip is not None:
            losses.append(optimizer.clip_grad_norm_(clip).item())
        optimizer.step()
    return losses
