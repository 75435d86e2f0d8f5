"""Sections of docs/results.md about training steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence

from step_profile import NAMES
from tables import Rows, Tables, origin, table


def sharded_section(tables: Tables, name: str, title: str) -> str:
    rows = tables[name]
    base = next((row for row in rows if row["recipe"] == "bf16"), None)
    columns = [
        "recipe",
        "kind",
        "ms",
        "peak_GiB",
        "gathered_MB",
        "reduced_MB",
        "amaxes_MB",
        "codes_B",
        "high_precision_B",
    ]
    columns += ["states_B"]
    header = [*columns[:3], "of bf16", *(column.replace("_", " ") for column in columns[3:])]
    lines = []
    for row in rows:
        ratio = f"{float(row['ms']) / float(base['ms']):.2f}" if base else "-"
        lines.append([*(row[c] for c in columns[:3]), ratio, *(row[c] for c in columns[3:])])
    text = (
        f"A step of a 2.0 B model on {rows[0]['ranks']} GPUs, eager; `bench_fsdp2.py` says what is in a row. "
        "Bytes are those that a rank keeps for an element of its part; of what is not FSDP2, all weights are counted."
    )
    return f"## {title}\n\n{origin(rows)} {text}\n\n{table(header, lines)}\n"


def against_bf16(rows: Rows, column: str, columns: Sequence[str]) -> str:
    """Build a table of rows, with the ratio of `column` to bf16 on the same number of devices."""
    base = {row["devices"]: float(row[column]) for row in rows if row["kind"] == "bf16"}
    header = [part.replace("_", " ") for part in columns]
    lines = []
    for row in rows:
        of = base.get(row["devices"])
        lines.append([*(row[c] for c in columns), f"{float(row[column]) / of:.2f}" if of else "-"])
    return table([*header, f"{column.split('_')[0]} of bf16"], lines)


def step_jax_section(tables: Tables) -> str:
    rows = tables["step_jax"]
    text = (
        f"A step of a 2.0 B model on {rows[0]['devices']} GPUs, that of `step_jax.py`, as `bench_step_jax.py` times it."
    )
    body = against_bf16(rows, "ms", ["kind", "devices", "ms", "peak_GiB", "compile_s"])
    return f"## FSDP in JAX\n\n{origin(rows)} {text}\n\n{body}\n"


def wire_jax_section(tables: Tables) -> str:
    rows = tables["wire_jax"]
    text = (
        f"What a step of {rows[0]['layers']} layers of that model moves, read off the program that XLA makes for so "
        "many GPUs; `bench_wire_jax.py` says what is in a row."
    )
    columns = [
        "kind",
        "devices",
        "collectives",
        "gathered_MB",
        "reduced_MB",
        "scattered_MB",
        "other_MB",
        "gathers",
        "hidden",
    ]
    return f"## What FSDP moves in JAX\n\n{origin(rows)} {text}\n\n{against_bf16(rows, 'gathered_MB', columns)}\n"


def tensor_parallel_jax_section(tables: Tables) -> str:
    rows = tables["tensor_parallel_jax"]
    text = (
        f"A block of width 8192, forward and backward, cut over {rows[0]['devices']} GPUs: "
        "`bench_tensor_parallel_jax.py` says what is in a row."
    )
    columns = ["kind", "devices", "ms", "times_bf16", "peak_GiB", "compile_s"]
    lines = [[row[column] for column in columns] for row in rows]
    return f"## Tensor parallelism in JAX\n\n{origin(rows)} {text}\n\n{table(columns, lines)}\n"


def tensor_parallel_section(tables: Tables) -> str:
    rows = tables["tensor_parallel"]
    text = (
        f"{rows[0]['layers']} blocks of width 8192, forward and backward, sharded over {rows[0]['ranks']} GPUs; "
        "`bench_tensor_parallel.py` says what a kind is. A single step, and back-to-back steps, in percent of bf16."
    )
    header = ["kind", "ms", "% of bf16", "ms, back to back", "% of bf16", "peak GiB", "% of bf16"]
    return f"## Tensor parallelism in PyTorch\n\n{origin(rows)} {text}\n\n{table(header, step_torch_lines(rows))}\n"


def grouped_section(tables: Tables) -> str:
    rows = tables["grouped"]
    columns = ["kind", "ms", "times_bf16"]
    text = "A layer of experts on one GPU, forward and backward; `bench_grouped.py` says what a kind is."
    return f"## Experts\n\n{origin(rows)} {text}\n\n{table(columns, [[row[c] for c in columns] for row in rows])}\n"


def grouped_jax_section(tables: Tables) -> str:
    rows = tables["grouped_jax"]
    columns = ["kind", "shape", "ms", "times_bf16"]
    text = "A layer of experts in JAX on one GPU, forward and backward; `bench_grouped_jax.py` says what a kind is."
    body = table(columns, [[row[c] for c in columns] for row in rows])
    return f"## Experts in JAX\n\n{origin(rows)} {text}\n\n{body}\n"


def moe_section(tables: Tables, name: str, title: str) -> str:
    rows = tables[name]
    columns = ["kind", "ms", "times_bf16"]
    text = f"A mixture-of-experts layer on one GPU, forward and backward; `bench_{name}.py` says what a kind is."
    body = table(columns, [[row[c] for c in columns] for row in rows])
    return f"## {title}\n\n{origin(rows)} {text}\n\n{body}\n"


def parallel_section(tables: Tables, name: str, title: str) -> str:
    rows = tables[name]
    columns = [column for column in rows[0] if column not in ("machine", "commit", "versions", "date")]
    body = table(columns, [[row[c] for c in columns] for row in rows])
    return f"## {title}\n\n{origin(rows)} `bench_{name}.py` says what a kind is.\n\n{body}\n"


def scaling_section(tables: Tables, name: str) -> str:
    rows = tables[name]
    columns = [column for column in rows[0] if column not in ("machine", "commit", "versions", "date")]
    body = table([column.replace("_", " ") for column in columns], [[row[c] for c in columns] for row in rows])
    title = name.removeprefix("scaling_").replace("_", " ")
    return f"## On several GPUs: {title}\n\n{origin(rows)} `multi_gpu.sh` runs it.\n\n{body}\n"


def step_torch_lines(rows: Rows) -> list[list[str]]:
    """Build lines of time per single step, time per step of many, and memory, each also in percent of eager bf16.

    Without eager bf16, in percent of compiled bf16.
    """
    kinds = ("bf16", "bf16 compiled", "bf16 compiled whole")
    base = next((row for kind in kinds for row in rows if row["kind"] == kind), None)
    lines = []
    for row in rows:
        cells = [row["kind"]]
        for column in ("ms", "running_ms", "peak_GiB"):
            cells += [row[column], f"{100 * float(row[column]) / float(base[column]):.0f}" if base else "-"]
        lines.append(cells)
    return lines


def step_torch_section(tables: Tables, name: str, title: str, model: str) -> str:
    rows = tables[name]
    ranks = int(rows[0]["ranks"])
    where = f"{ranks} GPUs under FSDP2" if ranks > 1 else "one GPU"
    text = (
        f"A step of {model} on {where}, that of `step_torch.py`; `bench_step_torch.py` "
        "says what a kind is. A single step, and back-to-back steps, in percent of bf16. The first step compiles."
    )
    first = [[*line, row["first_s"]] for line, row in zip(step_torch_lines(rows), rows, strict=True)]
    header = ["kind", "ms", "% of bf16", "ms, back to back", "% of bf16", "peak GiB", "% of bf16", "first step, s"]
    return f"## {title}\n\n{origin(rows)} {text}\n\n{table(header, first)}\n"


def step_profile_section(tables: Tables, name: str, title: str) -> str:
    rows = tables[name]
    text = (
        "Milliseconds a step of one of the GPUs, by what its kernels are for, as `step_profile.py` tells them apart. "
        "Parts run beside each other, so they add up to more. Where no kernel computes, either only collectives run "
        "(exposed), or nothing does (idle)."
    )
    columns = ["kind", "step", *NAMES]
    body = table(columns, [[row[column] for column in columns] for row in rows])
    return f"## {title}\n\n{origin(rows)} {text}\n\n{body}\n"


def step_flat_section(tables: Tables) -> str:
    rows = tables["step_torch_flat"]
    columns = ["kind", "first_ms", "last_ms", "first_peak_GiB", "last_peak_GiB", "grown_bytes"]
    body = table(
        [column.replace("_", " ") for column in columns], [[row[column] for column in columns] for row in rows]
    )
    text = "The first and the last 10 of 50 steps: medians of time, peaks of memory, and what stays in use beyond them."
    return f"## 50 steps in PyTorch\n\n{origin(rows)} {text}\n\n{body}\n"


_STEPS = {
    "step_torch": ("A step in PyTorch", "a 2.0 B model"),
    "step_whole": ("A step that is not sharded", "a 2.0 B model in bfloat16"),
    "step_muon": ("A step with Muon", "a 2.0 B model"),
    "step_muon_fp8": ("A step with Muon in FP8, and under ZeRO", "a 2.0 B model, beside other work on the host,"),
    "step_moe_qwen": ("A step with 128 experts", "6 layers as in Qwen3-30B-A3B, 16 k tokens a GPU,"),
    "step_moe_deepseek": ("A step with 64 large experts", "2 layers as in DeepSeek-V3, 4 k tokens a GPU,"),
}


def _step_sections() -> Iterator[tuple[str, Callable[[Tables], str]]]:
    for name, (title, model) in _STEPS.items():
        yield name, functools.partial(step_torch_section, name=name, title=title, model=model)
        yield (
            f"{name}_profile",
            functools.partial(step_profile_section, name=f"{name}_profile", title=f"{title}: where its time goes"),
        )


STEP_SECTIONS: dict[str, Callable[[Tables], str]] = {
    **dict(_step_sections()),
    "step_torch_flat": step_flat_section,
    "fsdp2": functools.partial(sharded_section, name="fsdp2", title="FSDP2"),
    "zero1": functools.partial(sharded_section, name="zero1", title="Weights whole on every rank"),
    "step_jax": step_jax_section,
    "wire_jax": wire_jax_section,
    "tensor_parallel": tensor_parallel_section,
    "grouped": grouped_section,
    "grouped_jax": grouped_jax_section,
    "moe": functools.partial(moe_section, name="moe", title="Whole layers of experts"),
    "moe_jax": functools.partial(moe_section, name="moe_jax", title="Whole layers of experts in JAX"),
    "expert_parallel": functools.partial(parallel_section, name="expert_parallel", title="Expert parallelism"),
    "expert_parallel_jax": functools.partial(
        parallel_section, name="expert_parallel_jax", title="Expert parallelism in JAX"
    ),
    "stream_weights": functools.partial(parallel_section, name="stream_weights", title="Weight sync"),
    "tensor_parallel_jax": tensor_parallel_jax_section,
}
