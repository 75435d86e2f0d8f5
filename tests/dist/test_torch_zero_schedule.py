"""When ZeRO's collectives begin: a unit early, in one order on all ranks whatever modules do, in bounded memory."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import ZeroOptimizer, convert
from qshard.torch_bridge.zero import gradient
from qshard.torch_bridge.zero.channel import Channel
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.torch_ranks import on_ranks
from support.zero import OPTIONS, in_one_process, model_of, train, with_zero

WIDTH, UNITS = 32, 6
SAME = list(range(UNITS))


class Log(TorchDispatchMode):
    """What begins, in order: `gather i` and `reduce i` of unit i, and `run i` where its layer multiplies."""

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
    """A layer that says when it runs."""

    def __init__(self, number):
        super().__init__()
        self.number, self.log = number, None
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        if self.log is not None:
            self.log.events.append(f"run {self.number}")
        return torch.tanh(self.layer(x))


class Chain(nn.Module):
    """Units in an order that is given: `order` for those of this pass."""

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


@on_ranks(2, 3)
@pytest.mark.parametrize("change", CHANGES)
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


@on_ranks(2, 4)
@pytest.mark.parametrize("seed", range(6))
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


@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [False, True])
def test_gradients_travel_in_pieces(stage):
    """Cut anywhere, also so small that ranks have none of a piece."""
    recipe, whole = RECIPES["BlockScaling"], gradient.SENT_AT_ONCE
    losses, weights = with_zero(recipe, 2, torch.float32, shard_weights=stage)
    try:
        for at_once in (1000, 4096):
            gradient.SENT_AT_ONCE = at_once
            own_losses, own_weights = with_zero(recipe, 2, torch.float32, shard_weights=stage)
            assert own_losses == losses
            assert all(torch.equal(weight, own_weights[name]) for name, weight in weights.items())
    finally:
        gradient.SENT_AT_ONCE = whole


@on_ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_travel_in_few_bits(stage, dtype):
    """Each rank's is rounded once, and sums are float32. Those of a 16-bit model are rounded already."""
    recipe, dtype = RECIPES["CurrentScaling"], getattr(torch, dtype)
    for model_dtype in [torch.float32, torch.bfloat16][: 1 + (dtype is torch.bfloat16)]:
        losses, weights = in_one_process(recipe, 3, model_dtype, reduce_dtype=dtype)
        own_losses, own_weights = with_zero(recipe, 3, model_dtype, shard_weights=stage, reduce_dtype=dtype)
        assert own_losses == losses
        for name, weight in weights.items():
            assert torch.equal(own_weights[name], weight), name


