"""What a build of qshard has in it, decided here alone: CMake asks this file, and so does the version of the package.

The version ends in what was built, `+cpu` or `+cu130`: pip's last line says it, and wheels of both lie side by side.
That of an sdist does not, nor of what is built from one: pip refuses a package of another version than it looked for.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OLDEST_CUDA = (13, 0)


@dataclass(frozen=True)
class Plan:
    """`cuda` is the toolkit's version, such as 13.0, and `nvcc` the compiler; both empty: without, for `reason`."""

    cuda: str = ""
    nvcc: str = ""
    reason: str = ""

    @property
    def label(self) -> str:
        return f"cu{self.cuda.replace('.', '')}" if self.cuda else "cpu"


def plan(wanted: str, environ: Mapping[str, str] = os.environ) -> Plan:
    """AUTO is CUDA where nvcc and a GPU are, ON with nvcc alone, OFF never.

    Raises:
      SystemExit: `wanted` is something else, or ON where nvcc is missing or too old.
    """
    choice = {"": "AUTO", "1": "ON", "0": "OFF"}.get(wanted, wanted.upper())
    if choice not in ("AUTO", "ON", "OFF"):
        raise SystemExit(f"qshard: QSHARD_CUDA ({wanted}) is not AUTO, ON or OFF")
    if choice == "OFF":
        return Plan(reason="QSHARD_CUDA=OFF")
    nvcc = find_nvcc(environ)
    cuda = version_of(nvcc) if nvcc else ""
    if not cuda:
        problem, remedy = "no nvcc here", "put nvcc on PATH or set CUDACXX"
    elif tuple(map(int, cuda.split("."))) < OLDEST_CUDA:
        oldest = ".".join(map(str, OLDEST_CUDA))
        problem, remedy = f"{nvcc} is of CUDA {cuda}, older than {oldest}", f"install CUDA {oldest} or set CUDACXX"
    elif choice == "AUTO" and not has_gpu():
        return Plan(reason="no GPU here; QSHARD_CUDA=ON builds it")
    else:
        return Plan(cuda=cuda, nvcc=nvcc)
    if choice == "ON":
        raise SystemExit(f"qshard: QSHARD_CUDA=ON, but {problem}; {remedy}, or set QSHARD_CUDA=OFF")
    return Plan(reason=f"{problem}; to build it, {remedy}")


def find_nvcc(environ: Mapping[str, str] = os.environ) -> str:
    """CUDACXX, or else nvcc on PATH or where CUDA is installed; "" where there is none."""
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda"]
    given = environ.get("CUDACXX")
    names = [given] if given else ["nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    return next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in names)), "")


def version_of(nvcc: str) -> str:
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else ""


def has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*")) or os.path.exists("/dev/dxg")  # dxg: a GPU under WSL


def version(base: str, label: str, root: Path) -> str:
    return base if (root / "PKG-INFO").exists() else f"{base}+{label}"


def base_version(root: Path) -> str:
    entries = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["dynamic-metadata"]
    return next(entry["version"] for entry in entries if "version" in entry)


class Provider:
    """The version, for scikit-build-core: `[[tool.dynamic-metadata]]` in pyproject.toml."""

    def build_state(self, state: str) -> None:
        self.state = state

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
        if self.state == "sdist":
            return {"version": settings["version"]}
        label = plan(os.environ.get("QSHARD_CUDA", "")).label
        return {"version": version(settings["version"], label, Path.cwd())}


def tell(line: str) -> None:
    """Writes to the terminal itself, for pip shows nothing of what a build prints."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\n  {line}\n")
    except OSError:
        pass


def main(arguments: list[str]) -> None:
    """`plan WANTED` prints the version, that of CUDA, nvcc and the reason, a line each. `tell LINE` writes a line."""
    if arguments[0] == "tell":
        tell(arguments[1])
        return
    chosen, root = plan(arguments[1]), Path(__file__).parents[2]
    print(version(base_version(root), chosen.label, root), chosen.cuda, chosen.nvcc, chosen.reason, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
