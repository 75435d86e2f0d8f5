"""Calls that a handler must survive: past crashes, and the host's guarantees for memory."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import qshard
from qshard import _ffi
from qshard.formats import E4M3
from qshard.torch_bridge._ops.bind import into, ops
from support.device_bits import compare

OPS = torch.ops.qshard
CAST = {"element": E4M3.name}
FUZZ = Path(__file__).parents[1] / "fuzz" / "fuzz_calls.py"


def test_drawn_calls_do_no_harm(tmp_path):
    """Valid, nearly valid and hostile calls of every op.

    They run in a child, which records each call before it can crash.
    """
    progress = tmp_path / "progress"
    command = [sys.executable, "-P", str(FUZZ), "--calls", "3000", "--progress", str(progress)]
    run = subprocess.run(command, text=True, capture_output=True, check=False)
    assert run.returncode == 0, f"call {progress.read_text()}: {run.stdout}{run.stderr}"


def test_random_calls_repeat_their_bits():
    """`make gpufuzz` compares the CPU with the GPU by the same function."""
    assert compare("cpu", 100, seed=0) == []


def amax_slices(amax, starts, x, shapes, block=(0, 0), whole="none", ops=OPS):
    ops.amax_slices(
        starts, amax, x, block_rows=block[0], block_cols=block[1], rounded_to="float32", shapes=shapes, whole=whole
    )


WORDS = torch.zeros(4, 2, dtype=torch.int32)
HUGE = {
    "wholes": (lambda: amax_slices(torch.zeros(4), WORDS, [torch.ones(64)] * 4, [2**62, 1] * 4, whole="row")),
    "blocks": (lambda: amax_slices(torch.zeros(0), WORDS, [torch.ones(64)] * 4, [2**63 - 1, 1] * 4, (1, 2))),
    "elements": (lambda: amax_slices(torch.zeros(2), WORDS[:2], [torch.ones(64)] * 2, [2**62, 2] * 2)),
    "negative": (lambda: amax_slices(torch.zeros(1), WORDS[:1], [torch.ones(64)], [-1, 2])),
}


@pytest.mark.parametrize("case", HUGE)
def test_sizes_from_attributes_are_multiplied_with_care(case):
    with pytest.raises(ValueError, match=r"amax_slices: (amax|shapes)"):
        HUGE[case]()


@pytest.mark.parametrize("whole", ["tensor", "row"])
def test_amaxes_of_whole_weights_need_blocks(whole):
    """No format has both, and on GPUs the amaxes of rows were written elsewhere."""
    with pytest.raises(ValueError, match=rf"^amax_slices: whole \({whole}\) needs blocks, but .*; pass whole='none'"):
        amax_slices(torch.zeros(9), WORDS[:1], [torch.ones(64)], (8, 8), whole=whole)


@pytest.mark.parametrize("shape", [(1, 2**59), (2**59, 1), (0, 2**62), (2**62, 0), (2**40, 2**40)], ids=str)
def test_weights_of_slices_are_bounded(shape):
    """Kernels compute `cols * 16`, which must not overflow."""
    with pytest.raises(ValueError, match=r"amax_slices: shapes \(.*\) of weight 0 are larger than memory"):
        amax_slices(torch.zeros(4), WORDS[:1], [torch.ones(64)], shape, (1, 2**31 - 1))


FP8 = {"eps": 0.0, "pow2": False, "rounding": "up", "scale_dtype": "float32", **CAST}


def test_the_largest_block_is_the_matrix():
    largest = {"block_rows": 2**31 - 1, "block_cols": 2**31 - 1}
    x = torch.arange(64.0).reshape(8, 8)
    assert OPS.amax_block(x, **largest) == 63
    for op in ("quantize_block", "quantize_block_t", "quantize_square_both"):
        results = getattr(OPS, op)(x, **largest, **FP8)
        codes = OPS.cast_tensor(x, 1 / results[1].reshape(()), **CAST)
        assert torch.equal(results[0], codes.T if op.endswith("_t") else codes)


def test_results_share_no_memory():
    memory = torch.zeros(128, dtype=torch.uint8)
    x, scale = memory.view(torch.float32)[:16], torch.ones(())
    with pytest.raises(ValueError, match="cast_tensor: result data overlaps operand x; allocate it separately"):
        _ffi.call("cast_tensor", (x, scale), (memory[8:24],), CAST)
    with pytest.raises(ValueError, match=r"scale_from_amax: result scale(_inv)? overlaps result scale"):
        _ffi.call("scale_from_amax", (scale,), (scale.clone(),) * 2, {**CAST, "eps": 0.0, "pow2": False})


def test_memory_is_aligned_to_its_dtype():
    x = torch.frombuffer(bytearray(17), dtype=torch.float32, count=4, offset=1)
    with pytest.raises(ValueError, match="cast_tensor: x is not aligned to the 4 bytes of float32; copy it"):
        _ffi.call("cast_tensor", (x, torch.ones(())), (torch.zeros(4, dtype=torch.uint8),), CAST)


def test_tensors_are_held_for_the_call():
    """Another thread may clear the lists of tensors while the kernel runs."""
    attributes = {"batch": 0, **CAST}
    for _ in range(20):
        x, scale = torch.ones(1024, 512), torch.ones(())
        codes = [torch.zeros(1024, 512, dtype=torch.uint8), torch.zeros(512, 1024, dtype=torch.uint8)]
        inputs = [x, scale]
        del x, scale
        threads = [threading.Thread(target=inputs.clear), threading.Thread(target=codes.clear)]
        for thread in threads:
            thread.start()
        with contextlib.suppress(ValueError):  # Cleared before the call began.
            _ffi.call("cast_transpose", inputs, codes, attributes)
        for thread in threads:
            thread.join()


def test_arrays_of_jax_are_not_written():
    jnp = pytest.importorskip("jax.numpy")
    result = jnp.zeros(4, jnp.uint8)
    with pytest.raises(TypeError, match=r"output 0 .* is a JAX array, which cannot be written"):
        _ffi.call("cast_tensor", (np.ones(4, np.float32), np.float32(1).reshape(())), (result,), CAST)
    assert not result.any()


def test_negated_views_are_not_read_as_they_lie():
    x = torch._neg_view(torch.ones(4))
    assert torch.equal(OPS.cast_tensor(x, torch.ones(()), **CAST).view(torch.float8_e4m3fn).float(), -torch.ones(4))
    with pytest.raises(ValueError, match=r"input 0 \(.*Tensor\) is a negated view.* call .resolve_neg"):
        into(torch.zeros(4, dtype=torch.uint8)).cast_tensor(x, torch.ones(()), **CAST)


def test_the_pool_starts_no_more_threads_than_tasks():
    code = (
        "import threading, numpy as np; from pathlib import Path; from qshard import _ffi\n"
        "_ffi.set_num_threads(2**62); x, amax = np.ones(2**20, np.float32), np.zeros((), np.float32)\n"
        "for _ in range(3): _ffi.call('amax_tensor', (x,), (amax,), {'lead': 0})\n"
        "print(amax, len(list(Path('/proc/self/task').iterdir())) < 64)"
    )
    run = subprocess.run([sys.executable, "-P", "-c", code], text=True, capture_output=True, check=True, timeout=60)
    assert run.stdout.split() == ["1.0", "True"]


FORKS = """
import os, signal, threading, numpy as np
from qshard import _ffi
_ffi.set_num_threads(3)
x, stop = np.ones(2**18, np.float32), threading.Event()
def work():
    amax = np.zeros((), np.float32)
    _ffi.call("amax_tensor", (x,), (amax,), {"lead": 0})
    return amax == 1
