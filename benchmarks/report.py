"""Writes docs/results.md, and the numbers in README.md, from the rows in `results/`.

In README.md it replaces the text between `<!-- rows: NAME -->` and `<!-- end -->`. A table without rows stays as it is.

    python benchmarks/report.py [--check]     --check: write nothing; fail if a file differs from its rows
"""

from __future__ import annotations

import argparse
import re

from report_readme import README_BLOCKS
from report_steps import STEP_SECTIONS, scaling_section
from rows import RESULTS
from tables import Rows, Tables, number, origin, read, replace_block, table
from targets import CPU_TIMES_FASTER, TARGETS, Row, Target, training_bound, what_of

ROOT = RESULTS.parent.parent

GPU_SECTIONS = {
    "gpu_ops": "Ops on one GPU",
    "gpu_formats": "Quantizations on one GPU",
    "gpu_adam": "A step of Adam on one GPU",
    "gpu_master": "The steps of cast_master on one GPU",
}
JUDGED = (
    "step_torch",
    "tensor_parallel",
    "tensor_parallel_jax",
    "grouped",
    "moe",
    "expert_parallel",
    "stream_weights",
    *GPU_SECTIONS,
    "cross_entropy",
    "host",
    "numerics",
)
"""Files with targets in `TARGETS`."""
HEAD = """# Results

For people who compare speeds: every row of `benchmarks/results`, the newest subject first. The script
`benchmarks/report.py` writes this page, so edit nothing here. Ratios count within one table only.
`benchmarks/gpu_timing.py` says how GPUs are timed, each `bench_*.py` what its rows are, and `benchmarks/targets.py` the
goals, which were set before the first measurement.
"""


def judge(name: str, tables: Tables) -> list[tuple[Target, Row, float]]:
    """Return each target of a file, with each of its rows and the row's value."""
    rows = tables.get(name, [])
    return [
        (target, row, value)
        for target in TARGETS
        if target.rows == name
        for row in rows
        if (value := target.value(row, rows)) is not None
    ]


def gpu_section(name: str, tables: Tables) -> str:
    rows = tables[name]
    verdicts = verdicts_of(name, tables)
    columns = ["operation", "shape", "bytes_per_element", "us", "GB_per_s", "percent_of_copy"]
    header = ["operation", "shape", "bytes an element", "us", "GB/s", "% of copy", "target"]
    lines = [[*(number(row, c) for c in columns), verdicts.get(row["operation"], "")] for row in rows]
    return f"## {GPU_SECTIONS[name]}\n\n{origin(rows)}\n\n{table(header, lines)}\n"


def verdicts_of(name: str, tables: Tables) -> dict[str, str]:
    """Return the verdict on each operation with a target, by operation."""
    verdicts: dict[str, list[str]] = {}
    for target, row, value in judge(name, tables):
        got = f" ({target.text(value)})" if target.of else ""
        verdict = f"{'met' if target.met(value) else 'missed'}{got}"
        limit = f"{'at most' if target.at_most else 'at least'} {target.text(target.bound)}{target.unit}"
        verdicts.setdefault(row["operation"], []).append(f"{limit}: {verdict}")
    return {operation: "; ".join(found) for operation, found in verdicts.items()}


def cross_entropy_section(tables: Tables) -> str:
    rows, verdicts = tables["cross_entropy"], verdicts_of("cross_entropy", tables)
    columns = ["operation", "shape", "us", "peak_GiB", "percent_of_copy"]
    lines = [[*(number(row, c) for c in columns), verdicts.get(row["operation"], "")] for row in rows]
    text = "Forward and backward; the peak is beside operands. `bench_cross_entropy.py` says what is in a row."
    header = ["operation", "shape", "us", "peak, GiB", "% of copy", "target"]
    return f"## Cross entropy on one GPU\n\n{origin(rows)} {text}\n\n{table(header, lines)}\n"


def host_section(tables: Tables) -> str:
    rows, verdicts = tables["host"], verdicts_of("host", tables)
    lines = [
        [row["operation"], row["us"], row["times"], row["beside"], verdicts.get(row["operation"], "")] for row in rows
    ]
    text = "Small tensors: the time of a call on the host. `bench_host.py` says what is in a row."
    return (
        f"## Host time\n\n{origin(rows)} {text}\n\n{table(['operation', 'us', 'times', 'that of', 'target'], lines)}\n"
    )


