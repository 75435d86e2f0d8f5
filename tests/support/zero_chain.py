"""Chain of units under ZeRO, with a log of the order of gathers, reductions and runs."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import ZeroOptimizer, convert
from support import torch_ranks
from support.zero import OPTIONS

WIDTH, UNITS = 32, 6
SAME = list(range(UNITS))


class Log(TorchDispatchMode):
    """Log of starts in order: `gather i` of unit i, `reduce`, and `run i` when unit i runs."""

    def __init__(self, optimizer):
        super().__init__()
        self.events, self.most = [], 0
        self._flats = optimizer._flats
        self._buffers = {flat.buffer.untyped_storage()._cdata: i for i, flat in enumerate(self._flats)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_allgather_base_" in str(func):
            self.events.append(f"gather {self._buffers[args[0].untyped_storage()._cdata]}")
        if "alltoall_base_" in str(func):
            self.events.append("reduce")
        out = func(*args, **(kwargs or {}))
        self.most = max(self.most, sum(not flat.freed for flat in self._flats))
        return out


class Unit(nn.Module):
    """A layer that logs its runs."""

    def __init__(self, number):
        super().__init__()
        self.number, self.log = number, None
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        if self.log is not None:
            self.log.events.append(f"run {self.number}")
        return torch.tanh(self.layer(x))


class Chain(nn.Module):
    """Units that run in the order `order`."""

    def __init__(self):
        super().__init__()
        self.units = nn.ModuleList(Unit(i) for i in range(UNITS))
        self.order, self.call, self.fails = list(range(UNITS)), lambda unit, x: unit(x), None

    def forward(self, x):
        for i in self.order:
            if self.fails == i:
                raise ArithmeticError
            x = self.call(self.units[i], x)
        return x


def chain():
    torch.manual_seed(0)
    return convert(Chain().to(torch_ranks.device), CurrentScaling())


def optimizer_of(model, **options):
    return ZeroOptimizer(model, **{**OPTIONS, "shard_weights": True, "units": list(model.units), **options})


def step(model, optimizer, number, log=None, passes=1, backward=True):
    optimizer.zero_grad()
    for unit in model.units:
        unit.log = log
    for micro in range(passes):
        generator = torch.Generator().manual_seed(100 * number + 10 * micro + dist.get_rank())
        x = torch.randn(4, WIDTH, generator=generator).to(torch_ranks.device)
        loss = model(x).square().sum()
        if log is not None:
            log.events.append("backward")
        if backward:
            loss.backward()
    optimizer.step()
    return loss.item()


def logged(model, optimizer, number, **options):
    with Log(optimizer) as log:
        step(model, optimizer, number, log, **options)
    return log


def same_on_all(events):
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, events)
    assert all(one == events for one in everyone)
