"""Blocks of README.md that are written from rows: four numbers, the table of recipes, the table of steps."""

from __future__ import annotations

from collections.abc import Callable

from tables import Row, Rows, Tables, table

KINDS = {
    "bf16 compiled": "bf16, compiled",
    "torchao compiled": "torchao float8, compiled",
    "fp8 compiled": "`CurrentScaling`, compiled",
    "fp8 fused ordered": "`CurrentScaling`, `fuse=True`, `reduce_gradients_in_order`, eager",
    "fp8 fused zero": "`CurrentScaling`, `fuse=True`, `ZeroOptimizer`, eager",
}
"""Kinds of `bench_step_torch.py` in README's table of steps, and their labels there."""
BASE = "bf16 compiled"
RECIPES = {
    "CurrentScaling": (
        "fp8 fused",
        "fp8",
        "Hopper",
        "first choice: one scale a tensor, nothing to call",
    ),
    "DelayedScaling": (
        "delayed fused",
        "delayed",
        "Hopper",
        "scales of earlier steps; needs `update_scales`",
    ),
    "BlockScaling": ("block fused", "block", "Hopper", "outliers: scales of 1 x 128 of x, 128 x 128 of w"),
    "MXFP8": ("mxfp8 fused", "mxfp8", "Blackwell", "Blackwell; on Hopper it saves bytes, not time"),
    "MXFP6": ("", "mxfp6", "none", "numerics of 6 bits; products in bf16"),
    "MXFP4": ("", "mxfp4", "none", "smallest wire, highest loss; products in bf16"),
    "NVFP4": (
        "nvfp4 fused",
        "nvfp4",
        "Blackwell",
        "4 bits, rotation, stochastic rounding; as MXFP8 on Hopper",
    ),
}
"""Recipe: kind of a step, name in the training rows, GPUs with tensor cores for it, when to use it."""


def by_kind(rows: Rows) -> dict[str, Row]:
    return {row["kind"]: row for row in rows}


def percent(row: Row | None, base: Row, column: str) -> str:
    return f"{100 * float(row[column]) / float(base[column]):.0f} %" if row else "-"


def change(row: Row | None, base: Row, column: str) -> str:
    return f"{100 * float(row[column]) / float(base[column]) - 100:+.0f} %" if row else "-"


def headline(tables: Tables) -> str:
    """Write time, memory, time with experts and bytes on the wire, one item each."""
    steps = by_kind(tables["step_torch"])
    base, rival, ours = (steps[kind] for kind in (BASE, "torchao compiled", "fp8 fused"))
    training = {row["recipe"]: row for row in tables["training_torch"]}
    recipes = [training["fp8"], training["nvfp4"]]
    fewer = [change(row, training["bf16"], "gathered_bytes_a_step").lstrip("-") for row in recipes]
    loss = [f"{float(row['percent_to_bf16']):+.1f} %" for row in recipes]
    time, peak = "running_ms", "peak_GiB"
    narrow, wide = (by_kind(tables[f"step_moe_{name}"]) for name in ("qwen", "deepseek"))
    best = "fp8 fused compiled"
    return f"""\
- **{percent(ours, base, time)} of the step time of compiled bf16:** {ours[time]} ms for a 2.0 B Llama under FSDP2 on \
{base["ranks"]} GPUs ({base["machine"]}).
  Compiled bf16 takes {base[time]} ms, compiled torchao float8 {rival[time]} ms. This is eager; compiled it takes \
{steps["fp8 compiled"][time]} ms.
- **{percent(ours, base, peak)} of its peak memory:** {ours[peak]} GiB, where bf16 takes {base[peak]} and torchao \
float8 {rival[peak]}.
- **{percent(narrow[best], narrow[BASE], time)} of the step time with experts:** {narrow[best][time]} ms for 6 layers \
as in Qwen3-30B-A3B, where compiled bf16 takes {narrow[BASE][time]};
  {wide[best][time]} against {wide[BASE][time]} ms for 2 layers as in DeepSeek-V3.
- **{fewer[0]} fewer bytes in all-gathers with FP8, {fewer[1]} with NVFP4:** the validation loss of a small GPT \
changes by {loss[0]} and {loss[1]}."""


def recipes(tables: Tables) -> str:
    """Each recipe: hardware, time, memory, bytes, loss, and when to use it."""
    steps, base = by_kind(tables["step_torch"]), by_kind(tables["step_torch"])["bf16"]
    training = {row["recipe"]: row for row in tables["training_torch"]}
    lines = []
    for recipe, (kind, name, gpus, when) in RECIPES.items():
        step, trained = steps.get(kind), training.get(name)
        loss = f"{float(trained['percent_to_bf16']):+.1f} %" if trained else "-"
        cells = [percent(step, base, "running_ms"), percent(step, base, "peak_GiB")]
        cells += [change(trained, training["bf16"], "gathered_bytes_a_step"), loss]
        lines.append([f"`{recipe}`", gpus, *cells, when])
    text = (
        f"All against eager bf16 on {base['machine']}: time and peak memory of the 2.0 B step below; gathered bytes "
        "and validation\nloss of `make train FORMATS=all`."
    )
    header = ["recipe", "tensor cores of", "time", "memory", "bytes", "loss", "when"]
    return f"{table(header, lines)}\n\n{text}"


def step_torch(tables: Tables) -> str:
    """Milliseconds and peak memory of a step, of the kinds that users choose between."""
    rows = by_kind(tables["step_torch"])
    base = rows.get(BASE) or rows["bf16"]
    lines = [
        [label, row["running_ms"], percent(row, base, "running_ms"), row["peak_GiB"], percent(row, base, "peak_GiB")]
        for kind, label in KINDS.items()
        if (row := rows.get(kind))
    ]
    head = (
        f"Back-to-back steps of a 2.0 B Llama under FSDP2, 2 x 4096 tokens a GPU, {base['ranks']} GPUs "
        f"({base['machine']}):"
    )
    return f"{head}\n\n{table(['', 'ms', 'of bf16', 'peak GiB', 'of bf16'], lines)}"


README_BLOCKS: dict[str, tuple[tuple[str, ...], Callable[[Tables], str]]] = {
    "headline": (("step_torch", "training_torch", "step_moe_qwen", "step_moe_deepseek"), headline),
    "recipes": (("step_torch", "training_torch"), recipes),
    "step_torch": (("step_torch",), step_torch),
}
"""Block: the tables that it needs, and the function that writes it."""