def gemm_section(rows: Rows, title: str, shape: str) -> str:
    """Build a table with a line per contender and a column per shape. `shape` names the sizes of a shape."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    by = {(row["operation"], row["shape"]): row for row in rows}
    lines = []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        found = [by.get((operation, shape)) for shape in shapes]
        lines.append([operation, *(f"{number(row, 'us')} ({number(row, 'TFLOP_per_s')})" for row in found)])
    text = f"us (TFLOP/s) of {shape}, with cuBLASLt {number(rows[0], 'cublaslt')}."
    return f"## {title}\n\n{origin(rows)} {text}\n\n{table(['', *shapes], lines)}\n"


def cpu_lines(rows: Rows) -> dict[tuple[str, str], dict[str, Row]]:
    """Group rows of qshard, torch and jnp by operation and shape."""
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        operation, _, who = row["operation"].rpartition(" ")
        found.setdefault((operation.rstrip(","), row["shape"]), {})[who] = row
    return {key: by for key, by in found.items() if "qshard" in by}


def times_faster(by: dict[str, Row]) -> float | None:
    rivals = [float(by[who]["us"]) for who in ("torch", "jnp") if who in by]
    return min(rivals) / float(by["qshard"]["us"]) if rivals else None


def cpu_section(rows: Rows) -> str:
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    header = ["operation", "shape", "us", "GB/s", "% of copy", "torch eager, us", "jitted jnp, us", "times faster"]
    lines = []
    for (operation, shape), by in cpu_lines(rows).items():
        times, simd = times_faster(by), by["qshard"]["simd"]
        slow = times is not None and times < CPU_TIMES_FASTER and shape == shapes[0]
        ours = [number(by["qshard"], c) for c in ("us", "GB_per_s", "percent_of_copy")]
        theirs = [number(by.get(who), "us") for who in ("torch", "jnp")]
        verdict = "-" if times is None else f"{times:.1f}{' (missed)' if slow else ''}"
        lines.append([operation, shape, *ours, *theirs, verdict])
    text = f"The target: {CPU_TIMES_FASTER:g} times as fast as the faster of the others, at {shapes[0]}, in cache."
    head = f"## CPU kernels, {simd}, {threads(rows)}\n\n{origin(rows)} {text}"
    return f"{head}\n\n{table(header, lines)}\n"


def numerics_section(tables: Tables) -> str:
    rows = tables["numerics"]
    missed = {row["operation"] for target, row, value in judge("numerics", tables) if not target.met(value)}
    columns = ["operation", "shape", "seconds", "cpu_seconds", "load", "memory_per_array", "times_faster"]
    header = [
        "operation",
        "shape",
        "seconds",
        "of all cores",
        "load before",
        "memory, arrays",
        "times faster than NumPy",
        "target",
    ]
    lines = [[*(row[c] for c in columns), "missed" if row["operation"] in missed else "met"] for row in rows]
    text = "Memory is beyond that of the array, in multiples of it. A load of more than 0 is that of other processes."
    return f"## Numerics, {threads(rows)}\n\n{origin(rows)} {text}\n\n{table(header, lines)}\n"


def training_section(tables: Tables) -> str:
    columns = ["framework", "recipe", "device", "ranks", "steps", "validation_loss", "percent_to_bf16"]
    columns += ["gathered_bytes_a_step", "ms_a_step", "gathered_sha256"]
    header = [column.replace("_", " ") for column in columns[:-1]]
    header = [*header, "gathered SHA-256", "target"]
    both = [row for name in ("training_jax", "training_torch") for row in tables.get(name, [])]
    lines = [[*(row[c] for c in columns[:-1]), row["gathered_sha256"][:16], training_verdict(row)] for row in both]
    return f"## Training\n\n{origin(both)}\n\n{table(header, lines)}\n"


def training_verdict(row: Row) -> str:
    bound = training_bound(row["recipe"])
    if row["recipe"] == "bf16" or not row["percent_to_bf16"]:
        return ""
    return f"at most {bound:g} %: {'met' if float(row['percent_to_bf16']) <= bound else 'missed'}"


def targets(tables: Tables) -> str:
    """Build a table of targets with their comparison, how many rows meet them, and which rows miss them."""
    verdicts: dict[tuple[str, str], list[bool]] = {(target.name, target.beside): [] for target in TARGETS}
    for name in JUDGED:
        for target, _, value in judge(name, tables):
            verdicts[target.name, target.beside].append(target.met(value))
    found = missed(tables)
    lines = [
        [*key, f"{sum(met)} of {len(met)}" if met else "not measured", ", ".join(found.pop(key[0], ()))]
        for key, met in verdicts.items()
    ]
    lines += [[target, "", "", ", ".join(rows)] for target, rows in found.items()]
    return table(["target", "compared with; for GPUs, on an H200", "rows that meet it", "rows that miss it"], lines)


def missed(tables: Tables) -> dict[str, list[str]]:
    """Return the rows that miss a target, by target."""
    found: dict[str, list[str]] = {}
    for name in JUDGED:
        for target, row, value in judge(name, tables):
            if not target.met(value):
                operation = re.sub(r",? qshard$|^(de)?quantize |, amax given", "", what_of(row))
                found.setdefault(target.name, []).append(f"{operation} {target.text(value)}")
    for name in sorted(name for name in tables if name.startswith("cpu_kernels")):
        rows = tables[name]
        for (operation, shape), by in cpu_lines(rows).items():
            times = times_faster(by)
            if shape == rows[0]["shape"] and times is not None and times < CPU_TIMES_FASTER:
                where = f"{CPU_TIMES_FASTER:g} times as fast as torch eager and jitted jnp on a CPU ({name})"
                found.setdefault(where, []).append(f"{operation} {times:.1f}")
    for name in ("training_jax", "training_torch"):
        for row in tables.get(name, []):
            if training_verdict(row).endswith("missed"):
                bound = training_bound(row["recipe"])
                where = f"a validation loss at most {bound:g} % above that of bf16"
                found.setdefault(where, []).append(f"{row['framework']} {row['recipe']} {row['percent_to_bf16']} %")
    return found


def results(tables: Tables) -> str:
    """Build the page: the targets, then one section a subject, the newest first."""
    sections = [(name, gpu_section(name, tables)) for name in GPU_SECTIONS if name in tables]
    if "cross_entropy" in tables:
        sections.append(("cross_entropy", cross_entropy_section(tables)))
    if "host" in tables:
        sections.append(("host", host_section(tables)))
    if "gpu_gemm" in tables:
        sections.append(("gpu_gemm", gemm_section(tables["gpu_gemm"], "GEMMs on one GPU", "M x N x K")))
    if "gpu_grouped_gemm" in tables:
        title = "Grouped GEMMs of experts on one GPU"
        grouped = gemm_section(tables["gpu_grouped_gemm"], title, "experts x tokens x K x N")
        sections.append(("gpu_grouped_gemm", grouped))
    sections += [(name, section(tables)) for name, section in STEP_SECTIONS.items() if name in tables]
    sections += [(name, scaling_section(tables, name)) for name in tables if name.startswith("scaling_")]
    trainings = [name for name in ("training_jax", "training_torch") if name in tables]
    if trainings:
        sections.append((trainings[0], training_section(tables)))
    sections += [(name, cpu_section(rows)) for name, rows in tables.items() if name.startswith("cpu_kernels")]
    if "numerics" in tables:
        sections.append(("numerics", numerics_section(tables)))
    newest_first = sorted(sections, key=lambda section: max(row["date"] for row in tables[section[0]]), reverse=True)
    return "\n".join([HEAD, "## Targets\n\n" + targets(tables) + "\n", *(text for _, text in newest_first)])


def threads(rows: Rows) -> str:
    return f"{rows[0]['threads']} thread{'s' * (rows[0]['threads'] != '1')}"


def readme(text: str, tables: Tables) -> str:
    """Return README.md with its blocks replaced."""
    for block, (needed, write) in README_BLOCKS.items():
        if all(name in tables for name in needed):
            text = replace_block(text, "README.md", block, write(tables))
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    tables = read()
    paths = {name: ROOT / name for name in ("docs/results.md", "README.md")}
    texts = {name: path.read_text() if path.exists() else "" for name, path in paths.items()}
    wanted = {"docs/results.md": results(tables), "README.md": readme(texts["README.md"], tables)}
    stale = [name for name in paths if texts[name] != wanted[name]]
    if options.check and stale:
        raise SystemExit(f"report: {', '.join(stale)} differ from the rows; run python benchmarks/report.py")
    for name in stale:
        paths[name].write_text(wanted[name])
        print(f"-> {paths[name]}")


if __name__ == "__main__":
    main()
