"""The cache of GEMM plans: hot plans stay, and new numbers of tokens need few calls of the heuristic."""

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from qshard import _ffi, gemm_dispatch  # noqa: E402
from qshard.formats import FP8_E4M3  # noqa: E402
from qshard.torch_bridge._ops.bind import ops  # noqa: E402

ROWS = 32000
MOST = 200
"""Buckets of 16, 32, .. 32000: 31, and 16 for each power of two from 512 on, for one workspace."""


def test_a_hot_plan_stays_and_searches_are_few():
    """2,000 shapes, and a hot shape between them."""
    codes = torch.zeros(ROWS, 64, dtype=torch.uint8, device="cuda")
    scale = torch.ones((), device="cuda")
    workspace = gemm_dispatch.workspace_size(FP8_E4M3, FP8_E4M3, (ROWS, 64, 64))

    def multiply(m, n=64):
        keywords = {"a_element": "float8_e4m3fn", "b_element": "float8_e4m3fn", "fast": True}
        return ops.gemm(codes[:m], scale, codes[:n], scale, dtype=torch.bfloat16, workspace=workspace, **keywords)

    multiply(80, 80)
    hits, misses, searches = _ffi.gemm_counts()
    for m in range(16, ROWS + 1, 16):
        multiply(m)
        multiply(80, 80)
    after = _ffi.gemm_counts()
    assert after[0] - hits == 2000
    assert after[1] - misses == 2000
    assert after[2] - searches <= MOST


FORKS = """
import os, signal, threading
from qshard import _ffi
stop = threading.Event()
def forever():
    while not stop.is_set():
        _ffi.gemm_library_version()
threads = [threading.Thread(target=forever) for _ in range(4)]
for thread in threads:
    thread.start()
for _ in range(200):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        _ffi.gemm_library_version()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for thread in threads:
    thread.join()
"""


def test_forked_processes_may_ask_for_the_version():
    """The threads of the parent hold the mutex of the library most of the time."""
    command = [sys.executable, "-W", "ignore", "-P", "-c", FORKS]
    run = subprocess.run(command, env=os.environ, text=True, capture_output=True, check=False, timeout=200)
    assert run.returncode == 0, run.stderr
