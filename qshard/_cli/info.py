"""`qshard info`: what the report of a bug should hold."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

import click

import qshard
from qshard._cli import options
from qshard._core import environment

LIBRARIES = ("click", "rich", "safetensors")
SMI_SECONDS = 20
SMI = ("nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader")


@click.command(cls=options.Command)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(as_json: bool) -> None:
    """What the report of a bug should hold: build, kernels, CUDA, versions, machine."""
    facts = collected()
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(environment.build_info())
    for name in ("libraries", "processor", "threads", "gpus"):
        value = facts[name]
        click.echo(f"{name}: {', '.join(value) if isinstance(value, list) else value}")


def collected() -> dict[str, object]:
    """All facts, by name."""
    from qshard import _ffi

    return {
        "build_info": environment.build_info(),
        "version": environment.__version__,
        "build": dict(_ffi.build_info),
        "simd": _ffi.simd(),
        "cuda_built": bool(_ffi.cuda_built),
        "libraries": [f"{name} {metadata.version(name)}" for name in LIBRARIES],
        "processor": processor(),
        "threads": f"{qshard.num_threads()} of {os.cpu_count()}",
        "gpus": gpus(),
    }


def processor() -> str:
    """The name of the processor, as Linux has it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpus() -> list[str]:
    """Name, compute capability and driver of each GPU, as nvidia-smi has them; why not, where it does not."""
    if shutil.which(SMI[0]) is None:
        return [f"none: no {SMI[0]}"]
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, check=False, timeout=SMI_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [f"not known: {error}"]
    if done.returncode:
        return [f"not known: {SMI[0]} ended with {done.returncode}"]
    return [line.strip() for line in done.stdout.splitlines()]