@on_ranks(2)
def test_bytes_of_gradients_that_travel():
    class Sent(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.sent, self.dtypes = 0, set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "alltoall_base_" in str(func):
                self.dtypes.add(args[1].dtype)
                self.sent += args[1].nbytes
            return func(*args, **(kwargs or {}))

    for dtype in (torch.float32, torch.bfloat16):
        model = chain()
        optimizer = optimizer_of(model, reduce_dtype=dtype)
        with Sent() as mode:
            step(model, optimizer, 0)
        assert mode.dtypes == {dtype}
        assert mode.sent == UNITS * WIDTH * WIDTH * dtype.itemsize


@on_ranks(2)
def test_reduce_dtype_is_checked():
    with pytest.raises(TypeError, match=r"ZeroOptimizer: reduce_dtype"):
        ZeroOptimizer(chain(), reduce_dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rank [01] is not like rank [01]"):
        ZeroOptimizer(chain(), reduce_dtype=torch.bfloat16 if dist.get_rank() else torch.float32)


@on_ranks(2)
@pytest.mark.parametrize("recipe", ["CurrentScaling", "NVFP4"])
def test_memory_of_a_step(recipe):
    """Beyond what is there between steps: codes of two units, gradients of two, and this rank's sums."""
    torch.manual_seed(0)
    width, count = 256, 8
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    model = convert(layers.to(torch_ranks.device, torch.bfloat16), RECIPES[recipe])
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True, reduce_dtype=torch.bfloat16)
    flats, most = optimizer._flats, {"codes": 0, "gradients": 0}

    class Live(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            codes = sum(flat._memory.untyped_storage().nbytes() for flat in flats)
            held = [t for flat in flats for t in (*flat.gradient._held.values(), *flat.gradient._sent.values())]
            most["codes"] = max(most["codes"], codes)
            most["gradients"] = max(most["gradients"], sum(t.untyped_storage().nbytes() for t in held))
            return out

    x = torch.randn(16, width, device=torch_ranks.device, dtype=torch.bfloat16)
    for _ in range(3):
        optimizer.zero_grad()
        with Live():
            model(x).float().square().sum().backward()
            optimizer.step()
    one = max(flat.buffer.numel() for flat in flats)
    assert one < most["codes"] <= 2 * (one + 16)
    of_a_unit = 2 * width * width  # bfloat16, as autograd has made them
    assert of_a_unit <= most["gradients"] <= 2 * of_a_unit
    assert all(flat.freed for flat in flats)
    assert all(flat.gradient._reduced.nbytes == 4 * flat.masters.numel() for flat in flats), "of this rank's part"


def bits_with_slow_streams():
    """On GPUs: whichever stream is late, each waits for what it needs. Memory is used again all the time."""
    # Hooks are made on another stream than forward runs on, and autograd says that it synchronizes these.
    warnings.filterwarnings("ignore", ".*AccumulateGrad node's stream does not match", UserWarning)
    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)  # That of the first unit: `sleep`.
    found = {}
    for late in ("none", "Channel", "computation", "side stream"):
        begin = Channel.begin

        def begin_late(channel, steps, begin=begin):
            return begin(channel, later(steps))

        model = chain()
        model.order = [*range(UNITS), 1, 2]
        if late == "computation":
            for unit in model.units:
                unit.register_forward_pre_hook(sleep)
                unit.register_full_backward_pre_hook(sleep)
        optimizer = optimizer_of(model)
        Channel.begin = begin_late if late == "Channel" else begin
        side = torch.cuda.Stream() if late == "side stream" else torch.cuda.current_stream()
        side.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(side):
                losses = [step(model, optimizer, number, passes=2) for number in range(4)]
        finally:
            Channel.begin = begin
        torch.cuda.current_stream().wait_stream(side)
        found[late] = losses, [weight.cpu() for weight in optimizer.full_weights().values()]
    for late, (losses, weights) in found.items():
        assert losses == found["none"][0], late
        for weight, want in zip(weights, found["none"][1], strict=True):
            assert torch.equal(weight, want), late


def sleep(*_):
    """Some milliseconds of a GPU."""
    torch.cuda._sleep(10_000_000)


def later(steps):
    sleep()
    yield from steps
    sleep()


def captured_graphs_are_refused():
    model = chain()
    optimizer = optimizer_of(model)
    losses = [step(model, optimizer, 0)]
    x = torch.ones(1, WIDTH, device=torch_ranks.device)

    def capture():
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)  # A graph of nothing warns.
            model(x)

    with pytest.raises(RuntimeError, match="cannot be used while a CUDA graph is captured"):
        capture()
    losses.append(step(model, optimizer, 1))
    model = chain()
    optimizer = optimizer_of(model)
    assert [step(model, optimizer, number) for number in range(2)] == losses


def peak_of_a_step():
    """What is allocated beyond what is there between steps: codes of two units, gradients of two, and pieces."""
    torch.manual_seed(0)
    width, count, dtype = 2048, 8, torch.bfloat16
    layers = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    model = convert(layers.to("cuda", dtype), CurrentScaling())
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True, reduce_dtype=dtype)
    x = torch.randn(16, width, device="cuda", dtype=dtype)
    ends = []
    for _ in range(8):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model(x).float().square().sum().backward()
        optimizer.step()
        peak = torch.cuda.max_memory_allocated() - before
        optimizer.zero_grad()
        ends.append((peak, torch.cuda.memory_allocated()))
    assert ends[2:] == [ends[2]] * 6, "the same in each step"
    one, ranks = width * width, dist.get_world_size()
    sums = 4 * count * one // ranks
    # A layer transposes its codes for backward; its operands in bfloat16 where a GPU does not multiply codes.
    assert ends[-1][0] <= sums + 2 * one + 2 * 2 * one + 2 * 2 * one + 4 * one + 2**24, ends


@on_ranks(2)
def test_means_of_one_unit_at_a_time():
    """A step has no second copy of all gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6))).to(torch_ranks.device)
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True)
    model(torch.ones(1, 64, device=torch_ranks.device)).sum().backward()
    most = 0

    class Means(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal most
            most = max(most, sum(weight.master.grad is not None for weight in optimizer._weights))
            return func(*args, **(kwargs or {}))

    with Means():
        optimizer.step()
    assert most == 1
    steps = [state["step"].item() for state in optimizer.state.values()]
    assert steps == [1.0] * 6


@on_ranks(2)
def test_values_are_kept_once():
    """Weights that are gathered as values are made of masters, which are there anyway, for each gather."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch_ranks.device, torch.bfloat16)
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True)
    assert [flat.kept for flat in optimizer._flats] == [0, 0]
    model(torch.ones(1, 64, device=torch_ranks.device, dtype=torch.bfloat16)).sum().backward()
    assert all(flat.shard.untyped_storage().nbytes() == 0 for flat in optimizer._flats)
