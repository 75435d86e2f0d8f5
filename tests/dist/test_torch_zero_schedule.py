"""When ZeRO's collectives begin: a unit early, in one order on all ranks whatever modules do, in bounded memory."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from qshard.torch_bridge import ZeroOptimizer
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.pairs import turns
from support.torch_ranks import on_ranks
from support.zero import OPTIONS, model_of, train
from support.zero_chain import SAME, UNITS, WIDTH, Log, chain, logged, optimizer_of, same_on_all, step


@on_ranks(2, 4)
def test_gathers_begin_one_unit_early():
    """In forward and in backward, where sums of gradients begin before the next unit runs, and end after it."""
    model = chain()
    optimizer = optimizer_of(model)
    logged(model, optimizer, 0)
    log = logged(model, optimizer, 1)
    middle = log.events.index("backward")
    forward, backward = log.events[:middle], log.events[middle + 1 :]
    last = UNITS - 1
    early = itertools.chain.from_iterable((f"gather {i + 1}", f"run {i}") for i in range(last))
    assert forward == ["gather 0", *early, f"run {last}"]
    # The last unit has stayed. Of each other one the gather begins before the sum of the one that runs meanwhile.
    late = itertools.chain.from_iterable((f"gather {i}", "reduce") for i in reversed(range(last)))
    assert backward == [*late, "reduce"]
    assert log.most == 2, "units whole at any time"
    same_on_all(log.events)
    with torch.no_grad(), Log(optimizer) as log:
        model(torch.ones(1, WIDTH, device=torch_ranks.device))
    assert log.events == [f"gather {i}" for i in range(UNITS)]
    assert all(flat.freed for flat in optimizer._flats)


def twice(model):
    model.order = [0, 1, 2, 1, 2, 3, 3, 4, 5]


def backwards(model):
    model.order = model.order[::-1]


def skipping(model):
    model.order = [0, 2, 5]


def recomputed(model):
    model.call = lambda unit, x: checkpoint(unit, x, use_reentrant=False)


def recomputed_reentrant(model):
    model.call = lambda unit, x: checkpoint(unit, x if x.requires_grad else x.requires_grad_(), use_reentrant=True)


def recomputed_together(model):
    """Three units in one region."""

    def forward(x):
        for part in (model.units[:3], model.units[3:]):
            x = checkpoint(part_of(part), x, use_reentrant=False)
        return x

    model.forward = forward


def part_of(units):
    def run(x):
        for unit in units:
            x = unit(x)
        return x

    return run


def usual(model):
    model.order, model.call = list(range(UNITS)), lambda unit, x: unit(x)
    model.__dict__.pop("forward", None)


CHANGES = {f.__name__: f for f in (twice, backwards, skipping, recomputed, recomputed_reentrant, recomputed_together)}


@turns(1, change=list(CHANGES), world=[2, 3])
@on_ranks()
def test_passes_that_are_not_as_the_one_before(change):
    """Bits are those of stage 1, which gathers nothing; ranks begin the same collectives; nothing stays gathered."""
    losses = []
    for stage in (False, True):
        model = chain()
        optimizer = optimizer_of(model, shard_weights=stage)
        losses.append([])
        for number, changed in enumerate([False, False, True, True, False, True, False, False]):
            (CHANGES[change] if changed else usual)(model)
            with Log(optimizer) as log:
                losses[-1].append(step(model, optimizer, number, log))
            same_on_all(log.events)
            if stage:
                assert all(flat.freed and not flat.in_use for flat in optimizer._flats)
                # One that runs, one ahead; and one that backward has begun with, until its gradient is whole.
                assert log.most <= (3 if change in ("twice", "recomputed_together") else 2), number
    assert losses[0] == losses[1]


@on_ranks(2)
def test_bits_of_other_ways_to_run():
    """Accumulation, passes without backward, evaluation, parts of the model, steps amid; against units of all."""
    found = []
    for units in (True, False):
        model = chain()
        optimizer = optimizer_of(model, **({} if units else {"units": []}))
        losses = []
        x = torch.ones(2, WIDTH, device=torch_ranks.device)
        for number in range(3):
            losses.append(step(model, optimizer, 3 * number, passes=3))
            losses.append(model(x).sum().item())  # With grad, and never backward.
            with torch.no_grad():
                losses.append(model.eval()(x).sum().item())
            model.train()
            losses.append(step(model, optimizer, 3 * number + 1, backward=False))
            both = [model(x), model(2 * x)]
            optimizer.zero_grad()  # After forward, as some programs do.
            (both[0] * both[1]).sum().backward()
            losses.append(optimizer.clip_grad_norm_(0.1).item())
            optimizer.step()
            optimizer.zero_grad()
            if units:
                model.units[2](x).sum().backward()
            else:
                model.order = [2]
                model(x).sum().backward()
                usual(model)
            optimizer.step()
            optimizer.load_state_dict(optimizer.state_dict())
        found.append((losses, optimizer.full_weights()))
    assert found[0][0] == found[1][0]
    for name, weight in found[0][1].items():
        assert torch.equal(weight, found[1][1][name]), name


def run_into(where, model, x):
    """An error amid a pass, after some units."""

    def fail(grad):
        raise ArithmeticError

    if where == "forward":
        model.order, model.fails = SAME, 3
        model(x)
    else:
        model.order = SAME
        model.call = lambda unit, x: unit(x) if unit.number != 3 else hooked(unit(x))

        def hooked(y):
            y.register_hook(fail)
            return y

        model(x).sum().backward()


def random_program(model, optimizer, seed):
    """Some ways to use a model, alike on all ranks. Returns what they give."""
    draw, results = random.Random(seed), []
    for number in range(12):
        kind = draw.choice(["train"] * 4 + ["evaluate", "grads of two", "raise", "raise", "clip", "part", "load"])
        model.order = [draw.randrange(UNITS) for _ in range(draw.randrange(1, 8))] if draw.random() < 0.3 else SAME
        model.call = draw.choice([lambda unit, x: unit(x), lambda unit, x: checkpoint(unit, x, use_reentrant=False)])
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(2 * number + dist.get_rank()))
        x = x.to(torch_ranks.device)
        if kind == "evaluate":
            with torch.no_grad():
                results.append(model(x).sum().item())
        elif kind == "grads of two":
            (model(x) * model(x + 1)).sum().backward()
        elif kind == "raise":
            with pytest.raises(ArithmeticError):
                run_into(draw.choice(["forward", "backward"]), model, x)
            model.fails = None
            optimizer.zero_grad()
        elif kind == "load":
            optimizer.load_state_dict(optimizer.state_dict())
        elif kind == "part":
            model.call, model.order = lambda unit, x: unit(x), [draw.randrange(UNITS)]
            part = model.units[model.order[0]] if len(optimizer._flats) > 1 else model
            part(x).sum().backward()
        else:
            model(x).square().sum().backward()
            if kind == "clip":
                results.append(optimizer.clip_grad_norm_(0.1).item())
            optimizer.step()
            if kind == "clip" or draw.random() < 0.7:
                optimizer.zero_grad()
    return results


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "world"),
    [
        pytest.param(i, n, marks=[] if (i, n) in ((0, 2), (1, 2), (2, 4)) else pytest.mark.slow)
        for i in range(6)
        for n in (2, 4)
    ],
)
@on_ranks()
def test_random_programs(seed):
    """Units that come and go have the bits of one unit of all, and nothing is left in use."""
    found = []
    for units in (True, False):
        model = chain()
        optimizer = optimizer_of(model, **({} if units else {"units": []}))
        with Log(optimizer) as log:
            results = random_program(model, optimizer, seed)
        same_on_all(log.events)
        optimizer.step()
        assert all(flat.freed and not flat.in_use for flat in optimizer._flats)
        found.append((results, optimizer.full_weights()))
    assert found[0][0] == found[1][0]
    for name, weight in found[0][1].items():
        assert torch.equal(weight, found[1][1][name]), name


@on_ranks(2)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception(where):
    """Amid a pass: the next one begins anew, with the bits of a run without, and the same collectives."""
    losses = []
    for breaks in (False, True):
        model = chain()
        optimizer = optimizer_of(model)
        losses.append([])
        for number in range(4):
            if breaks and number > 1:
                x = torch.ones(1, WIDTH, device=torch_ranks.device)
                with Log(optimizer) as log, pytest.raises(ArithmeticError):
                    run_into(where, model, x)
                model.fails = None
                usual(model)
                same_on_all(log.events)
            log = logged(model, optimizer, number)
            same_on_all(log.events)
            assert log.most <= 2 + (breaks and number > 1 and where == "backward")
            losses[-1].append([p.sum().item() for p in optimizer.full_weights().values()])
    assert losses[0] == losses[1]


@on_ranks(2)
def test_nested_units():
    """The outer one stays while inner ones come and go."""
    losses = []
    for units in (lambda model: [], list, lambda model: [model[1], model[1].up, model[2], model[2].down]):
        model = model_of(RECIPES["CurrentScaling"])
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True, units=units(model))
        losses.append(train(model, optimizer, range(4)))
        assert all(flat.freed for flat in optimizer._flats)
    assert losses[0] == losses[1] == losses[2]
