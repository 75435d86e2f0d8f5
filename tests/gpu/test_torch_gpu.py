"""PyTorch on a GPU: streams, CUDA graphs, FP8 matrix products and their fallback, the compiler, FSDP2 over NCCL."""

import copy

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from qshard import reference  # noqa: E402
from qshard.formats import (  # noqa: E402
    FP8_E4M3,
    FP8_E5M2,
    FP8_1x128,
    FP8_128x128,
    MXFP8_32x32,
    NVFP4_16x16,
    Usage,
)
from qshard.recipes import MXFP8, CurrentScaling  # noqa: E402
from qshard.torch_bridge import Linear, linear, quantize, update_delayed  # noqa: E402
from qshard.torch_bridge._ops.bind import into, ops  # noqa: E402
from qshard.torch_bridge._quantized.gemm import Operand, matmul  # noqa: E402
from support.awkward import KINDS, TAME, assert_bits_equal, awkward_values  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.formats import GATHERED, NAMED, RECIPES  # noqa: E402
from support.fronts import TorchFront  # noqa: E402
from support.torch_ranks import run  # noqa: E402

FRONT = TorchFront("cuda")
RECIPE = CurrentScaling()


def assert_is_the_reference(q, x, fmt):
    expected = reference.quantize(x, fmt, Usage.BOTH)
    for name in ("rowwise", "columnwise"):
        got, want = getattr(q, name), getattr(expected, name)
        assert_bits_equal(FRONT.numpy(got.data), want.data, f"{name}.data")
        assert_bits_equal(FRONT.numpy(got.scale_inv), want.scale_inv, f"{name}.scale_inv")


