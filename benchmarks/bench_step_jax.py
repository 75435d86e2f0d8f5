"""Training step of a model of 2.0 B weights under FSDP in JAX, for every recipe: time, memory, compile time.

`step_jax.py` has the model. Each kind runs in its own process, so that peak memory is the peak of its step: everything
that XLA's allocator had in use, including weights and states. Steps are issued back to back and timed together.

XLA's Triton GEMMs are off for all kinds: autotuning them takes minutes for FP8 products, and they are not faster.

    python benchmarks/bench_step_jax.py [--model 8b] [--steps 6] [--kinds bf16,naive,fp8]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

import model_shapes
import processes

OPTIONS = {"xla_gpu_enable_triton_gemm": False}
KINDS = "bf16,naive,fp8,fp8 fused,fp8 local,delayed,block,mxfp8,mxfp6,mxfp4,nvfp4"


def measure(kind: str, shape: model_shapes.Shape, steps: int) -> dict[str, object]:
    import jax
    import numpy as np

    import step_jax

    devices = jax.devices()
    mesh = step_jax.mesh_of(np.array(devices))
    attention = "xla" if jax.default_backend() == "cpu" else "cudnn"
    began = time.perf_counter()
    program = step_jax.lower(mesh, kind, shape, attention).compile(compiler_options=OPTIONS)
    compiled = time.perf_counter() - began
    state = step_jax.start(mesh, kind, shape)
    places = program.input_shardings[0][-2:]
    sizes = (shape.batch * len(devices), shape.context + 1)
    tokens = np.random.default_rng(0).integers(0, shape.vocabulary, sizes, dtype=np.int32)
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
    return {
        "kind": kind,
        "devices": len(devices),
        "layers": shape.layers,
        "tokens": shape.tokens,
        "ms": f"{1e3 * statistics.median(times):.1f}",
        "peak_GiB": processes.peak_gib(devices[0]),
        "compile_s": f"{compiled:.1f}",
        "loss": f"{float(loss):.4f}",
        "machine": devices[0].device_kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model_shapes.add_arguments(parser)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--kinds", default=KINDS)
    parser.add_argument("--out", default="step_jax", help="the file of results, without .csv")
    parser.add_argument("--one", help="measure one kind, and print its row as JSON")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.one, model_shapes.shape_of(arguments), arguments.steps)))
        return
    if not processes.has_device():
        parser.exit(message="bench_step_jax: no CUDA device, nothing to measure\n")
    given = [f"--model={arguments.model}", f"--steps={arguments.steps}"]
    given += [f"--{name}={value}" for name in ("layers", "batch") if (value := getattr(arguments, name)) is not None]
    sys.exit(processes.measure_kinds(__file__, arguments.kinds.split(","), given, arguments.out))


if __name__ == "__main__":
    main()
