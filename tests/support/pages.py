"""Pages of Markdown: the blocks of code in them, and how they are run as a reader would."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


class Page:
    """The code of a page.

    Attributes:
      python: its blocks of Python.
      commands: the lines of its shell blocks, in words.
    """

    def __init__(self, path: str) -> None:
        self.text = (REPOSITORY / path).read_text()
        blocks = re.findall(r"^```(\w*)\n(.*?)^```$", self.text, re.MULTILINE | re.DOTALL)
        self.python = [code for language, code in blocks if language == "python"]
        self.commands = [
            shlex.split(line, comments=True)
            for language, block in blocks
            for line in block.replace("\\\n", " ").splitlines()
            if language in ("", "sh", "bash") and line.strip()
        ]

    @property
    def scripts(self) -> list[str]:
        """The blocks of Python as programs. A block that imports its framework, or names its file, begins a new one."""
        found: list[list[str]] = []
        for code in self.python:
            if not found or re.search(r"^import (?:torch|jax)$|^# \w+\.py", code, re.MULTILINE):
                found.append([])
            found[-1].append(code)
        return ["\n".join(blocks) for blocks in found]

    def rows(self, first: str) -> list[dict[str, str]]:
        """The table whose first heading is `first`."""
        lines = self.text[self.text.index(f"| {first} |") :].split("\n\n")[0].splitlines()
        heads, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
        return [dict(zip(heads, row, strict=True)) for row in rows]


def modules(code: str) -> set[str]:
    """The packages that a program imports, without those of its own functions' bodies."""
    return set(re.findall(r"^(?:import|from) (\w+)", code, re.MULTILINE))


# PyTorch keeps a process group past destroy_process_group once a functional collective used it. A thread of gloo that
# still holds a tensor when Python ends then aborts the rank: "terminate called without an active exception" (2.13).
LET_GLOO_FINISH = """
import time
time.sleep(0.2)
"""


def run(script: Path, command: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs `command`, of `python` or `torchrun`, beside the script."""
    programs = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    # Without what conftest.py sets for JAX. GLOO_SOCKET_IFNAME: a container may not know its own name.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    if len(list(Path("/dev").glob("nvidia[0-9]*"))) < 2:  # Two ranks are two GPUs, or two processes without any.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
    if command[0] == "torchrun":
        with script.open("a") as end:
            end.write(LET_GLOO_FINISH)
    return subprocess.run(
        [*programs[command[0]], *command[1:]],
        cwd=script.parent,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def run_as_told(page: Page, folder: Path) -> list[str]:
    """Runs all blocks of Python as one script, by the line that says how; asserts that it ends well.

    Returns:
      The lines with warnings.
    """
    (command,) = re.findall(r"`(torchrun .*)`$", page.text, re.MULTILINE)
    script = folder / command.split()[-1]
    script.write_text("\n".join(page.python))
    result = run(script, command.split())
    assert result.returncode == 0, result.stderr
    return [line for line in result.stderr.splitlines() if "Warning: " in line]