def test_work_goes_to_the_current_stream():
    """On the default stream, the kernels would read x before it is written."""
    values = awkward_values((257, 129), seed=1)
    x, new = torch.zeros(257, 129, device="cuda"), FRONT.array(values)
    given = torch.empty(257, 129, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        x.copy_(new)
        q = quantize(x, FP8_E4M3, usage=Usage.BOTH)
        scale = torch.ones((), device="cuda")
        into(given).cast_tensor(x, scale, element="float8_e4m3fn")
    side.synchronize()
    assert_is_the_reference(q, values, FP8_E4M3)
    assert_bits_equal(FRONT.numpy(given), reference.encode(values, FP8_E4M3.element))


@pytest.mark.parametrize("fmt", [fmt for fmt in NAMED if fmt.block is None], ids=str)
def test_quantize_replays_from_a_cuda_graph(fmt):
    x = torch.ones(96, 80, device="cuda")
    graph, q = capture(lambda: quantize(x, fmt, usage=Usage.BOTH), warm_up=2)
    for seed in range(3):
        values = awkward_values((96, 80), seed)
        x.copy_(FRONT.array(values))
        graph.replay()
        assert_is_the_reference(q, values, fmt)


def test_training_replays_from_a_cuda_graph():
    torch.manual_seed(0)
    layer = Linear(64, 48, recipe=RECIPE, device="cuda")
    x = torch.randn(32, 64, device="cuda", requires_grad=True)

    def step():
        y = layer(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        return (y.detach(), *gradients)  # Not the autograd graph: its nodes belong to the stream of this call.

    graph, replayed = capture(step, warm_up=2)
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(32, 64))
            layer.weight.mul_(1.5)
        graph.replay()
        for got, want in zip(replayed, step(), strict=True):
            assert torch.equal(got, want)


def operand(rows, k, fmt, seed, usage=Usage.ROWWISE):
    """A plane whose contracted axis has length k."""
    shape = (rows, k) if usage is Usage.ROWWISE else (k, rows)
    q = quantize(FRONT.array(awkward_values(shape, seed, kinds=["normal", "zeros", "ties"])), fmt, usage=usage)
    return Operand(fmt, q.parts(usage), usage)


def exact(operand):
    """Its values, `[rows, k]`, by the reference's table of codes."""
    fmt, parts = operand.format, operand.parts
    values = operand.values(torch.float32).double().cpu().numpy()  # Tested against the reference elsewhere.
    if fmt.block is None:
        codes = reference.decode(parts.data.cpu().numpy(), fmt.element).astype(np.float64)
        values = codes * parts.scale_inv.item()
    return values


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize("formats", [(FP8_E4M3, FP8_E4M3), (FP8_E5M2, FP8_E4M3)], ids=str)
@pytest.mark.parametrize("shape", [(16, 16, 16), (64, 48, 256), (32, 128, 1024)], ids=str)
def test_tensor_cores_compute_the_product(shape, formats, fast):
    """Hopper's FP8 tensor cores sum 32 products at a time in 14 bits, and move that to fp32 every 128 unless `fast`.

    So each product may lose 2^-13 of the largest, each sum before it 2^-13 of the sum of sizes, and the result is
    rounded once, to bfloat16.
    """
    m, n, k = shape
    a, b = operand(m, k, formats[0], 0), operand(n, k, formats[1], 1)
    assert calls_of_gemms(lambda: matmul(a, b, torch.bfloat16, fast=fast)) == 1
    got = matmul(a, b, torch.bfloat16, fast=fast).double().cpu().numpy()
    product, size = exact(a) @ exact(b).T, np.abs(exact(a)) @ np.abs(exact(b)).T
    largest = np.abs(exact(a)[:, None] * exact(b)).max(axis=-1)
    sums = max(1, k // 32) if fast else 4
    lost = 2.0**-13 * (k * largest + sums * size)
    assert (np.abs(got - product) <= lost + 2.0**-8 * np.abs(product)).all()


def calls_of_gemms(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as trace:
        function()
    return sum(event.count for event in trace.key_averages() if event.key.startswith("qshard::gemm"))


ROW, COLUMN = Usage.ROWWISE, Usage.COLUMNWISE
THREE_PRODUCTS = {
    "y": ((FP8_1x128, ROW), (FP8_128x128, ROW)),
    "grad_x": ((FP8_1x128, ROW), (FP8_128x128, COLUMN)),
    "grad_w": ((FP8_1x128, COLUMN), (FP8_1x128, COLUMN)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", THREE_PRODUCTS)
@pytest.mark.parametrize("shape", [(128, 256, 512), (16, 128, 1024), (384, 128, 512), (128, 128, 640)], ids=str)
def test_tensor_cores_compute_the_product_in_blocks(shape, name, dtype):
    """Hopper's FP8 tensor cores sum the products of a block in 14 bits; blocks are scaled and summed in fp32.

    On another GPU operands go through bfloat16, which holds codes times powers of two exactly. Both have this bound.
    """
    m, n, k = shape
    (a_format, a_usage), (b_format, b_usage) = THREE_PRODUCTS[name]
    a, b = operand(m, k, a_format, 0, a_usage), operand(n, k, b_format, 1, b_usage)
    on_tensor_cores = torch.cuda.get_device_capability() == (9, 0)
    assert calls_of_gemms(lambda: matmul(a, b, dtype)) == on_tensor_cores
    got = matmul(a, b, dtype).double().cpu().numpy()
    assert got.shape == (m, n)
    product, size = exact(a) @ exact(b).T, np.abs(exact(a)) @ np.abs(exact(b)).T
    largest = np.abs(exact(a)[:, None] * exact(b)).max(axis=-1)
    lost = 2.0**-13 * (k * largest + 4 * size) + k * 2.0**-23 * size
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
    assert (np.abs(got - product) <= lost + rounding * np.abs(product)).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("fmt", [fmt for fmt in NAMED if fmt.block not in (None, FP8_1x128.block)], ids=str)
def test_what_has_no_tensor_cores_goes_through_bfloat16(fmt, dtype):
    """Also planes in the order of the tensor, that are contracted over its first axis."""
    m, n, k = 32, 64, 96
    for usage in Usage:
        a, b = operand(m, k, fmt, 0, usage), operand(n, k, fmt, 1, usage)
        assert calls_of_gemms(lambda: matmul(a, b, dtype)) == 1  # noqa: B023
        got = matmul(a, b, dtype).double().cpu().numpy()
        product, size = exact(a) @ exact(b).T, np.abs(exact(a)) @ np.abs(exact(b)).T
        operands = 2 * 2.0**-8 if fmt.scaling.global_scale else 0
        rounding = 2.0**-8 if dtype == torch.bfloat16 else 0
        assert (np.abs(got - product) <= (k * 2.0**-22 + operands) * size + rounding * np.abs(product)).all()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_training_by_recipe_replays_from_a_cuda_graph(recipe):
    """Seeds and delayed scales go on from replay to replay, with no word from the host."""
    torch.manual_seed(0)
    graphed = Linear(512, 512, recipe=recipe, device="cuda", dtype=torch.bfloat16)
    eager = copy.deepcopy(graphed)
    x = torch.randn(128, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(layer):
        y = layer(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])
        update_delayed(layer)
        return (y.detach(), *gradients)

    graph, replayed = capture(lambda: step(graphed), warm_up=2)
    for _ in range(2):
        step(eager)  # As `capture` did before.
    for _ in range(3):
        with torch.no_grad():
            x.copy_(torch.randn(128, 512))
        graph.replay()
        for got, want in zip(replayed, step(eager), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("shape", "formats"),
    [
        ((16, 16, 24), (FP8_E4M3, FP8_E4M3)),
        ((17, 16, 32), (FP8_E4M3, FP8_E4M3)),
        ((16, 5, 32), (FP8_E4M3, FP8_E4M3)),
        ((0, 16, 32), (FP8_E4M3, FP8_E4M3)),
        ((32, 32, 32), (FP8_E5M2, FP8_E5M2)),
    ],
    ids=["k", "m", "n", "empty", "two-E5M2"],
)
def test_what_tensor_cores_do_not_take_is_multiplied_in_float32(shape, formats):
    m, n, k = shape
    a, b = operand(m, k, formats[0], 0), operand(n, k, formats[1], 1)
    assert calls_of_gemms(lambda: matmul(a, b, torch.float32)) == 0
    got = matmul(a, b, torch.float32).double().cpu().numpy()
    size = np.abs(exact(a)) @ np.abs(exact(b)).T
    assert (np.abs(got - exact(a) @ exact(b).T) <= k * 2.0**-23 * size + 2.0**-126).all()


# Dynamo of torch 2.13 does what torch.autograd 2.13 has deprecated; Inductor asks for TF32, which would change bits.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_forward_and_backward(dtype):
    torch._dynamo.reset()
    x, w, seed = (torch.randn(shape, device="cuda", dtype=dtype) for shape in [(32, 64), (48, 64), (32, 48)])

    def step(x, w, seed):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = linear(x, w, None, RECIPE)
        return (y, *torch.autograd.grad(y, [x, w], seed))

    expected = step(x.clone(), w.clone(), seed)
    xs = [t.clone().requires_grad_() for t in (x, w)]
    y = torch.compile(linear, fullgraph=True)(*xs, None, RECIPE)
    for got, want in zip((y, *torch.autograd.grad(y, xs, seed)), expected, strict=True):
        assert torch.equal(got, want)


def test_operands_on_two_devices_are_refused():
    with pytest.raises(ValueError, match=r"cast_tensor: operands .x on cuda:\d, scale on cpu. are not on one device"):
        ops.cast_tensor(torch.ones(4, device="cuda"), torch.ones(()), element="float8_e4m3fn")
    with pytest.raises(ValueError, match=r"cast_tensor: operands .x, scale. are not on one device"):
        torch.ops.qshard.cast_tensor(torch.ones(4, device="cuda"), torch.ones(()), element="float8_e4m3fn")


NCCL_CASES = {
    "law": ("dist/test_torch_law.py::gather", {"fmt": FP8_E4M3, "kinds": TAME, "dtype": "float32"}, 1),
    "law-all": ("dist/test_torch_law.py::gather", {"fmt": FP8_E5M2, "kinds": KINDS, "dtype": "bfloat16"}, 1),
    "mixed": ("dist/test_torch_law.py::test_mixed_precision", {}, 1),
    "meta": ("dist/test_torch_law.py::test_models_made_without_memory", {"fmt": FP8_E4M3}, 1),
    "blocks": ("dist/test_torch_law.py::gather", {"fmt": MXFP8_32x32, "kinds": KINDS, "dtype": "float32"}, 1),
    "nvfp4": ("dist/test_torch_law.py::gather", {"fmt": NVFP4_16x16, "kinds": KINDS, "dtype": "bfloat16"}, 1),
    "blocks-128": ("dist/test_torch_law.py::gather", {"fmt": FP8_128x128, "kinds": TAME, "dtype": "float32"}, 1),
    "columns": ("dist/test_torch_law.py::gather", {"fmt": NVFP4_16x16, "kinds": KINDS, "way": "columns"}, 1),
    "delayed": ("dist/test_torch_fsdp.py::test_delayed_scales_are_those_of_all_ranks", {}, 1),
    "wire-blocks": ("dist/test_torch_fsdp.py::test_what_travels_in_a_step", {"recipe": MXFP8()}, 2),
    "offload": ("dist/test_torch_law.py::gather", {"fmt": NVFP4_16x16, "way": "offloaded"}, 1),
    "group": ("dist/test_torch_law.py::test_quantize_over_a_group", {"kinds": KINDS}, 1),
    "parity": (
        "dist/test_torch_fsdp.py::test_training_is_that_of_one_process",
        {"trained": ("CurrentScaling", (True, True, 2, True))},
        1,
    ),
    "fused": (
        "dist/test_torch_fsdp.py::test_optimizers_and_clipping",
        {"clip": True, "fused": True, "dtype": torch.float32},
        1,
    ),
    "wire": ("dist/test_torch_fsdp.py::test_what_travels_in_a_step", {"recipe": CurrentScaling()}, 2),
    "passes": ("dist/test_torch_fsdp.py::test_one_reduction_a_pass", {}, 1),
    "writes": ("dist/test_torch_writes.py::test_writes_are_never_missed", {"recipe": MXFP8(), "tmp_path": None}, 1),
    "old-graph": (
        "dist/test_torch_writes.py::test_a_graph_older_than_a_step_computes_with_one_weight",
        {"compiled": False},
        1,
    ),
    "unlike": ("dist/test_torch_writes.py::test_ranks_that_differ_all_hear_of_it", {"how": "format"}, 2),
    "primary": ("dist/test_torch_primary.py::test_losses_are_those_of_float32_shards", {"recipe": MXFP8()}, 1),
    "primary-nvfp4": (
        "dist/test_torch_primary.py::test_losses_are_those_of_float32_shards",
        {"recipe": GATHERED["NVFP4"]},
        1,
    ),
    "primary-offload": ("dist/test_torch_primary.py::test_offloaded", {"name": "NVFP4"}, 1),
    "primary-offload-delayed": ("dist/test_torch_primary.py::test_offloaded", {"name": "DelayedScaling"}, 1),
    "primary-memory": ("dist/test_torch_primary.py::test_memory", {}, 1),
    "gradients": (
        "dist/test_torch_reduce_scatter.py::test_sums_are_in_the_order_of_ranks",
        {"recipe": "CurrentScaling", "dtype": torch.bfloat16},
        1,
    ),
    "gradients-codes": (
        "dist/test_torch_reduce_scatter.py::test_codes_on_the_wire",
        {"fmt": "MXFP8_E4M3", "fraction": 1 / 16},
        1,
    ),
    "gradients-microbatches": ("dist/test_torch_reduce_scatter.py::test_microbatches", {}, 3),
    "compiled": (
        "dist/test_torch_fsdp.py::compiles_each_layer",
        {"recipe": CurrentScaling()},
        1,
    ),
}


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", NCCL_CASES)
def test_fsdp2_over_nccl(name, world):
    """The cases of the gloo tests. A rank of uneven shards or without rows is among them."""
    case, arguments, least = NCCL_CASES[name]
    if world < least:
        pytest.skip("one rank sends nothing")
    run(world, case, on="cuda", **arguments)


@pytest.mark.parametrize("name", ["law", "blocks", "nvfp4"])
def test_hsdp_over_nccl(name):
    """Two replicas of two shards gather the codes of the whole weight."""
    case, arguments, _ = NCCL_CASES[name]
    run((2, 2), case, on="cuda", **arguments)
