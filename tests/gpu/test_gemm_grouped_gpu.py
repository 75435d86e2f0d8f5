"""Grouped products of experts on a GPU: all ops against fp64 and the CPU, sizes on the device, and two libraries."""

import os
import shutil
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from qshard import _ffi, gemm_dispatch  # noqa: E402
from qshard._core.quantize_steps import Plane  # noqa: E402
from qshard.formats import (  # noqa: E402
    E5M2,
    FP8_E4M3,
    FP8_E5M2,
    FloatScaling,
    Format,
    FP8_1x128,
    FP8_128x128,
)
from qshard.torch_bridge._ops.bind import ops  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.expert_codes import codes, numbers, ranges, stops_of  # noqa: E402
from support.gemm_bounds import assert_is_product_of_codes, assert_is_product_of_values  # noqa: E402

E5M2_1x128 = Format(name="E5M2 1x128", element=E5M2, block=(1, 128), scaling=FloatScaling())
PAIRS = [
    (FP8_E4M3, FP8_E4M3),
    (FP8_E5M2, FP8_E4M3),
    (FP8_1x128, FP8_128x128),
    (FP8_1x128, FP8_1x128),
    (E5M2_1x128, FP8_128x128),
]
K_PAIRS = [pair for pair in PAIRS if pair[1].block != (128, 128)]
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
M_GROUPED = [
    # Rows of each expert, rows after the last stop, N, K.
    ((16,), 0, 16, 128),
    ((48, 0, 16, 256, 0), 32, 144, 272),
    ((0, 0, 112), 16, 256, 640),
    ((128, 384, 0, 256), 128, 384, 1024),
    ((16,) * 40, 0, 272, 512),
    ((0, 0), 64, 128, 256),
]
K_GROUPED = [
    # Rows of each expert in units, rows after the last stop in units, M, N.
    ((1,), 0, 16, 16),
    ((3, 0, 1, 8, 0), 2, 144, 272),
    ((0, 0, 7), 1, 256, 384),
    ((1,) * 40, 0, 64, 48),
    ((0, 0), 2, 128, 256),
]


@pytest.fixture(scope="module")
def gpu():
    found = gemm_dispatch.gpu_of(torch.cuda.get_device_capability())
    if not gemm_dispatch.grouped_runs_on("tensors", found):
        pytest.skip(f"grouped products run on Hopper with cuBLASLt 13.5 or newer, and here is {found}")
    return found


def multiply_rows(a, b, pair, stops, dtype, fast=False, **how):
    e, n, k = b.data.shape
    workspace = gemm_dispatch.grouped_workspace_size(e, (a.data.shape[0], n, k), *pair)
    how |= {"dtype": dtype, "fast": fast, "workspace": workspace}
    return gemm_dispatch.multiply_grouped(ops, a, pair[0], b, pair[1], stops, **how)


def contract_rows(a, b, pair, stops, dtype, fast=False):
    sizes = (a.data.shape[0], b.data.shape[0], a.data.shape[1])
    workspace = gemm_dispatch.grouped_workspace_size(stops.numel(), sizes, *pair, by_k=True)
    how = {"dtype": dtype, "fast": fast, "workspace": workspace}
    return gemm_dispatch.multiply_grouped_k(ops, a, pair[0], b, pair[1], stops, **how)


def multiply_values(a, b, stops, layout, dtype):
    e, n = stops.numel(), b.shape[1] if layout == "nt" else b.shape[-1]
    workspace = gemm_dispatch.grouped_workspace_size(e, (a.shape[0], n, a.shape[1]), by_k=layout == "tn")
    how = {"layout": layout, "dtype": dtype, "workspace": workspace}
    return gemm_dispatch.multiply_grouped_values(ops, a, b, stops, **how)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_rows_times_matrices(pair, dtype, fast):
    """Against fp64, expert by expert; experts without rows; zeros after the last stop; two calls, the same bits."""
    for number, (sizes, rest, n, k) in enumerate(M_GROUPED):
        e, m = len(sizes), sum(sizes) + rest
        assert gemm_dispatch.grouped_fits(gemm_dispatch.grouped_kind_of(*pair), (m, n, k))
        a, b = codes((m, k), pair[0], number, e), codes((e, n, k), pair[1], number + 100, e)
        got = multiply_rows(a, b, pair, stops_of(sizes), dtype, fast)
        assert (got.dtype, got.shape) == (dtype, (m, n))
        x, y = numbers(a, pair[0], ranges(sizes)), numbers(b, pair[1], range(e))
        for own, rows in enumerate(ranges(sizes)):
            if sizes[own]:
                of_blocks = pair[0].block is not None  # Blocks are never `fast`.
                assert_is_product_of_codes(got[rows], x[rows], y[own], fast=fast and not of_blocks)
        assert not got[sum(sizes) :].any()
        assert torch.equal(got, multiply_rows(a, b, pair, stops_of(sizes), dtype, fast))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [16, 272, 1024])