def forever():
    while not stop.is_set():
        work()
thread = threading.Thread(target=forever)
thread.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if work() else 3)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
thread.join()
"""


def test_forked_processes_have_threads_of_their_own():
    """A fork while the parent's pool works gets its own threads."""
    command = [sys.executable, "-W", "ignore", "-P", "-c", FORKS]  # Python warns if a process with threads forks.
    run = subprocess.run(command, text=True, capture_output=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr


def test_threads(monkeypatch):
    """The count comes from the environment, then from torch, then from `set_num_threads`."""
    code = (
        "import sys, torch, qshard; from qshard.torch_bridge._ops import bind as ops; first = qshard.num_threads()\n"
        "call = lambda: torch.ops.qshard.amax_tensor(torch.ones(20000))\n"
        "torch.set_num_threads(3); call(); second = qshard.num_threads()\n"
        "qshard.set_num_threads(5); call(); print(first, second, qshard.num_threads())"
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    run = subprocess.run([sys.executable, "-P", "-c", code], text=True, capture_output=True, check=True)
    assert run.stdout.split() == ["2", "3", "5"]
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000000")
    code = "import qshard; print(qshard.num_threads())"
    run = subprocess.run([sys.executable, "-P", "-c", code], text=True, capture_output=True, check=True)
    assert run.stdout.split() == ["1"]
    with pytest.raises(ValueError, match=r"set_num_threads: n \(0\) is not positive"):
        qshard.set_num_threads(0)


def of_slices(amax, starts, x, shapes):
    return amax_slices(amax, starts, x, shapes, ops=ops)


NONE = {
    "starts": (
        lambda: of_slices(torch.zeros(1), None, [torch.ones(64)], [1, 2]),
        "starts .None. is not a torch.Tensor",
    ),
    "amax": (lambda: of_slices(None, WORDS[:1], [torch.ones(64)], [1, 2]), "amax .None. is not a torch.Tensor"),
    "x": (lambda: of_slices(torch.zeros(1), WORDS[:1], None, [1, 2]), "x .None. is not a list of torch.Tensor"),
    "x[0]": (lambda: of_slices(torch.zeros(1), WORDS[:1], [None], [1, 2]), r"x\[0\] .None. is not a torch.Tensor"),
    "a number": (lambda: ops.amax_tensor(3.0, lead=1), r"x \(3.0\) is not a torch.Tensor; pass one"),
    "alone": (lambda: ops.amax_tensor(None, lead=1), r"x \(None\) is not a torch.Tensor; pass one"),
    "second": (
        lambda: ops.cast_tensor(torch.ones(4), None, element="float8_e4m3fn"),
        r"scale \(None\) is not a torch.T",
    ),
}


@pytest.mark.parametrize("case", NONE)
def test_what_is_no_tensor(case):
    """Torch accepts None as a tensor without memory, and would call the kernel with it."""
    call, text = NONE[case]
    with pytest.raises(TypeError, match=rf"^\w+: {text}"):
        call()


def test_none_reaches_no_kernel():
    for starts, amax, name in ((None, torch.zeros(1), "starts"), (WORDS[:1], None, "amax")):
        with pytest.raises(TypeError, match=rf"^amax_slices: {name} \(None\) is not a torch.Tensor; pass one"):
            amax_slices(amax, starts, [torch.ones(64)], [1, 2])


def test_what_is_no_array_of_jax():
    jnp = pytest.importorskip("jax.numpy")
    from qshard.jax._sharding.multi_tensor import bind

    given = {"block_rows": 0, "block_cols": 0, "rounded_to": "float32", "shapes": (1, 2), "whole": "none"}
    for operands, text in (
        ((None, jnp.zeros(1), [jnp.ones(64)]), r"starts \(None\) is not a JAX or NumPy array"),
        ((jnp.zeros((1, 2), "uint32"), jnp.zeros(1), None), r"x \(None\) is not a list of arrays"),
        ((jnp.zeros((1, 2), "uint32"), jnp.zeros(1), [None]), r"x\[0\] \(None\) is not a JAX or NumPy array"),
    ):
        with pytest.raises(TypeError, match=f"^amax_slices: {text}"):
            bind("amax_slices")(*operands, **given)
