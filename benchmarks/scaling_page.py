"""Tables of docs/dev/scaling.md, for `scaling_model.py`."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path

from model_shapes import SHAPES, Shape
from rows import RESULTS
from scaling_model import GIB, RECIPES, Anchor, Links, predict, step_megabytes, wire
from tables import Tables, read, replace_block, table

PAGE = RESULTS.parent.parent / "docs" / "dev" / "scaling.md"
RANKS = (64, 512, 4096)
BASE = "bf16 compiled"
KINDS = (
    *(BASE, "torchao compiled", "fp8 compiled", "fp8 fused", "fp8 fused zero"),
    *("block fused", "mxfp8 fused", "nvfp4 fused"),
)
PAYS = 0.95  # of the time of bf16
HOST = Links(0).host
LAYOUTS = {"FSDP2": 0, "HSDP": HOST}
"""Ranks that shard weights between them; 0: all."""
MODELS = {"2b": "2.0 B", "8b": "8 B"}
STEPS = re.compile(r"step_torch|scaling_(?:torch|jax)_(?:(?P<model>8b)_(?:\dx_)?)?\d+")  # 2x: two sequences a GPU


def tokens_of(row: dict[str, str], model: str) -> int:
    """Return the tokens of a GPU in a row. Rows of 2026-11-23 do not have them."""
    return int(row.get("tokens") or SHAPES[model].tokens)


@dataclass(frozen=True)
class Measured:
    """A row of `bench_step_torch.py` with its profile."""

    file: str
    row: dict[str, str]
    profile: dict[str, str]
    model: str

    @property
    def ranks(self) -> int:
        return int(self.row["ranks"])

    @property
    def shape(self) -> Shape:
        return replace(SHAPES[self.model], batch=tokens_of(self.row, self.model) // SHAPES[self.model].context)


def measured(tables: Tables) -> list[Measured]:
    found = []
    for file, rows in tables.items():
        match = STEPS.fullmatch(file)
        if not match or "_jax_" in file:
            continue
        profiles = {row["kind"]: row for row in tables[f"{file}_profile"]}
        model = match["model"] or "2b"
        found += [Measured(file, row, profiles[row["kind"]], model) for row in rows if row["kind"] in profiles]
    return found


def anchors(rows: list[Measured]) -> dict[tuple[str, str], Measured]:
    """Return the row of the 2.0 B model on the fewest GPUs, by machine and kind."""
    found: dict[tuple[str, str], Measured] = {}
    for each in rows:
        key = (each.row["machine"], each.row["kind"])
        if each.model == "2b" and (key not in found or each.ranks < found[key].ranks):
            found[key] = each
    return found


def links_of(tables: Tables, ranks: int) -> Links:
    """Return the links, with NVLink's rate as measured on the number of GPUs nearest to `ranks`."""
    rates = {int(name.rsplit("_", 1)[1]): rows for name, rows in tables.items() if name.startswith("scaling_collec")}
    if not rates:  # all-gathers of two GPUs: bytes that a GPU has at the end, half of them received
        return Links(1e9 * float(tables["stream_weights"][0]["all_gather_gb_per_s"]) / 2)
    rows = rates[min(rates, key=lambda n: abs(n - ranks))]
    gathers = [row for row in rows if row["kind"] == "all-gather"]
    return Links(1e9 * float(max(gathers, key=lambda row: float(row["mib"]))["gb_per_s"]))


def scaling(tables: Tables) -> str:
    """List steps of kinds by number of GPUs: time, its part of the time on fewest GPUs, peak, exposed communication."""
    lines = []
    for front, column, time in (("torch", "ranks", "running_ms"), ("jax", "devices", "ms")):
        found = [name for name in tables if STEPS.fullmatch(name) and name.startswith(f"scaling_{front}_")]
        files = found or [f"step_{front}"]
        first: dict[tuple[str, int, str], float] = {}
        for name in sorted(files, key=lambda name: ("_8b_" in name, int(tables[name][0][column]))):
            model = "8b" if "_8b_" in name else "2b"
            exposed = {row["kind"]: row["exposed"] for row in tables.get(f"{name}_profile", [])}
            for row in tables[name]:
                if front == "torch" and row["kind"] not in KINDS:
                    continue
                tokens = tokens_of(row, model)
                of = float(row[time]) / first.setdefault((model, tokens, row["kind"]), float(row[time]))
                cells = [row[time], f"{of:.2f}", row["peak_GiB"], exposed.get(row["kind"], "-")]
                lines.append([front, MODELS[model], f"{tokens}", row[column], row["kind"], *cells])
    header = ["front end", "model", "tokens", "GPUs", "kind", "ms", "of the fewest GPUs", "peak GiB", "exposed ms"]
    return table(header, lines)


def check(tables: Tables) -> str:
    """Compare predictions with measured steps. Rows that give the compute time are marked."""
    rows = measured(tables)
    basis = anchors(rows)
    lines = []
    for each in rows:
        anchor = basis.get((each.row["machine"], each.row["kind"]))
        if anchor is None or each.row["kind"] not in KINDS:
            continue
        model = Anchor.of(anchor.row, anchor.profile, anchor.shape)
        ms = 1e3 * predict(model, each.shape, each.ranks, links_of(tables, each.ranks)).seconds
        peak = model.peak_bytes(each.shape, each.ranks) / GIB
        pairs = ((float(each.row["running_ms"]), ms), (float(each.row["peak_GiB"]), peak))
        numbers = [f"{value:.1f}" for pair in pairs for value in pair]
        errors = [_percent(predicted / value) for value, predicted in pairs]
        name = f"{MODELS[each.model]}, {each.row['machine'].split()[1]}"
        marked = each.row["kind"] + " (basis)" * (each is anchor)
        lines.append([name, f"{each.ranks}", marked, *numbers[:2], errors[0], *numbers[2:], errors[1]])
    header = ["model, GPU", "GPUs", "kind", "ms", "predicted", "error, %", "peak GiB", "predicted", "error, %"]
    return table(header, lines)


