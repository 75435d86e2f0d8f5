"""`GroupedLinear` on GPUs: sizes on the device and on the host, against a loop of its layers; and over NCCL."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from qshard.recipes import Recipe  # noqa: E402
from qshard.torch_bridge import GroupedLinear  # noqa: E402
from support.formats import RECIPES, nearest  # noqa: E402
from support.torch_ranks import run  # noqa: E402

SIZES, K, N = (300, 0, 17, 640, 128, 3), 512, 256
ROWS = sum(SIZES) + 40
E4M3 = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
ALL = {**{name: nearest(recipe) for name, recipe in RECIPES.items() if not recipe.stateful}, "E4M3": E4M3}


def step(layer, x, dy, sizes):
    x = x.clone().requires_grad_()
    y = layer(x, sizes)
    y.backward(dy)
    return [y.detach(), x.grad, *(expert.weight.grad for expert in layer.experts)]


def looped(layer, x, dy):
    y, dx, start = torch.zeros_like(dy), torch.zeros_like(x), 0
    for expert, size in zip(layer.experts, SIZES, strict=True):
        own = slice(start, start + size)
        start += size
        if size:
            mine = x[own].clone().requires_grad_()
            made = expert(mine)
            made.backward(dy[own])
            y[own], dx[own] = made.detach(), mine.grad
        else:
            expert.weight.grad = torch.zeros_like(expert.weight)
    return [y, dx, *(expert.weight.grad for expert in layer.experts)]


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ALL)
def test_a_loop_over_experts(name, where):
    """Codes are the same; products are sums in bfloat16's precision."""
    torch.manual_seed(0)
    layer = GroupedLinear(len(SIZES), K, N, recipe=ALL[name], device="cuda", dtype=torch.bfloat16)
    alone = copy.deepcopy(layer)
    x, dy = (torch.randn(ROWS, size, device="cuda", dtype=torch.bfloat16) for size in (K, N))
    got = step(layer, x, dy, torch.tensor(SIZES, device=where))
    for a, b in zip(got, looped(alone, x, dy), strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6 * b.float().abs().max().item())
    for t, size in zip(got[2:], SIZES, strict=True):
        assert bool(t.any()) == bool(size)
    assert not got[0][sum(SIZES) :].any()
    assert not got[1][sum(SIZES) :].any()


def test_nothing_waits_for_sizes():
    layer = GroupedLinear(len(SIZES), K, N, recipe="MXFP8", device="cuda", dtype=torch.bfloat16)
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sizes = torch.tensor(SIZES, device="cuda")
    layer(x, sizes).sum().backward()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        layer(x, sizes).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8", "NVFP4"])
def test_fsdp2_over_nccl(name):
    run(2, "dist/test_torch_grouped.py::fsdp2_is_one_process", on="cuda", name=name)
