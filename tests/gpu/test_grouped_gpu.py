"""`GroupedLinear` on GPUs, by grouped ops and without them: against a loop of its layers, captured, and over NCCL."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch")

from qshard import gemm_dispatch  # noqa: E402
from qshard.formats import Usage  # noqa: E402
from qshard.recipes import Recipe, Role  # noqa: E402
from qshard.torch_bridge import GroupedLinear, grouped_linear  # noqa: E402
from qshard.torch_bridge._experts import fallback, tiles  # noqa: E402
from qshard.torch_bridge._nn.operands import LayerQuantizer, operand_spec  # noqa: E402
from qshard.torch_bridge._quantized.target_gpu import multiply_for, target_of  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.formats import RECIPES, nearest  # noqa: E402
from support.torch_ranks import run  # noqa: E402

SIZES, K, N = (300, 0, 17, 640, 128, 3), 512, 256
E, ROWS = len(SIZES), sum(SIZES) + 40
E4M3 = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
ALL = {**{name: nearest(recipe) for name, recipe in RECIPES.items() if not recipe.stateful}, "E4M3": E4M3}
FAST = ["CurrentScaling", "BlockScaling", "MXFP8"]


@pytest.fixture(params=["ops", "no ops"])
def way(request):
    """Products by ops, where cuBLASLt is new enough, and by what there is without them."""
    target = target_of(torch.device("cuda", 0))
    has_ops = any(gemm_dispatch.grouped_runs_on(kind, target.gpu) for kind in ("values", "mxfp8"))
    if request.param == "ops" and not has_ops:
        pytest.skip("this GPU, or its cuBLASLt, has no grouped products")
    if request.param == "no ops":
        target = target._replace(gpu=target.gpu._replace(grouped_cublaslt=0))
    with multiply_for(target):
        yield request.param


def step(layer, x, dy, sizes):
    x = x.clone().requires_grad_()
    y = layer(x, sizes)
    y.backward(dy)
    return [y.detach(), x.grad, *(p.grad for p in layer.parameters())]


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
            for p in expert.parameters():
                p.grad = torch.zeros_like(p)
    return [y, dx, *(p.grad for p in layer.parameters())]


def operands(dtype=torch.bfloat16):
    return (torch.randn(ROWS, size, device="cuda", dtype=dtype) for size in (K, N))


def close(got, want):
    """Products sum in another order, and are rounded to 8 bits of mantissa, twice if scales multiply the result."""
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-6 * b.float().abs().max().item())


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("name", ALL)
def test_a_loop_over_experts(name, where, way):
    torch.manual_seed(0)
    layer = GroupedLinear(E, K, N, recipe=ALL[name], device="cuda", dtype=torch.bfloat16, bias=name in FAST)
    alone, (x, dy) = copy.deepcopy(layer), operands()
    got = step(layer, x, dy, torch.tensor(SIZES, device=where))
    close(got, looped(alone, x, dy))
    for expert, size in zip(layer.experts, SIZES, strict=True):
        assert all(bool(p.grad.any()) == bool(size) for p in expert.parameters())
    assert not got[0][sum(SIZES) :].any()
    assert not got[1][sum(SIZES) :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAST)
def test_dtypes(name, dtype, way):
    torch.manual_seed(0)
    layer = GroupedLinear(E, K, N, recipe=ALL[name], device="cuda", dtype=dtype, bias=True)
    alone, (x, dy) = copy.deepcopy(layer), operands(dtype)
    got = step(layer, x, dy, torch.tensor(SIZES, device="cuda"))
    assert {t.dtype for t in got} == {dtype}
    close(got, looped(alone, x, dy))


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10, reason="of Blackwell")
@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_blackwell(name):
    """Products of codes are those of the CPU's ops, which read the same codes: sums in fp32, in another order."""
    torch.manual_seed(0)
    layer = GroupedLinear(E, K, N, recipe=ALL[name])
    x, dy, sizes = torch.randn(ROWS, K), torch.randn(ROWS, N), torch.tensor(SIZES)
    on_gpu = copy.deepcopy(layer).cuda()
    target = target_of(torch.device("cuda", 0))
    assert gemm_dispatch.grouped_runs_on(name.lower(), target.gpu), target.gpu
    with multiply_for(target):
        want = step(layer, x, dy, sizes)
    for a, b in zip(step(on_gpu, x.cuda(), dy.cuda(), sizes.cuda()), want, strict=True):
        assert float((a.cpu().double() - b.double()).norm()) <= 2.0**-12 * float(b.double().norm())


@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.GRADIENT], ids=str)
@pytest.mark.parametrize("name", ALL)
def test_codes_are_those_of_each_expert_alone(name, role):
    recipe, (x, _) = ALL[name], operands()
    seeds = torch.arange(2 * E, dtype=torch.int32, device="cuda").view(E, 2)
    x *= torch.logspace(-3, 3, ROWS, device="cuda")[:, None]
    where, fits = tiles.tiles_of(
        tiles.tile_rows_of(torch.device("cuda"), recipe), ROWS, torch.tensor(SIZES, device="cuda")
    )
    assert fits.item() == 1
    made, _ = tiles.quantize_experts(x, operand_spec(recipe, role, Usage.BOTH), where, seeds=seeds)
    of_experts = {usage: fallback._of_experts(side, where.stops.tolist()) for usage, side in made.items()}
    start = 0
    for expert, size in enumerate(SIZES):
        own = x[start : start + size]
        start += size
        if not size:
            continue
        expected, _ = LayerQuantizer(recipe, seeds[expert]).quantize(own, role, Usage.BOTH)
        for usage, operand in expected.items():
            for a, b in zip(of_experts[usage][expert].parts, operand.parts, strict=True):
                assert (a is None) == (b is None)
                if a is not None:
                    begin = a[tuple(slice(length) for length in b.shape)]
                    assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (begin, b)))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("name", FAST)
def test_nothing_waits_for_the_device(name, where, way):
    layer = GroupedLinear(E, K, N, recipe=name, device="cuda", dtype=torch.bfloat16, bias=True)
    x = torch.randn(ROWS, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sizes = torch.tensor(SIZES, device=where)
    layer(x, sizes).sum().backward()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        layer(x, sizes).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", FAST)
def test_captured_steps_take_new_sizes(name, way):
    """Forward and backward in one graph; a replay with other sizes and values has the bits of an eager step."""
    torch.manual_seed(0)
    w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16).requires_grad_()
    bias = torch.randn(E, N, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (x, dy), sizes = operands(), torch.tensor(SIZES, device="cuda", dtype=torch.int32)
    x.requires_grad_()

    def both_ways():
        y = grouped_linear(x, w, sizes, name, weight_layout="NK", bias=bias)
        gradients = torch.autograd.grad(y, (x, w, bias), dy)
        return [y.detach(), *gradients]  # y would keep nodes of the stream of the capture alive.

    graph, results = capture(both_ways, warm_up=1)
    for others in (SIZES[::-1], (0, 0, ROWS, 0, 0, 0), (0,) * E):
        with torch.no_grad():
            sizes.copy_(torch.tensor(others))
            x.normal_()
            w.normal_()
        graph.replay()
        for got, want in zip(results, both_ways(), strict=True):
            assert torch.equal(got, want)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.detach().sum()  # An empty graph warns.
        with pytest.raises(ValueError, match="would be constants of the captured CUDA graph"):
            grouped_linear(x, w, torch.tensor(SIZES), name, weight_layout="NK")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "MXFP8", "NVFP4"])
def test_fsdp2_over_nccl(name, world):
    run(world, "dist/test_torch_grouped.py::fsdp2_is_one_process", on="cuda", name=name)
