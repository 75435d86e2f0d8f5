"""How much memory the command takes: it goes with the largest tensor, not with the checkpoint."""

import os
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from support.checkpoints import file_of

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")

MIB = 2**20
ALONE = 160 * MIB
"""Python, NumPy, ml_dtypes, rich and the tiles of two threads."""
PEAK = (
    "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)\n"
    "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)


def checkpoint(path, shapes):
    """Tensors of bfloat16, written in parts."""
    header, at = {}, 0
    for i, shape in enumerate(shapes):
        size = 2 * int(np.prod(shape))
        header[f"w{i}"] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    part = np.random.default_rng(0).standard_normal(MIB // 2, np.float32).astype(ml_dtypes.bfloat16).tobytes()
    with path.open("wb") as file:
        file.write(file_of(header))
        for first in range(0, at, MIB):
            file.write(part[: min(MIB, at - first)])
    return max(2 * int(np.prod(shape)) for shape in shapes)


def peak(*arguments):
    """The most bytes that the command had in memory."""
    command = [sys.executable, "-P", "-m", "qshard", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *command], capture_output=True, text=True, check=True, env=environment
    )
    status, kibibytes = map(int, done.stdout.split())
    assert status == 0, done.stderr
    return kibibytes * 1024


@pytest.mark.parametrize("command", ["report", "convert"])
def test_of_a_small_checkpoint(command, tmp_path):
    """64 MiB in 16 tensors, of which one is there at a time: with codes and, of columns, a copy."""
    path = tmp_path / "a.safetensors"
    largest = checkpoint(path, [(1024, 2048)] * 16)
    if command == "convert":
        arguments = (tmp_path / "o.safetensors", "--format", "NVFP4_16x16", "--usage", "both")
    else:
        arguments = ("--formats", "FP8_E4M3,NVFP4", "--usage", "both")
    assert peak(command, path, *arguments) < ALONE + 4 * largest


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", ["report", "convert"])
def test_of_two_gigabytes(command, tmp_path):
    """With one tensor of half a GB, as embeddings are."""
    path = tmp_path / "a.safetensors"
    largest = checkpoint(path, [(131072, 2048)] + [(4096, 4096)] * 48)
    assert path.stat().st_size > 2 * 10**9
    arguments = (tmp_path / "o.safetensors", "--format", "NVFP4_16x16") if command == "convert" else ()
    taken = peak(command, path, *arguments)
    print(f"{command}: {taken / 1e9:.2f} GB, the largest tensor {largest / 1e9:.2f} GB")
    assert taken < largest + 1.5e9
