"""Build plan: whether a build has CUDA kernels, and the package version. CMake and scikit-build-core both read it.

The version ends in a label, `+cpu` or `+cu130`, so that pip's last line shows it and wheels of both can share a folder.
sdists, and wheels built from them, have no label: pip rejects a wheel with another version than its sdist.
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
    """CUDA part of a build.

    Attributes:
      cuda: version of the toolkit, such as "13.0", or "" for a build without CUDA.
      nvcc: path of the compiler, or "".
      reason: why the build has no CUDA, or "".
    """

    cuda: str = ""
    nvcc: str = ""
    reason: str = ""

    @property
    def label(self) -> str:
        """Label of the version, such as "cu130" or "cpu"."""
        return f"cu{self.cuda.replace('.', '')}" if self.cuda else "cpu"


def plan(wanted: str, environ: Mapping[str, str] = os.environ, devices: str = "/dev") -> Plan:
    """Decide whether to build CUDA kernels.

    Args:
      wanted: "AUTO" or "" builds them if nvcc and a GPU are found, "ON" or "1" if nvcc is found, "OFF" or "0" never.
      environ: the environment, searched for nvcc.
      devices: the folder of device files, searched for a GPU.

    Returns:
      The plan.

    Raises:
      SystemExit: `wanted` is something else, or it is ON and nvcc is missing or too old.
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
    elif choice == "AUTO" and not has_gpu(devices):
        return Plan(reason="no GPU here; QSHARD_CUDA=ON builds it")
    else:
        return Plan(cuda=cuda, nvcc=nvcc)
    if choice == "ON":
        raise SystemExit(f"qshard: QSHARD_CUDA=ON, but {problem}; {remedy}, or set QSHARD_CUDA=OFF")
    return Plan(reason=f"{problem}; to build it, {remedy}")


def find_nvcc(environ: Mapping[str, str] = os.environ) -> str:
    """Return the path of CUDACXX, or of nvcc on PATH or in a CUDA installation, or ""."""
    homes = [environ.get("CUDA_HOME"), environ.get("CUDA_PATH"), "/usr/local/cuda"]
    given = environ.get("CUDACXX")
    names = [given] if given else ["nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    return next(filter(None, (shutil.which(name, path=environ.get("PATH")) for name in names)), "")


def version_of(nvcc: str) -> str:
    """Return the CUDA version of an nvcc, such as "13.0", or "" if it does not run."""
    try:
        said = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    found = re.search(r"release (\d+\.\d+)", said)
    return found[1] if found else ""


def has_gpu(devices: str) -> bool:
    """Return whether a folder of device files has an NVIDIA GPU."""
    return bool(glob.glob(f"{devices}/nvidia[0-9]*")) or os.path.exists(f"{devices}/dxg")  # dxg: a GPU under WSL


def version(base: str, label: str, root: Path) -> str:
    """Return the version with its label, or `base` if `root` is an unpacked sdist."""
    return base if (root / "PKG-INFO").exists() else f"{base}+{label}"


def base_version(root: Path) -> str:
    """Return the version without a label, from pyproject.toml."""
    entries = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["dynamic-metadata"]
    return next(entry["version"] for entry in entries if "version" in entry)


class Provider:
    """Version provider of scikit-build-core, named in pyproject.toml's `[[tool.dynamic-metadata]]`."""

    def build_state(self, state: str) -> None:
        """Store the kind of build, such as "sdist" or "wheel"."""
        self.state = state

    def dynamic_metadata(self, settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, str]:
        """Return the package version."""
        if self.state == "sdist":
            return {"version": settings["version"]}
        label = plan(os.environ.get("QSHARD_CUDA", "")).label
        return {"version": version(settings["version"], label, Path.cwd())}


def tell(line: str) -> None:
    """Print a line on the terminal itself, because pip hides the output of a build."""
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\n  {line}\n")
    except OSError:
        pass


def main(arguments: list[str]) -> None:
    """Run a command.

    `plan WANTED` prints the version, the CUDA version, nvcc and the reason, one per line.
    `tell LINE` prints LINE on the terminal.
    """
    if arguments[0] == "tell":
        tell(arguments[1])
        return
    chosen, root = plan(arguments[1]), Path(__file__).parents[2]
    print(version(base_version(root), chosen.label, root), chosen.cuda, chosen.nvcc, chosen.reason, sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
