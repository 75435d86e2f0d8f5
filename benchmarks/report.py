"""Writes docs/results.md, and the numbers in README.md, from the rows in `results/`.

In README.md whatever is between `<!-- rows: NAME -->` and `<!-- end -->` is written here. A table whose rows are not
there is left as it is.

    python benchmarks/report.py [--check]     --check: write nothing; fail if a file differs from its rows
"""

from __future__ import annotations

import argparse
import fnmatch
import re
import statistics
from collections.abc import Callable

from report_steps import README_RECIPES, STEP_SECTIONS, readme_step_torch
from rows import RESULTS
from tables import Rows, Tables, number, origin, read, table
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
    *GPU_SECTIONS,
    "cross_entropy",
    "host",
    "numerics",
)
"""Files whose rows have targets in `TARGETS`."""
# README's table: label, qshard's operations, those of torch.compile. Numbers of one line are apart by " / ".
README_GPU = (
    ("cast to E4M3", ["cast_tensor"], ["cast_tensor"]),
    ("cast and transpose", ["cast_transpose"], ["cast_transpose"]),
    ("dequantize", ["dequantize"], ["dequantize"]),
    ("current scaling: amax, scale, cast", ["current scaling"], ["current scaling"]),
    (
        "quantize to FP8_1x128 / FP8_128x128",
        ["quantize FP8_1x128 rowwise", "quantize FP8_128x128 rowwise"],
        ["quantize FP8_1x128 rowwise", "quantize FP8_128x128 rowwise"],
    ),
    (
        "quantize to MXFP8 1x32 / 32x32",
        ["quantize MXFP8_E4M3 rowwise", "quantize MXFP8_32x32 rowwise"],
        ["quantize MXFP8_E4M3 rowwise", "quantize MXFP8_32x32 rowwise"],
    ),
    (
        "quantize to NVFP4 1x16 / 16x16, with its amax",
        ["quantize NVFP4 rowwise", "quantize NVFP4_16x16 rowwise"],
        [],
    ),
    ("both planes: FP8_1x128 / 128x128", ["quantize FP8_1x128 both", "quantize FP8_128x128 both"], []),
    ("both planes: MXFP8 vectors / squares", ["quantize MXFP8_E4M3 both", "quantize MXFP8_32x32 both"], []),
    (
        "both planes: NVFP4 vectors / squares, with the amax",
        ["quantize NVFP4 both", "quantize NVFP4_16x16 both"],
        [],
    ),
    (
        "Adam, fp32 / bf16 states / FP8 states",
        ["adam float32", "adam float32, states bfloat16", "adam float32, states FP8"],
        [],
    ),
    ("masters to slices of FP8 / NVFP4 16x16, 64 x 2 M", ["cast_master FP8_E4M3", "cast_master NVFP4_16x16"], []),
)
HEAD = """# Results

For people who compare speeds: every row of `benchmarks/results`, the newest subject first. The script
`benchmarks/report.py` writes this page, so edit nothing here. Ratios count within one table only.
`benchmarks/gpu_timing.py` says how GPUs are timed, each `bench_*.py` what its rows are, and `benchmarks/targets.py` the
goals, which were set before the first measurement.
"""


def judged(name: str, tables: Tables) -> list[tuple[Target, Row, float]]:
    """Every target of a file with the rows that it is for."""
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
    """What a table says of each operation that has a target."""
    verdicts: dict[str, list[str]] = {}
    for target, row, value in judged(name, tables):
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
    text = "Small tensors, eager: what a call costs on the host. `bench_host.py` says what is in a row."
    return (
        f"## Host time\n\n{origin(rows)} {text}\n\n{table(['operation', 'us', 'times', 'that of', 'target'], lines)}\n"
    )


def gemm_section(rows: Rows) -> str:
    """A line for each contender, a column for each shape."""
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    by = {(row["operation"], row["shape"]): row for row in rows}
    lines = []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        found = [by.get((operation, shape)) for shape in shapes]
        lines.append([operation, *(f"{number(row, 'us')} ({number(row, 'TFLOP_per_s')})" for row in found)])
    text = f"us (TFLOP/s) of M x N x K, with cuBLASLt {number(rows[0], 'cublaslt')}."
    return f"## GEMMs on one GPU\n\n{origin(rows)} {text}\n\n{table(['', *shapes], lines)}\n"


def cpu_lines(rows: Rows) -> dict[tuple[str, str], dict[str, Row]]:
    """Rows of the same operation and shape side by side: those of qshard, torch and jnp."""
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
    missed = {row["operation"] for target, row, value in judged("numerics", tables) if not target.met(value)}
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
    """Each target, what it compares with, and how many of its rows meet it."""
    verdicts: dict[tuple[str, str], list[bool]] = {(target.name, target.beside): [] for target in TARGETS}
    for name in JUDGED:
        for target, _, value in judged(name, tables):
            verdicts[target.name, target.beside].append(target.met(value))
    found = missed(tables)
    lines = [
        [*key, f"{sum(met)} of {len(met)}" if met else "not measured", ", ".join(found.pop(key[0], ()))]
        for key, met in verdicts.items()
    ]
    lines += [[target, "", "", ", ".join(rows)] for target, rows in found.items()]
    return table(["target", "compared with; for GPUs, on an H200", "rows that meet it", "rows that miss it"], lines)


