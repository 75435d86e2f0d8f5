"""ZeRO's communication and memory: dtypes and chunks of gradients, and peak memory of a step."""

from __future__ import annotations

import contextlib
import copy
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import ZeroOptimizer, convert
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.torch_ranks import on_ranks
from support.zero import OPTIONS, in_one_process, with_zero
from support.zero_chain import UNITS, WIDTH, chain, optimizer_of, step


@pytest.mark.each_value
@on_ranks(2, 3)
@pytest.mark.parametrize("stage", [False, True])
def test_gradients_travel_in_parts(stage):
    """Chunks end anywhere, and may be so small that some ranks have no element of a chunk."""
    recipe = RECIPES["BlockScaling"]
    losses, weights = with_zero(recipe, 2, torch.float32, shard_weights=stage)
    for at_once in (1000, 4096):
        own_losses, own_weights = with_zero(recipe, 2, torch.float32, shard_weights=stage, sent_at_once=at_once)
        assert own_losses == losses
        assert all(torch.equal(weight, own_weights[name]) for name, weight in weights.items())


@pytest.mark.each_value
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("stage", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_travel_in_few_bits(stage, dtype):
    """Each rank's gradient is rounded once and summed in float32; gradients of a 16-bit model are already rounded."""
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


@on_ranks(1)
@pytest.mark.parametrize("stage", [False, True])
def test_gradients_of_two_passes_are_added_in_float32(stage):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False)).to(torch_ranks.device, torch.bfloat16)
    alone = copy.deepcopy(model)
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
    grads = []
    for _ in range(2):
        x = torch.randn(16, 64, device=torch_ranks.device, dtype=torch.bfloat16)
        for each in (model, alone):
            each(x).float().square().sum().backward()
        grads.append(alone[0].weight.grad)
        alone.zero_grad()
    norm, want = optimizer.clip_grad_norm_(math.inf), sum(grad.double() for grad in grads).norm()
    assert abs(norm - want) < 1e-7 * want
    assert abs(sum(grads).double().norm() - want) > 1e-6 * want  # A bfloat16 sum would differ.


@on_ranks(2)
def test_reduce_dtype_is_checked():
    with pytest.raises(TypeError, match=r"ZeroOptimizer: reduce_dtype"):
        ZeroOptimizer(chain(), reduce_dtype=torch.int32)
    with pytest.raises(ValueError, match=r"rank [01] differs from rank [01]"):
        ZeroOptimizer(chain(), reduce_dtype=torch.bfloat16 if dist.get_rank() else torch.float32)


@on_ranks(2)
@pytest.mark.parametrize("recipe", ["CurrentScaling", "NVFP4"])
def test_memory_of_a_step(recipe):
    """Beyond the memory between steps: codes of two units, gradients of two, and this rank's sums."""
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
            held = [t for flat in flats for t in (*flat.gradient._unreduced.values(), *flat.gradient._sent.values())]
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
    of_a_unit = 2 * width * width  # bfloat16, as autograd returns them
    assert of_a_unit <= most["gradients"] <= 2 * of_a_unit
    assert all(flat.freed for flat in flats)
    assert all(flat.gradient._reduced.nbytes == 4 * flat.masters.numel() for flat in flats), "of this rank's part"


def bits_with_slow_streams():
    """On GPUs: each stream waits for its inputs, whichever stream is late, while memory is reused throughout."""
    # Hooks run on another stream than forward, and autograd warns that it synchronizes them.
    warnings.filterwarnings("ignore", ".*AccumulateGrad node's stream does not match", UserWarning)
    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)  # From `sleep` on the first unit.
    found = {}
    for late in ("none", "collectives", "computation", "side stream"):
        model = chain()
        model.order = [*range(UNITS), 1, 2]
        if late == "computation":
            for unit in model.units:
                unit.register_forward_pre_hook(sleep)
                unit.register_full_backward_pre_hook(sleep)
        optimizer = optimizer_of(model)
        side = torch.cuda.Stream() if late == "side stream" else torch.cuda.current_stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), SlowCollectives() if late == "collectives" else contextlib.nullcontext():
            losses = [step(model, optimizer, number, passes=2) for number in range(4)]
        torch.cuda.current_stream().wait_stream(side)
        found[late] = losses, [weight.cpu() for weight in optimizer.full_weights().values()]
    for late, (losses, weights) in found.items():
        assert losses == found["none"][0], late
        for weight, want in zip(weights, found["none"][1], strict=True):
            assert torch.equal(weight, want), late


def sleep(*_):
    """Keep a GPU busy for some milliseconds."""
    torch.cuda._sleep(10_000_000)


class SlowCollectives(TorchDispatchMode):
    """Keeps the stream of each collective busy before and after it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        sleep()
        out = func(*args, **(kwargs or {}))
        sleep()
        return out


def captured_graphs_are_refused():
    model = chain()
    optimizer = optimizer_of(model)
    losses = [step(model, optimizer, 0)]
    x = torch.ones(1, WIDTH, device=torch_ranks.device)

    def capture():
        with torch.no_grad(), torch.cuda.graph(torch.cuda.CUDAGraph()):
            x.add_(1)  # An empty graph warns.
            model(x)

    with pytest.raises(RuntimeError, match="do not support CUDA graph capture"):
        capture()
    losses.append(step(model, optimizer, 1))
    model = chain()
    optimizer = optimizer_of(model)
    assert [step(model, optimizer, number) for number in range(2)] == losses


def peak_of_a_step():
    """Peak memory beyond that between steps: codes of two units, gradients of two, and chunks."""
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
    # A layer transposes its codes for backward, or its bfloat16 operands where the GPU does not multiply codes.
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
    """Weights gathered as values are cast from the masters in each gather, so no second copy is stored."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(torch_ranks.device, torch.bfloat16)
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=True)
    assert [flat.stored_bytes for flat in optimizer._flats] == [0, 0]
    model(torch.ones(1, 64, device=torch_ranks.device, dtype=torch.bfloat16)).sum().backward()
    assert all(flat.shard.untyped_storage().nbytes() == 0 for flat in optimizer._flats)
