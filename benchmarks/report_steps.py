"""What RESULTS.md says of training steps, from their rows."""

from __future__ import annotations

from collections.abc import Sequence

from tables import Rows, Tables, origin, table


def fsdp2_section(tables: Tables) -> str:
    rows = tables["fsdp2"]
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
        "Bytes are those that a rank keeps for an element of its part; of ZeRO, all its weights are counted."
    )
    return f"## FSDP2\n\n{origin(rows)} {text}\n\n{table(header, lines)}\n"


def against_bf16(rows: Rows, column: str, columns: Sequence[str]) -> str:
    """A table of rows; with the ratio of `column` to that of bf16 on as many devices."""
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