def _percent(ratio: float) -> str:
    """Return how far a ratio is from 1. Zero is +0.0: its sign depends on how Python sums, which 3.12 changed."""
    return f"{round(100 * (ratio - 1), 1) + 0.0:+.1f}"


def wire_check(tables: Tables) -> str:
    """Compare bytes of whole arrays with those that `bench_fsdp2.py` counted."""
    lines = []
    for row in tables["fsdp2"]:
        if row["kind"] not in ("nn.Linear", "shard", "zero") or row["recipe"] not in RECIPES:
            continue
        predicted = step_megabytes(f"{row['recipe']} {row['kind']}", SHAPES["2b"])
        pairs = [(float(row[f"{name}_MB"]), value) for name, value in predicted.items()]
        errors = [_percent(value / counted) if counted else "-" for counted, value in pairs]
        cells = [f"{counted:.1f} / {value:.1f} ({by})" for (counted, value), by in zip(pairs, errors, strict=True)]
        lines.append([row["recipe"], "FSDP2" if row["kind"] != "zero" else "ZeRO", *cells])
    return table(["recipe", "weights", *(f"{name} MB / predicted (%)" for name in predicted)], lines)


def bases(tables: Tables) -> list[Anchor]:
    """Return the basis of each kind, on the machine with the newest rows."""
    found = anchors(measured(tables))
    newest = max((each.row for each in found.values() if each.row["kind"] == BASE), key=lambda row: row["date"])
    rows = [found[key] for kind in KINDS if (key := (newest["machine"], kind)) in found]
    return [Anchor.of(each.row, each.profile, each.shape) for each in rows]


def large(tables: Tables) -> str:
    """Predict steps on many GPUs."""
    links, found = links_of(tables, HOST), bases(tables)
    lines = []
    for name, layout in itertools.product(MODELS, LAYOUTS):
        shape, group = SHAPES[name], LAYOUTS[layout]
        base = [predict(found[0], shape, ranks, links, group) for ranks in RANKS]
        for each in found:
            steps = [predict(each, shape, ranks, links, group) for ranks in RANKS]
            pairs = zip(steps, base, strict=True)
            times = [f"{1e3 * step.seconds:.0f} ({step.seconds / of.seconds:.2f})" for step, of in pairs]
            sent = network_bytes(each.kind, shape, RANKS[0], group) / 1e9
            peak = each.peak_bytes(shape, group or RANKS[0]) / GIB
            of_first = [f"{sent:.1f}", f"{steps[0].sent_for_compute:.2f}", f"{peak:.0f}"]
            lines.append([MODELS[name], layout, each.kind, *times, *of_first])
    header = ["model", "weights", "kind", *(f"ms on {ranks} GPUs (of bf16)" for ranks in RANKS)]
    return table([*header, "GB over the network", "sent / compute", "GiB"], lines)


def network_bytes(kind: str, shape: Shape, ranks: int, group: int) -> float:
    """Return the bytes that a GPU receives from other hosts in a step, all of a ring's if it spans hosts."""
    sent = wire(kind, shape)
    reduced = shape.layers * sent.gradients + sent.root
    if group:
        return 2 * reduced / group * (1 - group / ranks)
    passes = 1 if "zero" in kind.split() else 2
    amaxes = 2 * passes * shape.layers * sent.amaxes
    return (2 * shape.layers * sent.block + sent.root + reduced + amaxes) * (1 - 1 / ranks)


def pays(tables: Tables) -> str:
    """Say for each kind on which numbers of GPUs a step of 8 B takes at most 95 % of the time of bf16."""
    links = links_of(tables, HOST)
    base, *others = bases(tables)
    shape = SHAPES["8b"]
    lines = []
    for each in others:
        cells = []
        for group in LAYOUTS.values():
            every = [2**n for n in range(3 + bool(group), 13)]
            ratios = {
                n: predict(each, shape, n, links, group).seconds / predict(base, shape, n, links, group).seconds
                for n in every
            }
            where = [n for n in every if ratios[n] <= PAYS]
            best = min(every, key=lambda n: ratios[n])
            cells.append(f"{where[0]} to {where[-1]}" if where else "nowhere")
            cells.append(f"{ratios[best]:.2f} on {best}")
        lines.append([each.kind, *cells])
    return table(["kind", *(f"{layout}{what}" for layout in LAYOUTS for what in (" pays on", ", best"))], lines)


BLOCKS = {"scaling": scaling, "check": check, "bytes": wire_check, "large": large, "pays": pays}


def page(text: str, tables: Tables) -> str:
    """Return the page with its tables replaced."""
    for name, write_table in BLOCKS.items():
        text = replace_block(text, PAGE.name, name, write_table(tables))
    return text


def write(path: Path, *, check: bool) -> None:
    """Write the page at `path` from the rows, or fail if it differs."""
    text = path.read_text()
    wanted = page(text, read())
    if text != wanted and check:
        raise SystemExit(f"scaling_model: {path} differs from the rows; run python benchmarks/scaling_model.py")
    path.write_text(wanted)
