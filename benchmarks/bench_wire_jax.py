"""What a step under FSDP in JAX moves, compiled for 8, 64 and 512 H100s: collectives, and bytes of whole arrays.

`step_jax.py` is the model, of two layers. No GPU is needed, but JAX's CUDA plugin (`make h100`): the rows are read off
what XLA makes of the step for GPUs that are not there. Gathered are weights, codes and scales; reduced are amaxes and
what the loss and norms need; scattered are gradients. The embedding and the head, bfloat16 in all rows, are left out.

bf16 is gathered once, and kept for the backward pass. Codes are gathered again there, unless they are "kept". Gathers
are those of weights, a combined one counted once; hidden are those with a GEMM between their start and their end.

    python benchmarks/bench_wire_jax.py [--layers 2] [--devices 8,64,512] [--kinds bf16,fp8]
"""

from __future__ import annotations

import argparse
import collections
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import h100
from support.hlo import size, traffic

KINDS = "bf16,naive,fp8,fp8 kept,delayed,block,mxfp8,nvfp4,nvfp4 kept"
COLUMNS = {"all-gather": "gathered", "all-reduce": "reduced", "reduce-scatter": "scattered"}


def row_of(kind: str, devices: int, layers: int) -> dict[str, object]:
    import step_jax

    program = step_jax.lowered(step_jax.mesh_of(h100.devices(devices)), kind, layers, "xla").compile()
    vocabulary = tuple(f"[{step_jax.VOCABULARY // count}," for count in (1, devices))
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    hidden = gathers = 0
    for each in traffic(program):
        arrays = [array for array in each.arrays if not any(mark in array for mark in vocabulary)]
        if not arrays:
            continue
        column = COLUMNS.get(each.kind, "other")
        counts[column] += each.times
        sizes[column] += each.times * sum(map(size, arrays)) * (devices if column == "scattered" else 1)
        if column == "gathered" and sum(map(size, arrays)) > 2**20:  # Not those of norms.
            gathers, hidden = gathers + 1, hidden + each.hidden
    row: dict[str, object] = {"kind": kind, "devices": devices, "layers": layers, "collectives": counts.total()}
    row |= {f"{column}_MB": f"{sizes[column] / 1e6:.3f}" for column in (*COLUMNS.values(), "other")}
    return row | {"gathers": gathers, "hidden": hidden}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--devices", default="8,64,512")
    parser.add_argument("--kinds", default=KINDS)
    arguments = parser.parse_args()
    if not h100.is_there():
        parser.exit(message="bench_wire_jax: no CUDA plugin of JAX to compile with (make h100)\n")
    h100.prepare()
    import rows
    import step_jax

    step_jax.VOCABULARY = 65536  # Whole shards on 512, of no size that others have.

    found = []
    for kind in arguments.kinds.split(","):
        for devices in map(int, arguments.devices.split(",")):
            found.append(row_of(kind, devices, arguments.layers))
            print(found[-1], flush=True)
            rows.write("wire_jax", "compiled for NVIDIA H100", found)


if __name__ == "__main__":
    main()
