"""Training step of a 2.0 B model under FSDP in JAX, for every recipe: time, memory, compile time.

`step_jax.py` has the model. Each kind runs in its own process, so that peak memory is the peak of its step: everything
that XLA's allocator had in use, including weights and states. Steps are issued back to back and timed together.

XLA's Triton GEMMs are off for all kinds: autotuning them takes minutes for FP8 products, and they are not faster.

    python benchmarks/bench_step_jax.py [--layers 8] [--steps 6] [--kinds bf16,naive,fp8]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

OPTIONS = {"xla_gpu_enable_triton_gemm": False}
KINDS = "bf16,naive,fp8,fp8 fused,fp8 local,delayed,block,mxfp8,mxfp6,mxfp4,nvfp4"


def measure(kind: str, layers: int, steps: int) -> dict[str, object]:
    import jax
    import numpy as np

    import step_jax

    devices = jax.devices()
    mesh = step_jax.mesh_of(np.array(devices))
    began = time.perf_counter()
    program = step_jax.lower(mesh, kind, layers, "cudnn").compile(compiler_options=OPTIONS)
    compiled = time.perf_counter() - began
    state = step_jax.start(mesh, kind, layers)
    places = program.input_shardings[0][-2:]
    shape = (step_jax.BATCH * len(devices), step_jax.CONTEXT + 1)
    tokens = np.random.default_rng(0).integers(0, step_jax.VOCABULARY, shape, dtype=np.int32)
    tokens, key = jax.device_put((tokens, jax.random.key(0)), places)
    *state, loss = program(*state, tokens, key)
    *state, loss = program(*state, tokens, key)
    loss.block_until_ready()
    times = []
    for _ in range(3):  # each is the average of several steps
        began = time.perf_counter()
        for _ in range(steps):
            *state, loss = program(*state, tokens, key)
        loss.block_until_ready()
        times.append((time.perf_counter() - began) / steps)
    stats = devices[0].memory_stats()
    return {
        "kind": kind,
        "devices": len(devices),
        "layers": layers,
        "ms": f"{1e3 * statistics.median(times):.1f}",
        "peak_GiB": f"{stats['peak_bytes_in_use'] / 2**30:.2f}",
        "compile_s": f"{compiled:.1f}",
        "loss": f"{float(loss):.4f}",
        "machine": devices[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--out", default="step_jax", help="the file of results, without .csv")
    parser.add_argument("--one", help="measure one kind, and print its row as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, arguments.layers, arguments.steps)))
        return
    if subprocess.run(["nvidia-smi", "-L"], capture_output=True, check=False).returncode:
        parser.exit(message="bench_step_jax: no CUDA device, nothing to measure\n")
    import rows

    found = []
    for kind in arguments.kinds.split(","):
        command = [sys.executable, __file__, "--one", kind]
        command += ["--layers", str(arguments.layers), "--steps", str(arguments.steps)]
        environment = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if result.returncode:
            print(f"{kind}: {result.stderr[-2000:]}", file=sys.stderr)
            continue
        found.append(json.loads(result.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
        machine = str(found[-1].pop("machine"))
        rows.write(arguments.out, machine, found)


if __name__ == "__main__":
    main()
