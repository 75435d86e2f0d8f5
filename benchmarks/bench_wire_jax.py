"""Wire traffic of a step under FSDP in JAX, compiled for 8, 64 and 512 H100s: collectives, and bytes of whole arrays.

`step_jax.py` has the model, here with two layers. It needs JAX's CUDA plugin (`make h100`) but no GPU: rows are read
off the program that XLA compiles for GPUs that do not exist. Weights, codes and scales are gathered. Amaxes, and
partial sums of the loss and the norms, are reduced. Gradients are scattered. Embedding and head, bfloat16 in all rows,
are not counted.

bf16 weights are gathered once and saved for backward. Codes are gathered again in backward, unless the kind is "kept".
`gathers` counts gathers of weights, a combined one once. `hidden` counts those with a GEMM between start and end.

    python benchmarks/bench_wire_jax.py [--layers 2] [--devices 8,64,512] [--kinds bf16,fp8]
"""

from __future__ import annotations

import argparse
import collections
import sys
from dataclasses import replace
from pathlib import Path

from model_shapes import SHAPES, Shape

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import h100
from support.hlo import size, traffic

KINDS = "bf16,naive,fp8,fp8 kept,delayed,block,mxfp8,nvfp4,nvfp4 kept"
COLUMNS = {"all-gather": "gathered", "all-reduce": "reduced", "reduce-scatter": "scattered"}


def row_of(kind: str, devices: int, shape: Shape) -> dict[str, object]:
    import step_jax

    program = step_jax.lower(step_jax.mesh_of(h100.devices(devices)), kind, shape, "xla").compile()
    vocabulary = tuple(f"[{shape.vocabulary // count}," for count in (1, devices))
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
        if column == "gathered" and sum(map(size, arrays)) > 2**20:  # skips gathers for norms
            gathers, hidden = gathers + 1, hidden + each.hidden
    row: dict[str, object] = {"kind": kind, "devices": devices, "layers": shape.layers, "collectives": counts.total()}
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

    # The vocabulary gives whole shards on 512 devices, and a size that no other array has.
    shape = replace(SHAPES["2b"], layers=arguments.layers, vocabulary=65536)

    found = []
    for kind in arguments.kinds.split(","):
        for devices in map(int, arguments.devices.split(",")):
            found.append(row_of(kind, devices, shape))
            print(found[-1], flush=True)
            rows.write("wire_jax", "compiled for NVIDIA H100", found)


if __name__ == "__main__":
    main()
