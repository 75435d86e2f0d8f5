"""CUDA kernels: the reference's bits, the current stream, and CUDA graphs."""

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from qshard import _ffi  # noqa: E402
from qshard._core import quantize_steps  # noqa: E402
from qshard.formats import Usage  # noqa: E402
from qshard.torch_bridge import quantize  # noqa: E402
from qshard.torch_bridge._ops.bind import ops  # noqa: E402
from support.cuda_graphs import capture  # noqa: E402
from support.formats import NAMED  # noqa: E402

E4M3 = {"element": "float8_e4m3fn"}


def test_bits_are_those_of_the_reference():
    """Run the checks of the CPU's SIMD targets, in a separate process as there."""
    script = Path(__file__).parent.parent / "cpu" / "kernel_bits.py"
    run = subprocess.run([sys.executable, "-P", str(script), "cuda"], text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_random_calls_have_the_bits_of_the_cpu():
    script = Path(__file__).parent.parent / "fuzz" / "fuzz_devices.py"
    command = [sys.executable, "-P", str(script), "--calls", "3000", "--workers", "2"]
    run = subprocess.run(command, text=True, capture_output=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.fixture
def operands():
    x = torch.randn(512, 768, device="cuda", dtype=torch.bfloat16)
    return x, torch.tensor(3.0, device="cuda"), torch.empty(512, 768, device="cuda", dtype=torch.uint8)


def cast(x, scale, codes):
    _ffi.call("cast_tensor", (x, scale), (codes,), E4M3)


def test_work_is_enqueued_on_the_current_stream(operands):
    """Behind a long sleep and a write, on a side stream: a kernel on another stream would see what was there before."""
    x, scale, codes = operands
    later = torch.randn_like(x)
    expected = torch.empty_like(codes)
    cast(later, scale, expected)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        x.copy_(later)
        cast(x, scale, codes)
    stream.synchronize()
    assert torch.equal(codes, expected)


def test_a_captured_graph_replays_every_op(operands):
    x, scale, codes = operands
    amax, scale_inv = torch.empty((), device="cuda"), torch.empty((), device="cuda")
    codes_t, back = torch.empty(768, 512, device="cuda", dtype=torch.uint8), torch.empty_like(x)

    def step():
        _ffi.call("amax_tensor", (x,), (amax,), {})
        _ffi.call("scale_from_amax", (amax,), (scale, scale_inv), {**E4M3, "eps": 0.0, "pow2": False})
        _ffi.call("cast_transpose", (x, scale), (codes, codes_t), {**E4M3, "batch": 0})
        _ffi.call("transpose", (codes_t,), (codes,), {"batch": 0})
        _ffi.call("dequantize", (codes, scale_inv), (back,), E4M3)

    graph, _ = capture(step)
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        replayed = [t.clone() for t in (amax, scale, codes, codes_t, back)]
        step()
        for a, b in zip(replayed, (amax, scale, codes, codes_t, back), strict=True):
            assert torch.equal(a.view(torch.uint8) if a.dim() else a, b.view(torch.uint8) if b.dim() else b)


def test_mixed_devices_are_an_error(operands):
    x, scale, codes = operands
    with pytest.raises(ValueError, match="different devices"):
        cast(x, scale.cpu(), codes)


def test_work_goes_to_the_device_of_the_tensors(operands):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    x, scale, codes = operands
    cast(x, scale, codes)
    current = torch.cuda.current_device()
    there = [t.to(f"cuda:{1 - current}") for t in (x, scale, torch.zeros_like(codes))]
    cast(*there)
    assert torch.equal(there[2].cpu(), codes.cpu())
    assert torch.cuda.current_device() == current


def test_more_elements_than_32_bits_count():
    n = 2**31 + 2**20 + 7
    x = torch.empty(n, device="cuda", dtype=torch.bfloat16).fill_(1.5)
    x[-1] = -7.0
    amax, codes = torch.empty((), device="cuda"), torch.empty(n, device="cuda", dtype=torch.uint8)
    _ffi.call("amax_tensor", (x,), (amax,), {})
    cast(x, torch.tensor(1.0, device="cuda"), codes)
    assert amax.item() == 7.0
    assert codes[-1].view(torch.float8_e4m3fn).item() == -7.0
    assert bool((codes[:-1] == codes[0]).all())
    assert codes[0].view(torch.float8_e4m3fn).item() == 1.5


BLOCKS = [fmt for fmt in NAMED if fmt.block is not None]


@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
def test_blocks_of_more_elements_than_32_bits_count(fmt, much_memory):
    """A matrix of equal bands: the codes, scales and values of the last are those of one alone, in both planes."""
    torch.manual_seed(0)
    band = torch.randn(256, 2**16, device="cuda", dtype=torch.bfloat16)
    bands = 2**8 + 1
    alone, q = quantize(band, fmt, usage=Usage.BOTH), quantize(band.repeat(bands, 1), fmt, usage=Usage.BOTH)
    assert q.shape[0] * q.shape[1] > 2**32
    planes = [(q.parts(usage), alone.parts(usage)) for usage in Usage.BOTH.planes]
    if fmt.shares_codes:  # As after a gather: the other plane of the first.
        planes.append((quantize_steps.transpose_plane(ops, planes[0][0], fmt), planes[1][1]))
    for many, one in planes:
        for got, want in ((many.data, one.data), (many.scale_inv, one.scale_inv)):
            axis = 0 if got.shape[1] == want.shape[1] else 1
            for at in (0, bands - 1):
                size = want.shape[axis]
                assert torch.equal(got.narrow(axis, at * size, size), want), (axis, at)
    for usage in Usage.BOTH.planes:
        values = quantize_steps.dequantize(ops, q.parts(usage), fmt, usage, torch.bfloat16)
        last = quantize_steps.dequantize(ops, alone.parts(usage), fmt, usage, torch.bfloat16)
        axis = 0 if values.shape[1] == last.shape[1] else 1
        size = last.shape[axis]
        assert torch.equal(values.narrow(axis, (bands - 1) * size, size), last)
