"""GEMMs of codes on a GPU, all combinations that `gemm_dispatch` lets through, and what uses them; against fp64."""

import gc
import statistics
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch")

from qshard import gemm_dispatch  # noqa: E402
from qshard._core.quantize_steps import Plane  # noqa: E402
from qshard.formats import (  # noqa: E402
    E4M3,
    E5M2,
    FP8_E4M3,
    FP8_E5M2,
    MXFP8_E4M3,
    NVFP4,
    FloatScaling,
    Format,
    FP8_1x128,
    FP8_128x128,
    Usage,
)
from qshard.gemm_dispatch import Gpu  # noqa: E402
from qshard.recipes import MXFP8, BlockScaling, CurrentScaling  # noqa: E402
from qshard.recipes import NVFP4 as NVFP4Recipe  # noqa: E402
from qshard.torch_bridge import Linear, linear, quantize  # noqa: E402
from qshard.torch_bridge._ops.bind import ops  # noqa: E402
from qshard.torch_bridge._quantized.gemm import Operand, matmul  # noqa: E402
from qshard.torch_bridge._quantized.target_gpu import multiply_for, target_of  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.formats import every_recipe  # noqa: E402
from support.gemm_bounds import assert_is_product_of_codes  # noqa: E402

FORMATS = {
    (block, element.name): Format(name=f"{element.name} {block}", element=element, block=block, scaling=FloatScaling())
    for element in (E4M3, E5M2)
    for block in ((1, 128), (128, 128))
}
PAIRS = [
    (FP8_E4M3, FP8_E4M3),
    (FP8_E4M3, FP8_E5M2),
    (FP8_E5M2, FP8_E4M3),
    *(
        (FORMATS[a, x.name], FORMATS[b, y.name])
        for a, b in (((1, 128), (1, 128)), ((1, 128), (128, 128)), ((128, 128), (1, 128)))
        for x, y in ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))
    ),
]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# One unit; blocks that are cut along every axis; rows of scales that are padded; several tiles; and the algorithm of a
# bucket: that of 544 rows, and of K = 1088.
SHAPES = [(16, 16, 16), (48, 144, 272), (128, 256, 640), (384, 128, 1024), (272, 400, 2064), (528, 272, 1040)]


def gpu():
    return Gpu(torch.cuda.get_device_capability(), gemm_dispatch.library_version())


