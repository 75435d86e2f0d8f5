"""The law, a step of FSDP, and ZeRO, over processes that share nothing but a network: jax.distributed with gloo."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from support.formats import ZEROED

TESTS = Path(__file__).parents[1]
COUNT = 2


@pytest.mark.parametrize(
    "check",
    ["law,numerics,MXFP8", *(pytest.param(name, marks=pytest.mark.slow) for name in ZEROED if name != "MXFP8")],
)
def test_two_processes(check, tmp_path):
    """Each process checks its own shards (support/jax_process.py)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    logs = [tmp_path / f"{index}.log" for index in range(COUNT)]
    processes = []
    for index, log in enumerate(logs):
        with log.open("w") as output:
            command = [sys.executable, "-m", "support.jax_process", address, str(COUNT), str(index), check]
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=TESTS))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=240) == 0, log.read_text()
            assert log.read_text().endswith("done\n")
    finally:
        for process in processes:
            process.kill()
            process.wait()