@pytest.mark.parametrize("n", [16, 144])
def test_results_are_written_without_padding(n, k, dtype, fast):
    """Any number of rows for each expert, in codes with and without padding, and zeros after the last."""
    sizes, pair = (1, 7, 0, 33, 130, 127), (FP8_E4M3, FP8_E5M2)
    experts, tokens = len(sizes), sum(sizes) + 5
    for unit in (1, 16):
        padded = [-(-size // unit) * unit for size in sizes]
        a, b = codes((sum(padded) + unit, k), pair[0], 0, experts), codes((experts, n, k), pair[1], 1, experts)
        x, y = numbers(a, pair[0], ranges(padded)), numbers(b, pair[1], range(experts))
        operands = (a, b, pair, stops_of(padded), dtype, fast)
        got = multiply_rows(*operands, ends=stops_of(sizes), tokens=tokens)
        assert (got.dtype, got.shape) == (dtype, (tokens, n))
        for own, (rows, place) in enumerate(zip(ranges(padded), ranges(sizes), strict=True)):
            if sizes[own]:
                of_rows = x[rows][: sizes[own]]
                assert_is_product_of_codes(got[place], of_rows, y[own], fast=fast)
        assert not got[sum(sizes) :].view(torch.uint8).any()
        assert torch.equal(got, multiply_rows(*operands, ends=stops_of(sizes), tokens=tokens))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ends", [[5, 3, 9, 12], [-1, -(2**31), 4, 2**31 - 1], [100, 0, 0, 0], [0, 50, 50, 60]])
@pytest.mark.parametrize("stops", [[3, 3, 8, 20], [30, 20, 9, 48], [-1, 2**31 - 1, 0, 5]])
def test_ends_that_are_wrong_do_what_they_do_on_the_cpu(stops, ends):
    """Rows that an expert does not have are zeros, whatever the memory held."""
    pair, tokens = (FP8_E4M3, FP8_E4M3), 64
    a, b = codes((48, 64), pair[0], 0, 4), codes((4, 32, 64), pair[1], 1, 4)
    bounds = [torch.tensor(each, dtype=torch.int32) for each in (stops, ends)]
    stale = torch.full((tokens, 32), torch.nan, device="cuda")  # The allocator reuses this memory.
    del stale
    on_gpu = [each.cuda() for each in bounds]
    got = multiply_rows(a, b, pair, on_gpu[0], torch.float32, ends=on_gpu[1], tokens=tokens)
    host = [Plane(*(None if part is None else part.cpu() for part in plane)) for plane in (a, b)]
    how = {"ends": bounds[1], "tokens": tokens, "dtype": torch.float32, "workspace": 0}
    want = gemm_dispatch.multiply_grouped(ops, host[0], pair[0], host[1], pair[1], bounds[0], **how)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-3, atol=1e-3)
    assert torch.equal(got.cpu().any(1), want.any(1))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", K_PAIRS, ids=lambda pair: f"{pair[0]} {pair[1]}")
def test_contracted_rows(pair, dtype, fast):
    """Against fp64, expert by expert. An expert without rows gives zeros, whatever its scale."""
    unit = 16 if pair[0].block is None else 128
    for number, (units, rest, m, n) in enumerate(K_GROUPED):
        sizes, e = [unit * count for count in units], len(units)
        p = sum(sizes) + unit * rest
        assert gemm_dispatch.grouped_fits(gemm_dispatch.grouped_kind_of(*pair, by_k=True), (m, n, p), unit, by_k=True)
        a, b = codes((m, p), pair[0], number, e), codes((n, p), pair[1], number + 100, e)
        if pair[0].block is None:
            a.scale_inv[[i for i, size in enumerate(sizes) if not size]] = torch.nan
        got = contract_rows(a, b, pair, stops_of(sizes), dtype, fast)
        assert (got.dtype, got.shape) == (dtype, (e, m, n))
        parts = [(slice(None), part) for part in ranges(sizes)]
        x, y = numbers(a, pair[0], parts), numbers(b, pair[1], parts)
        for own, part in enumerate(parts):
            if sizes[own]:
                assert_is_product_of_codes(got[own], x[part], y[part], fast=fast and pair[0].block is None)
            else:
                assert not got[own].view(torch.uint8).any()
        assert torch.equal(got, contract_rows(a, b, pair, stops_of(sizes), dtype, fast))


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
@pytest.mark.parametrize(
    ("dtype", "result"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_values(dtype, result, layout):
    """Sizes need no multiple of anything: rows of experts begin anywhere."""
    for number, (sizes, rest, n, k) in enumerate(
        [
            ((7,), 0, 16, 8),
            ((37, 0, 1, 200, 0), 13, 136, 264),
            ((0, 0, 111), 1, 256, 640),
            ((3,) * 40, 0, 40, 512),
            ((0, 0), 5, 128, 256),
        ]
    ):
        e, m = len(sizes), sum(sizes) + rest
        generator = torch.Generator().manual_seed(number)
        shape = {"nt": (e, n, k), "nn": (e, k, n), "tn": (m, n)}[layout]
        a, b = (torch.randn(s, generator=generator).to("cuda", dtype) / 8 for s in ((m, k), shape))
        got = multiply_values(a, b, stops_of(sizes), layout, result)
        assert (got.dtype, got.shape) == (result, (e, k, n) if layout == "tn" else (m, n))
        for own, rows in enumerate(ranges(sizes)):
            if layout == "tn" and sizes[own]:
                assert_is_product_of_values(got[own], a[rows].T, b[rows].T)
            elif layout == "tn":
                assert not got[own].view(torch.uint8).any()
            elif sizes[own]:
                assert_is_product_of_values(got[rows], a[rows], b[own] if layout == "nt" else b[own].T)
        if layout != "tn":
            assert not got[sum(sizes) :].any()
        assert torch.equal(got, multiply_values(a, b, stops_of(sizes), layout, result))


@pytest.mark.usefixtures("gpu")
def test_sums_of_values_are_not_put_together_in_bfloat16():
    """Long sums of few results, which a library may split: rounding each part would show."""
    a, b = (torch.rand(2**16, 16, device="cuda").bfloat16() for _ in range(2))
    exact = a.double().T @ b.double()
    got = multiply_values(a, b, stops_of((2**16,)), "tn", torch.bfloat16)[0]
    assert float(((got.double() - exact).abs() / exact).max()) <= 1.25 * 2.0**-8


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("layout", ["nt", "nn", "tn"])
def test_stops_that_are_wrong_do_what_they_do_on_the_cpu(layout):
    a = torch.randn(96, 64).bfloat16()
    b = torch.randn({"nt": (4, 32, 64), "nn": (4, 64, 32), "tn": (96, 32)}[layout]).bfloat16()
    how = {"layout": layout, "dtype": torch.float32}
    for wrong in ([50, 30, 90, 96], [-1, -(2**31), 40, 2**31 - 1], [1000, 0, 0, 0], [0, 0, 0, 0]):
        stops = torch.tensor(wrong, dtype=torch.int32)
        want = gemm_dispatch.multiply_grouped_values(ops, a, b, stops, workspace=0, **how)
        got = multiply_values(a.cuda(), b.cuda(), stops.cuda(), layout, torch.float32)
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("gpu")
def test_stops_of_codes_are_rounded_down():
    """Stops of blocks: to 16, or to the blocks that are contracted, so that every matrix is aligned."""
    pair = (FP8_1x128, FP8_1x128)
    a, b = codes((128, 256), FP8_1x128, 0, 3), codes((3, 64, 256), FP8_1x128, 1, 3)
    odd, even = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([17, 47, 111], [16, 32, 96]))
    results = [multiply_rows(a, b, pair, stops, torch.bfloat16) for stops in (odd, even)]
    assert torch.equal(*results)
    a, b = (codes((64, 512), FP8_1x128, seed, 3) for seed in (0, 1))
    odd, even = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([129, 300, 511], [128, 256, 384]))
    results = [contract_rows(a, b, pair, stops, torch.bfloat16) for stops in (odd, even)]
    assert torch.equal(*results)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("first", ["eager", "captured"])
@pytest.mark.parametrize("kind", ["tensors", "blocks", "values"])
def test_a_captured_product_takes_other_sizes(kind, first):
    """A graph replays with new sizes and operands, also if the captured call was the first of its shape class."""
    sizes = [(64, 0, 192, 128), (128, 128, 0, 0), (0, 0, 0, 384)]
    n, k = (224, 512) if first == "eager" else (240, 640)  # A shape class of its own.
    if kind == "values":
        a, b = torch.randn(384, k, device="cuda").bfloat16(), torch.randn(4, n, k, device="cuda").bfloat16()

        def run(stops):
            return multiply_values(a, b, stops, "nt", torch.bfloat16)
    else:
        pair = (FP8_E4M3, FP8_E5M2) if kind == "tensors" else (FP8_1x128, FP8_128x128)
        a, b = codes((384, k), pair[0], 0, 4), codes((4, n, k), pair[1], 1, 4)

        def run(stops):
            return multiply_rows(a, b, pair, stops, torch.bfloat16)

    stops = stops_of(sizes[0])
    graph, out = capture(lambda: run(stops), warm_up=int(first == "eager"))
    for each in sizes:
        stops.copy_(stops_of(each))
        graph.replay()
        want = run(stops)
        if first == "eager":
            assert torch.equal(out, want)
        else:  # The captured call has the heuristic's first algorithm, and the eager one the fastest.
            torch.testing.assert_close(out, want, rtol=2.0**-6, atol=2.0**-6 * float(want.abs().max()))


@pytest.mark.usefixtures("gpu")
def test_sums_do_not_depend_on_other_experts():
    """An expert's result has the same bits whatever the other experts have, in one shape class."""
    a, b = codes((512, 512), FP8_E4M3, 0, 4), codes((4, 256, 512), FP8_E4M3, 1, 4)
    pair = (FP8_E4M3, FP8_E4M3)
    whole = multiply_rows(a, b, pair, stops_of((128, 128, 128, 128)), torch.float32)
    alone = multiply_rows(a, b, pair, stops_of((128, 0, 0, 0)), torch.float32)
    assert torch.equal(whole[:128], alone[:128])
    assert not alone[128:].any()


@pytest.mark.usefixtures("gpu")
def test_what_the_library_does_not_take_is_refused():
    stops = stops_of((16, 16))
    a, b = torch.randn(32, 64, device="cuda"), torch.randn(2, 32, 64, device="cuda")
    with pytest.raises(ValueError, match="float32, which cuBLASLt does not multiply in groups"):
        multiply_values(a, b, stops, "nt", torch.float32)
    with pytest.raises(ValueError, match="N=20, K=64 has sizes that are not multiples of 8"):
        multiply_values(a.bfloat16(), b[:, :20].bfloat16().contiguous(), stops, "nt", torch.float32)
    with pytest.raises(ValueError, match=r"workspace \(0 bytes\) is less than"):
        ops.gemm_grouped_values_nt(a.bfloat16(), b.bfloat16(), stops, dtype=torch.float32, workspace=0)
    x, w = codes((32, 64), FP8_E4M3, 0, 2), codes((2, 32, 64), FP8_E4M3, 1, 2)
    with pytest.raises(ValueError, match="not aligned to 16 bytes"):
        multiply_rows(x._replace(data=torch.empty(32 * 64 + 1, dtype=torch.uint8, device="cuda")[1:].view(32, 64)), w,
                      (FP8_E4M3, FP8_E4M3), stops, torch.bfloat16)  # fmt: skip


# --- libraries ---

TWO_LIBRARIES = """
import torch
from qshard import _ffi, gemm_dispatch
from qshard.torch_bridge._ops.bind import ops
torch.zeros(1, device="cuda") @ torch.zeros(1, device="cuda")
found = gemm_dispatch.gpu_of(torch.cuda.get_device_capability())
assert _ffi.grouped_gemm_library_path() == {path!r}, _ffi.grouped_gemm_library_path()
with open("/proc/self/maps") as maps:
    loaded = {{line.split()[-1] for line in maps if "libcublasLt" in line}}
assert len(loaded) == 2, loaded
a = torch.randn(64, 128, device="cuda").bfloat16()
b = torch.randn(2, 256, 128, device="cuda").bfloat16()
stops = torch.tensor([32, 64], dtype=torch.int32, device="cuda")
for _ in range(3):
    workspace = gemm_dispatch.grouped_workspace_size(2, (64, 256, 128))
    got = ops.gemm_grouped_values_nt(a, b, stops, dtype=torch.float32, workspace=workspace)[0]
    own = [ops.gemm_values_nt(a[32 * e : 32 * e + 32], b[e], dtype=torch.float32, workspace=2**25)[0] for e in (0, 1)]
    by_torch = torch.cat([a[:32] @ b[0].T, a[32:] @ b[1].T])
    torch.testing.assert_close(got, torch.cat(own), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(got.bfloat16(), by_torch, rtol=2e-2, atol=2e-2)
"""


def python(script, **environment):
    command = [sys.executable, "-W", "ignore", "-P", "-c", script]
    return subprocess.run(
        command, env=os.environ | environment, text=True, capture_output=True, check=False, timeout=200
    )


@pytest.mark.usefixtures("gpu")
def test_two_libraries_in_one_process(tmp_path):
    """PyTorch's for dense products, and a file of its own for grouped ones."""
    path = str(tmp_path / "libcublasLt.so.13")
    shutil.copyfile(_ffi.grouped_gemm_library_path(), path)
    done = python(TWO_LIBRARIES.format(path=path), QSHARD_CUBLASLT=path)
    assert done.returncode == 0, done.stderr


FIND = "import torch; torch.zeros(1).cuda(); from qshard import gemm_dispatch; print(gemm_dispatch.gpu_of((9, 0)))"


def test_a_file_that_is_no_library(tmp_path):
    for path, error in (
        (str(tmp_path / "nothing.so"), "is not a file"),
        (_ffi.__file__, "has no grouped products"),
    ):
        done = python(FIND, QSHARD_CUBLASLT=path)
        assert done.returncode == 1
        assert error in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("gpu")
def test_products_are_right_without_trials():
    """The heuristic's first algorithm, and no wait."""
    script = TWO_LIBRARIES.replace("assert len(loaded) == 2, loaded\n", "")
    path = _ffi.grouped_gemm_library_path()
    done = python(script.format(path=path), QSHARD_GROUPED_TRIALS="0", QSHARD_CUBLASLT=path)
    assert done.returncode == 0, done.stderr


# --- JAX ---


@pytest.mark.usefixtures("gpu")
def test_jax():
    """Under jit, with the results of the CPU."""
    jax = pytest.importorskip("jax")
    import jax.numpy as jnp
    import numpy as np

    from qshard.jax import ops as jax_ops

    rng = np.random.default_rng(0)
    shapes = {"nt": [(96, 64), (3, 32, 64)], "nn": [(96, 64), (3, 64, 32)], "tn": [(96, 64), (96, 32)]}
    for layout, (a, b) in shapes.items():
        x, y = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in (a, b))
        stops = jnp.asarray([10, 10, 70], jnp.int32)
        results = []
        for platform in ("cpu", "cuda"):
            device = jax.devices(platform)[0]
            workspace = 0 if platform == "cpu" else gemm_dispatch.grouped_workspace_size(3, (96, 32, 64))
            op = getattr(jax_ops, f"gemm_grouped_values_{layout}")
            function = jax.jit(lambda *operands, op=op, w=workspace: op(*operands, dtype="float32", workspace=w)[0])
            results.append(np.asarray(function(*(jax.device_put(each, device) for each in (x, y, stops)))))
        np.testing.assert_allclose(results[1], results[0], rtol=1e-4, atol=1e-4)
