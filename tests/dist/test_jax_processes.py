"""The law and an FSDP step over processes that share nothing but a network: jax.distributed with gloo."""

import os
import socket
import subprocess
import sys
from pathlib import Path

PROCESS = Path(__file__).parents[1] / "jax_process.py"
COUNT = 2


def test_two_processes(tmp_path):
    """Each process checks its own shards (jax_process.py)."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    logs = [tmp_path / f"{index}.log" for index in range(COUNT)]
    processes = []
    for index, log in enumerate(logs):
        with log.open("w") as output:
            command = [sys.executable, str(PROCESS), address, str(COUNT), str(index)]
            processes.append(subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=os.environ.copy()))
    try:
        for process, log in zip(processes, logs, strict=True):
            assert process.wait(timeout=240) == 0, log.read_text()
            assert log.read_text().endswith("done\n")
    finally:
        for process in processes:
            process.kill()
            process.wait()