def plane(rows, k, fmt, seed, device="cuda"):
    """Random codes, of small numbers for float16 results, and scales from 1/8 to 1."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, k, generator=generator).to(getattr(torch, fmt.element.name))
    grid = () if fmt.block is None else (-(-rows // fmt.block[0]), -(-k // fmt.block[1]))
    scale_inv = (0.125 + 0.875 * torch.rand(grid, generator=generator)).to(device)
    return Plane(values.view(torch.uint8).to(device), scale_inv)


def values(part, fmt):
    """In fp64."""
    codes = part.data.view(getattr(torch, fmt.element.name)).double()
    scale = part.scale_inv.double()
    if fmt.block is not None:
        for axis, side in enumerate(fmt.block):
            scale = scale.repeat_interleave(side, axis)
        scale = scale[: codes.shape[0], : codes.shape[1]]
    return codes * scale


def takes(pair, sizes):
    kind = gemm_dispatch.kind_of(*pair)
    return kind is not None and gemm_dispatch.fits(kind, sizes) and gemm_dispatch.runs_on(kind, gpu())


def product(a, b, formats, dtype, *, fast=False, workspace=None):
    sizes = (a.data.shape[0], b.data.shape[0], a.data.shape[1])
    size = gemm_dispatch.workspace_size(*formats, sizes) if workspace is None else workspace
    return gemm_dispatch.multiply(ops, a, formats[0], b, formats[1], dtype=dtype, fast=fast, workspace=size)


def assert_is_product(got, a, b, formats, *, fast=False):
    assert_is_product_of_codes(got, values(a, formats[0]), values(b, formats[1]), fast=fast)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_every_combination(pair, dtype, fast):
    """Against fp64, on shapes that leave tiles and blocks in parts; two calls have the same bits."""
    for number, (m, n, k) in enumerate(SHAPES):
        if not takes(pair, (m, n, k)):
            assert gpu().capability != (9, 0), "Hopper takes all of these"
            continue
        a, b = plane(m, k, pair[0], number), plane(n, k, pair[1], number + 100)
        got = product(a, b, pair, dtype, fast=fast)
        assert (got.dtype, got.shape) == (dtype, (m, n))
        assert_is_product(got, a, b, pair, fast=fast)
        assert torch.equal(got, product(a, b, pair, dtype, fast=fast))


@pytest.mark.parametrize("pair", PAIRS[::3], ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_the_cpu_has_the_same_product(pair):
    m, n, k = 144, 272, 640
    a, b = plane(m, k, pair[0], 1), plane(n, k, pair[1], 2)
    there = [Plane(*(None if x is None else x.cpu() for x in each)) for each in (a, b)]
    on_cpu = product(*there, pair, torch.float32, workspace=0)
    assert_is_product(on_cpu.cuda(), a, b, pair)
    assert_is_product(product(a, b, pair, torch.float32), a, b, pair)


def test_nan_and_infinity_come_through():
    a, b = plane(32, 256, FP8_E5M2, 1), plane(64, 256, FP8_E4M3, 2)
    a.data[3, 5], a.data[7, 9], b.data[11, 200] = 0x7C, 0xFD, 0x7F  # inf, NaN, NaN
    got = product(a, b, (FP8_E5M2, FP8_E4M3), torch.float32)
    want = values(a, FP8_E5M2) @ values(b, FP8_E4M3).T
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())


def test_scales_far_from_one():
    """Neither is a number that a narrower type has."""
    a, b = plane(64, 512, FP8_1x128, 1), plane(128, 512, FP8_128x128, 2)
    a, b = a._replace(scale_inv=a.scale_inv * 2.0**-70), b._replace(scale_inv=b.scale_inv * 2.0**60)
    pair = (FORMATS[(1, 128), E4M3.name], FORMATS[(128, 128), E4M3.name])
    got = product(a, b, pair, torch.float32)
    unscaled = [a._replace(scale_inv=a.scale_inv * 2.0**70), b._replace(scale_inv=b.scale_inv * 2.0**-60)]
    assert_is_product(got * 2.0**10, *unscaled, pair)


@pytest.mark.parametrize(
    ("formats", "sizes", "words"),
    [
        ((FP8_E4M3, FP8_E4M3), (16, 16, 24), r"sizes that are not positive multiples of 16"),
        ((FP8_E4M3, FP8_E4M3), (17, 16, 32), r"product of \(17, 32\) and \(16, 32\)"),
        ((FP8_E4M3, FP8_E4M3), (16, 5, 32), "multiply dequantized values"),
        ((FP8_E5M2, FP8_E5M2), (32, 32, 32), "no algorithm for these operands .* multiply dequantized values"),
        ((FP8_128x128, FP8_128x128), (128, 128, 128), "no algorithm for these operands"),
    ],
    ids=["k", "m", "n", "E5M2", "squares"],
)
def test_what_it_does_not_take_is_an_error(formats, sizes, words):
    assert not takes(formats, sizes)
    m, n, k = sizes
    a, b = plane(m, k, formats[0], 0), plane(n, k, formats[1], 1)
    with pytest.raises((ValueError, RuntimeError), match=words):
        product(a, b, formats, torch.bfloat16, workspace=2**25)
    torch.cuda.synchronize()


def test_other_refusals():
    a, b = plane(32, 256, FP8_1x128, 0), plane(128, 256, FP8_128x128, 1)
    pair = (FP8_1x128, FP8_128x128)
    with pytest.raises(ValueError, match=r"workspace \(100 bytes\) is less than the \d+ that scales need"):
        product(a, b, pair, torch.bfloat16, workspace=100)
    moved = torch.empty(32 * 256 + 1, dtype=torch.uint8, device="cuda")[1:].view(32, 256)
    with pytest.raises(ValueError, match="not aligned to 16 bytes, which tensor cores need"):
        product(a._replace(data=moved), b, pair, torch.bfloat16)
    odd = {"a_element": E4M3.name, "b_element": E4M3.name, "a_rows": 1, "b_rows": 1, "cols": 64}
    scales = [torch.ones(rows, 4, device="cuda") for rows in (32, 128)]
    with pytest.raises(RuntimeError, match="blocks are not of a size that cuBLASLt has scales of"):
        ops.gemm_block(
            a.data, scales[0], b.data, scales[1], scale_dtype="float32", dtype=torch.bfloat16, workspace=2**25, **odd
        )


def test_without_rows_or_columns():
    for m, n in ((0, 16), (16, 0), (0, 0)):
        a, b = plane(m, 32, FP8_E4M3, 0), plane(n, 32, FP8_E4M3, 1)
        assert product(a, b, (FP8_E4M3, FP8_E4M3), torch.bfloat16).shape == (m, n)


@pytest.mark.parametrize("pair", [PAIRS[0], PAIRS[6]], ids=str)
def test_a_captured_graph_replays(pair):
    """A shape that was never seen before it is captured; operands, and scales, then change under the graph."""
    m, n, k = 176, 208, 1040
    a, b = plane(m, k, pair[0], 0), plane(n, k, pair[1], 1)
    graph, out = capture(lambda: product(a, b, pair, torch.bfloat16))
    for seed in range(3):
        for old, new in zip((a, b), (plane(m, k, pair[0], seed), plane(n, k, pair[1], seed + 9)), strict=True):
            old.data.copy_(new.data)
            old.scale_inv.copy_(new.scale_inv)
        graph.replay()
        assert_is_product(out, a, b, pair)
        assert torch.equal(out, product(a, b, pair, torch.bfloat16))


FIRST_CALL_IS_CAPTURED = """
import torch
from qshard.torch_bridge._ops.bind import ops
a = torch.full((64, 64), 0x38, dtype=torch.uint8, device="cuda")
one = torch.ones((), device="cuda")
how = {"a_element": "float8_e4m3fn", "b_element": "float8_e4m3fn", "fast": True, "workspace": 2**25}
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    out, _ = ops.gemm(a, one, a, one, dtype=torch.float32, **how)
graph.replay()
torch.cuda.synchronize()
assert (out == 64).all()
"""


def test_the_first_call_of_a_process_may_be_captured():
    """It loads the library, makes its handle and chooses an algorithm."""
    run = subprocess.run([sys.executable, "-P", "-c", FIRST_CALL_IS_CAPTURED], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]


def test_it_works_on_the_current_stream():
    """Behind a sleep and a write on a side stream: a GEMM, or a move of scales, on another one would see old bytes."""
    pair = (FORMATS[(1, 128), E4M3.name], FORMATS[(128, 128), E4M3.name])
    a, b = plane(256, 1024, pair[0], 0), plane(512, 1024, pair[1], 1)
    new = plane(256, 1024, pair[0], 2)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        a.data.copy_(new.data)
        a.scale_inv.copy_(new.scale_inv)
        got = product(a, b, pair, torch.bfloat16)
    stream.synchronize()
    assert_is_product(got, new, b, pair)


def test_many_threads_and_more_shapes_than_are_kept():
    """Threads share plans, and set pointers in them; the oldest go when there are too many."""
    pair = (FORMATS[(1, 128), E4M3.name], FORMATS[(1, 128), E4M3.name])
    failures = []

    def work(number):
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for i in range(12):
                    m, n, k = 16 + 16 * (i % 3), 32, 128 * (1 + i % 2)
                    a, b = plane(m, k, pair[0], number * 100 + i), plane(n, k, pair[1], i)
                    assert_is_product(product(a, b, pair, torch.float32), a, b, pair)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    a, b = plane(16 * 40, 64, FP8_E4M3, 0), plane(16 * 40, 64, FP8_E4M3, 1)
    formats = (FP8_E4M3, FP8_E4M3)
    for m in range(16, 16 * 40, 16):
        for n in range(16, 16 * 40, 16):
            rows = a._replace(data=a.data[:m]), b._replace(data=b.data[:n])
            last = product(*rows, formats, torch.float32)
    assert_is_product(last, *rows, formats)
    first = a._replace(data=a.data[:16]), b._replace(data=b.data[:16])
    assert_is_product(product(*first, formats, torch.float32), *first, formats)


def test_nothing_is_allocated_but_results():
    """Memory of the caching allocator alone, and all of it comes back."""
    pair = (FORMATS[(1, 128), E4M3.name], FORMATS[(128, 128), E4M3.name])
    a, b = plane(1024, 4096, pair[0], 0), plane(4096, 4096, pair[1], 1)
    product(a, b, pair, torch.bfloat16)
    gc.collect()

    def lost():
        torch.cuda.synchronize()
        free, held = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        for _ in range(20):
            out = product(a, b, pair, torch.bfloat16)
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() == held + out.numel() * 2
        return free - torch.cuda.mem_get_info()[0]

    # A segment of torch's own, at most. Other test processes take and free memory of the GPU too, but not all the time.
    assert statistics.median(lost() for _ in range(5)) <= 2**26


@pytest.mark.parametrize("at", [(1, 0), (0, 1), (2, 3), (4, 4), (3, 3)])
def test_scales_among_others(at):
    """cuBLASLt reads a scale at multiples of 16 bytes; one of a tensor of scales may be elsewhere."""
    pair, sizes = (FP8_E4M3, FP8_E5M2), (48, 64, 128)
    a, b = (plane(rows, sizes[2], fmt, rows) for rows, fmt in zip(sizes, pair, strict=False))
    want = product(a, b, pair, torch.float32)
    moved = []
    for each, i in zip((a, b), at, strict=True):
        many = torch.full((8,), float("nan"), device="cuda")
        many[i] = each.scale_inv
        moved.append(each._replace(scale_inv=many[i]))
    assert torch.equal(product(*moved, pair, torch.float32), want)


# --- PyTorch's layers ---


def calls(function):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as trace:
        function()
    counts = {event.key: event.count for event in trace.key_averages()}
    products = ("qshard::gemm", "qshard::run_program", "aten::mm")
    return {name: count for name, count in counts.items() if name.startswith(products)}


# Dynamo of torch 2.13 does what torch.autograd 2.13 has deprecated; Inductor asks for TF32, which would change bits.
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "recipe", [CurrentScaling(), BlockScaling(), MXFP8(), NVFP4Recipe()], ids=lambda recipe: type(recipe).__name__
)
def test_compiled_layers_run_the_same_gemms(recipe, dynamic):
    """Forward and backward, bit for bit those of eager mode; with symbols for shapes too.

    Without symbols one program multiplies in the backward pass. The weight is no parameter, so y has its own op.
    """
    torch._dynamo.reset()
    w = torch.randn(384, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(linear, fullgraph=True, dynamic=dynamic)
    values = {"qshard::gemm_values_nt": 2, "qshard::gemm_values_tn": 1}
    of_hopper = {
        "CurrentScaling": {"qshard::gemm": 3},
        "BlockScaling": {"qshard::gemm_block": 3},
        "MXFP8": values,
        "NVFP4": {"qshard::gemm_values_nt": 3},
    }
    every = of_hopper[type(recipe).__name__]
    with_program = {next(iter(every)): 1, "qshard::run_program": 1}
    key = torch.tensor([1, 2], dtype=torch.int32, device="cuda") if recipe.stochastic else None
    for rows in (128, 256, 1024):
        x = torch.randn(rows, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        seed = torch.randn(rows, 384, device="cuda", dtype=torch.bfloat16)

        def step(linear, x=x, seed=seed):
            y = linear(x, w, None, recipe, seed=key)
            return (y, *torch.autograd.grad(y, [x, w], seed))

        for got, want in zip(step(compiled), step(linear), strict=True):
            assert torch.equal(got, want)
        step(compiled)  # What it compiles it compiles now.
        counted = [calls(lambda: step(one)) for one in (linear, compiled)]  # noqa: B023
        assert counted == [every, every if dynamic else with_program]


@pytest.mark.parametrize("sizes", [(256, 384, 512), (96, 256, 640), (33, 256, 512)], ids=str)
def test_matmul_multiplies_values_where_it_must(sizes):
    m, n, k = sizes
    a, b = plane(m, k, FP8_1x128, 0), plane(n, k, FP8_128x128, 1)
    pair = (FORMATS[(1, 128), E4M3.name], FORMATS[(128, 128), E4M3.name])
    powers = [x._replace(scale_inv=2.0 ** torch.floor(torch.log2(x.scale_inv))) for x in (a, b)]
    operands = [Operand(fmt, x) for fmt, x in zip(pair, powers, strict=True)]
    for dtype in DTYPES:  # cuBLASLt makes no float16 of bfloat16.
        of_values = "aten::mm" if dtype == torch.float16 else "qshard::gemm_values_nt"
        used = calls(lambda: matmul(*operands, dtype))  # noqa: B023
        assert used == ({of_values: 1} if m % 16 else {"qshard::gemm_block": 1})
        if dtype != torch.float16 or m % 16 == 0:
            assert_is_product(matmul(*operands, dtype), *powers, pair)


@every_recipe
@pytest.mark.parametrize("shape", [(64, 128, 256), (40, 160, 96)], ids=str)
def test_one_call_has_the_bits_of_the_ops_one_after_another(recipe, shape):
    """Rows that the second shape's blocks do not divide go op after op in both."""
    m, n, k = shape
    if any(size % 128 for size in (n, k)) and type(recipe).__name__ != "MXFP8":
        n, k = 128, 256
    made, target = [], target_of(torch.device("cuda", 0))
    for large in (target.large, 0):
        torch.manual_seed(0)
        layer = Linear(k, n, bias=False, recipe=recipe, dtype=torch.bfloat16, device="cuda")
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with multiply_for(target._replace(large=large)):
            y = layer(x)
            y.backward(torch.randn_like(y))
        made.append((y, x.grad, layer.weight.grad))
    for got, want in zip(*made, strict=True):
        assert torch.equal(got, want)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 10, reason="of Blackwell")