def missed(tables: Tables) -> dict[str, list[str]]:
    """The rows that miss a target, by target."""
    found: dict[str, list[str]] = {}
    for name in JUDGED:
        for target, row, value in judged(name, tables):
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
    """The page: the targets, then one section a subject, the newest first."""
    sections = [(name, gpu_section(name, tables)) for name in GPU_SECTIONS if name in tables]
    if "cross_entropy" in tables:
        sections.append(("cross_entropy", cross_entropy_section(tables)))
    if "host" in tables:
        sections.append(("host", host_section(tables)))
    if "gpu_gemm" in tables:
        sections.append(("gpu_gemm", gemm_section(tables["gpu_gemm"])))
    sections += [(name, section(tables)) for name, section in STEP_SECTIONS.items() if name in tables]
    trainings = [name for name in ("training_jax", "training_torch") if name in tables]
    if trainings:
        sections.append((trainings[0], training_section(tables)))
    sections += [(name, cpu_section(rows)) for name, rows in tables.items() if name.startswith("cpu_kernels")]
    if "numerics" in tables:
        sections.append(("numerics", numerics_section(tables)))
    newest_first = sorted(sections, key=lambda section: max(row["date"] for row in tables[section[0]]), reverse=True)
    return "\n".join([HEAD, "## Targets\n\n" + targets(tables) + "\n", *(text for _, text in newest_first)])


def readme_gpu(tables: Tables) -> str:
    by = {row["operation"]: row for name in GPU_SECTIONS for row in tables.get(name, [])}
    lines = []
    for label, operations, compiled in README_GPU:
        ours = [by.get(f"{op} qshard", by.get(op)) for op in operations]
        cells = [" / ".join(number(row, column) for row in ours) for column in ("us", "percent_of_copy")]
        rivals = " / ".join(number(by.get(f"{op} torch.compile"), "us") for op in compiled) or "-"
        if any(ours):
            lines.append([label, *cells, rivals])
    return table(["", "us", "% of copy", "torch.compile, us"], lines)


def readme_missed(tables: Tables) -> str:
    lines = [f"- {target}: {', '.join(rows)}" for target, rows in missed(tables).items()]
    return "Every target is met." if not lines else "Targets that are missed, and by what:\n\n" + "\n".join(lines)


def readme_cpu(tables: Tables) -> str:
    lines = ["CPU kernels against the faster of torch eager and jitted jnp, 1 M elements in cache:", ""]
    for rows in (rows for name, rows in tables.items() if name.startswith("cpu_kernels")):
        in_cache = [by for (_, shape), by in cpu_lines(rows).items() if shape == rows[0]["shape"]]
        times = [t for by in in_cache if (t := times_faster(by)) is not None]
        span = f"{min(times):.1f} to {max(times):.1f} times as fast, median {statistics.median(times):.1f}"
        lines.append(f"- {in_cache[0]['qshard']['simd']} ({rows[0]['machine']}, {threads(rows)}): {span}")
    return "\n".join(lines)


def threads(rows: Rows) -> str:
    return f"{rows[0]['threads']} thread{'s' * (rows[0]['threads'] != '1')}"


def readme_training(tables: Tables) -> str:
    sides = {who: {row["recipe"]: row for row in tables[f"training_{who}"]} for who in ("jax", "torch")}
    first = next(iter(sides["jax"].values()))
    recipes = [recipe for recipe in sides["jax"] if recipe in sides["torch"]]
    same = sum(sides["jax"][r]["gathered_sha256"] == sides["torch"][r]["gathered_sha256"] for r in recipes)
    lines = []
    for recipe in recipes:
        cells = [README_RECIPES.get(recipe, recipe)]
        for rows in sides.values():
            row, base = rows[recipe], rows.get("bf16")
            loss, size = row["validation_loss"], int(row["gathered_bytes_a_step"])
            if base and recipe != "bf16":
                loss += f" ({float(row['percent_to_bf16']):+.1f} %)"
            change = size / int(base["gathered_bytes_a_step"]) - 1 if base else 0
            cells += [loss, f"{size / 1e6:.2f} MB" + (f" ({100 * change:+.1f} %)" if abs(change) >= 0.01 else "")]
            cells.append(row["ms_a_step"])
        lines.append(cells)
    columns = ["validation loss", "gathered a step", "ms a step"]
    header = ["", *(f"JAX: {columns[0]}" if c == columns[0] else c for c in columns)]
    header += [f"PyTorch: {columns[0]}" if c == columns[0] else c for c in columns]
    head = (
        f"On {first['ranks']} ({first['device']}), {first['steps']} steps of every recipe (`make train FORMATS=all`).\n"
        f"Both frameworks gathered the same bytes in {same} of {len(recipes)}:"
    )
    return f"{head}\n\n{table(header, lines)}"


# The block, the files that it needs, and who writes it.
README_BLOCKS: dict[str, tuple[tuple[str, ...], Callable[[Tables], str]]] = {
    "training": (("training_jax", "training_torch"), readme_training),
    "step_torch": (("step_torch",), readme_step_torch),
    "gpu": (tuple(GPU_SECTIONS)[:3], readme_gpu),
    "missed": (tuple(GPU_SECTIONS)[:3], readme_missed),
    "cpu": (("cpu_kernels*",), readme_cpu),
}


def readme(text: str, tables: Tables) -> str:
    """README.md with its blocks written anew."""
    for name, (needed, write) in README_BLOCKS.items():
        if not all(fnmatch.filter(tables, pattern) for pattern in needed):
            continue
        begin, end = f"<!-- rows: {name} -->", "<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not found or not closed:
            raise SystemExit(f"report: README.md has no {begin} ... {end}; add it where the numbers belong")
        text = f"{before}{begin}\n{write(tables)}\n{end}{after}"
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
