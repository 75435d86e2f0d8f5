"""What a step under FSDP in JAX moves, compiled for 8, 64 and 512 H100s: collectives, and bytes a device gets.

`step_jax.py` is the model, of two layers. No GPU is needed, but JAX's CUDA plugin (`make h100`): the rows are read off
what XLA makes of the step for GPUs that are not there. Gathered are weights, codes and scales; reduced are amaxes and
what the loss and norms need; scattered are gradients.

    python benchmarks/bench_wire_jax.py [--layers 2] [--devices 8,64,512] [--kinds bf16,fp8]
"""

from __future__ import annotations

import argparse
import collections
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from support import h100
from support.hlo import collectives as collectives_of

KINDS = "bf16,naive,fp8,fp8 kept,delayed,block,mxfp8,nvfp4,nvfp4 kept"
COLUMNS = {"all-gather": "gathered", "all-reduce": "reduced", "reduce-scatter": "scattered"}


def size_of(array: str) -> int:
    """Bytes of "u8[128,64]"."""
    dtype, dims = re.fullmatch(r"([a-z]+\d*)\w*\[([\d,]*)\]", array).groups()  # type: ignore[union-attr]
    bits = 8 if dtype == "pred" else int(re.sub(r"\D", "", dtype))
    return math.prod(int(size) for size in dims.split(",") if size) * bits // 8


def _is_of_vocabulary(array: str, devices: int) -> bool:
    import step_jax

    return any(f"[{step_jax.VOCABULARY // count}," in array for count in (1, devices))


def row_of(kind: str, devices: int, layers: int) -> dict[str, object]:
    import step_jax

    program = step_jax.lowered(step_jax.mesh_of(h100.devices(devices)), kind, layers, "xla").compile()
    counts: collections.Counter[str] = collections.Counter()
    sizes: collections.Counter[str] = collections.Counter()
    for name, arrays in collectives_of(program):
        arrays = [array for array in arrays if not _is_of_vocabulary(array, devices)]
        if not arrays:
            continue
        column = COLUMNS.get(name, "other")
        counts[column] += 1
        sizes[column] += sum(map(size_of, arrays))
    row: dict[str, object] = {"kind": kind, "devices": devices, "layers": layers, "collectives": counts.total()}
    return row | {f"{column}_MB": f"{sizes[column] / 1e6:.3f}" for column in (*COLUMNS.values(), "other")}


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

    step_jax.VOCABULARY = 32768  # Whole shards on 512.

    found = []
    for kind in arguments.kinds.split(","):
        for devices in map(int, arguments.devices.split(",")):
            found.append(row_of(kind, devices, arguments.layers))
            print(found[-1], flush=True)
            rows.write("wire_jax", "compiled for NVIDIA H100", found)


if __name__ == "__main__":
    main()