@pytest.mark.parametrize("fmt", [MXFP8_E4M3, NVFP4], ids=str)
def test_blackwell(fmt):
    a, b = (torch.randn(rows, 512, device="cuda") for rows in (144, 272))
    operands = [Operand(fmt, quantize(x, fmt).parts(Usage.ROWWISE)) for x in (a, b)]
    exact = operands[0].values(torch.float32).double() @ operands[1].values(torch.float32).double().T
    got = matmul(*operands, torch.float32)
    assert float((got.double() - exact).norm() / exact.norm()) < 2.0**-12


# --- JAX ---


def test_jax_multiplies_codes_in_blocks():
    """Forward and backward of a layer, alone and in a loop: GEMMs of codes, and nothing that is dequantized.

    The CPU has the same codes; sums differ as above, and results are rounded to bfloat16.
    """
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp
    import numpy as np

    import qshard.jax

    rng = np.random.default_rng(0)
    x, w, seed = (rng.standard_normal(shape, np.float32) for shape in [(2, 256, 512), (384, 512), (2, 256, 384)])

    @jax.jit
    def step(x, w, seed):
        y, pull = jax.vjp(lambda x, w: qshard.jax.linear(x, w, BlockScaling()), x, w)
        return (y, *pull(seed))

    @jax.jit
    def loop(x, w):
        return jax.lax.scan(lambda h, w: (qshard.jax.linear(h, w, BlockScaling()), None), x, jnp.stack([w, w]))[0]

    results = {}
    for name in ("cpu", "cuda"):
        device = jax.devices(name)[0]
        operands = [jax.device_put(jnp.asarray(t, jnp.bfloat16), device) for t in (x, w, seed)]
        square = jax.device_put(jnp.asarray(np.eye(512), jnp.bfloat16), device)
        results[name] = [np.asarray(t.astype(jnp.float32)) for t in (*step(*operands), loop(operands[0], square))]
        if name == "cuda" and gpu().capability == (9, 0):
            text = step.lower(*operands).compile().as_text()
            assert text.count('custom_call_target="qshard_gemm_block"') == 3
            assert "qshard_dequantize" not in text
    for got, want in zip(results["cuda"], results["cpu"], strict=True):
        assert float(np.linalg.norm(got - want) / np.linalg.norm(want)) < 2.0**-8
