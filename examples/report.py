"""Results of trainings: JSON, CSV rows, and the table, plot and checks computed from them."""

import csv
import hashlib
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

import interrupt

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FRAMEWORKS = ("jax", "torch")
LINES = {"jax": ("-", "o"), "torch": ("--", "x")}  # line style and marker
# Measured on the default text after 120 steps: the held-out loss is 1.92. On 19 other parts of the same length it is
# 1.89 to 2.27, 2.14 on average, and the mean over ten steps is 0.06 above that.
NOTE = """Curves: mean of the training loss over up to ten steps. Points: the held-out text, its last 5 %.
Points can be below curves: text differs (the end of Python's help topics is easy), and the mean lags behind."""
WARM_UP_STEPS = 3  # the first steps compile and allocate, and are excluded from the time per step


@dataclass
class Run:
    """One training, with one framework and one format.

    Attributes:
      framework: "jax" or "torch".
      format: name of the recipe, or "bf16".
      ranks: number and kind of ranks, with the command-line choices, for the table.
      text: name of the corpus.
      steps: planned steps.
      gathered_bytes: bytes that one rank receives from weight all-gathers in one step.
      resident_bytes: bytes that one rank keeps between steps: weights, optimizer state, persistent gradients.
      gathered_sha256: `digest` of the weights gathered in `first_step`.
      losses: training loss of each step.
      seconds: time of each step.
      validation: (steps trained, held-out loss) pairs.
      device: name of a rank's device.
      first_step: step of the digest; later than 1 if the run continues a checkpoint of the other framework.
      experts: MLPs per block.
    """

    framework: str
    format: str
    ranks: str
    text: str
    steps: int
    gathered_bytes: int = 0
    resident_bytes: int = 0
    gathered_sha256: str = ""
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    device: str = "CPU"
    first_step: int = 1
    experts: int = 0

    @property
    def milliseconds_a_step(self) -> float:
        """Median time of a step, without the first steps and without validation."""
        return 1e3 * statistics.median(self.seconds[WARM_UP_STEPS:] or self.seconds or [0.0])

    @property
    def final_loss(self) -> float:
        """Validation loss at the end."""
        return self.validation[-1][1]


def digest(gathered: Mapping[str, Sequence[np.ndarray]]) -> str:
    """Return the SHA-256 of gathered weights, in the order of their names.

    A bfloat16 weight contributes its bits, a quantized one its rowwise plane: codes, `scale_inv` and, if present,
    `global_scale_inv`.
    """
    sha = hashlib.sha256()
    for name in sorted(gathered):
        for part in gathered[name]:
            sha.update(part.reshape(-1).view(np.uint8))
    return sha.hexdigest()


def save(runs: list[Run], directory: Path) -> None:
    """Write the runs of one framework to `directory/FRAMEWORK.json`."""
    path = directory / f"{runs[0].framework}.json"
    path.write_text(json.dumps([asdict(run) for run in runs]) + "\n")


def save_rows(runs: list[Run], directory: Path) -> None:
    """Write the runs of one framework to `directory/training_FRAMEWORK.csv`, without their curves."""
    rows = [
        {
            "recipe": run.format,
            "framework": run.framework,
            "device": run.device,
            "ranks": run.ranks,
            "steps": run.steps,
            "validation_loss": f"{run.final_loss:.4f}",
            "percent_to_bf16": f"{100 * (run.final_loss / base.final_loss - 1):.2f}" if base.format == "bf16" else "",
            "gathered_bytes_a_step": run.gathered_bytes,
            "ms_a_step": f"{run.milliseconds_a_step:.1f}",
            "gathered_sha256": run.gathered_sha256,
        }
        for run, base in ((run, baseline(run, runs)) for run in runs)
    ]
    with (directory / f"training_{runs[0].framework}.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def load(directory: Path) -> list[Run]:
    """Read the runs of all frameworks in `directory`."""
    paths = [directory / f"{framework}.json" for framework in FRAMEWORKS]
    return [Run(**run) for path in paths if path.exists() for run in json.loads(path.read_text())]


def present(runs: list[Run], directory: Path) -> None:
    """Save `runs`, then print a table and draw a plot of all runs in `directory` with the same text, steps and experts.

    Raises:
      SystemExit: JAX and PyTorch gathered different bytes.
    """
    interrupt.outcome = f"results in {directory} are incomplete"
    save(runs, directory)
    save_rows(runs, directory)
    console = Console()
    if not console.is_terminal:
        console.width = 120  # a log has no width
    same = attrgetter("text", "steps", "experts")
    everything = [run for run in load(directory) if same(run) == same(runs[0])]
    console.print(table(everything))
    path = directory / "loss.png"
    plot(everything).savefig(path, dpi=150)
    console.print(f"loss curves: {path}", highlight=False, soft_wrap=True)
    interrupt.outcome = f"results are in {directory}"
    comparisons = same_bytes(everything)
    for name, same in comparisons.items():
        verdict = "identical" if same else "DIFFERENT"
        line = f"{name}: JAX and PyTorch gathered {verdict} bytes in the first step (SHA-256)"
        console.print(line, highlight=False, soft_wrap=True)
    if not all(comparisons.values()):
        sys.exit(1)


def baseline(run: Run, runs: list[Run]) -> Run:
    """Return the bf16 run of the same framework, or `run` itself if there is none."""
    return next((other for other in runs if (other.framework, other.format) == (run.framework, "bf16")), run)


def table(runs: list[Run]) -> Table:
    """Build a table with one row per run, and its change against the bf16 run of the same framework."""
    result = Table(
        title=f"{runs[0].steps} steps on {runs[0].text}",
        caption="gathered: written by all-gathers on one rank; resident: what that rank keeps between steps",
    )
    for heading in ("framework", "format"):
        result.add_column(heading)
    for heading in ("validation loss", "gathered a step", "resident a rank", "ms a step"):
        result.add_column(heading, justify="right")
    for index, run in enumerate(runs):
        base = baseline(run, runs)

        def against(value: float, base_value: float, compared: bool = base is not run) -> str:
            return f" ({value / base_value - 1:+.1%})" if compared and base_value else ""

        result.add_row(
            f"{run.framework}, {run.ranks}",
            run.format,
            f"{run.final_loss:.4f}{against(run.final_loss, base.final_loss)}",
            f"{run.gathered_bytes / 1e6:.2f} MB{against(run.gathered_bytes, base.gathered_bytes)}",
            f"{run.resident_bytes / 1e6:.2f} MB{against(run.resident_bytes, base.resident_bytes)}",
            f"{run.milliseconds_a_step:.0f}{against(run.milliseconds_a_step, base.milliseconds_a_step)}",
            end_section=index + 1 < len(runs) and runs[index + 1].framework != run.framework,
        )
    return result


def same_bytes(runs: list[Run]) -> dict[str, bool]:
    """Return, for each format trained in both frameworks, whether they gathered the same bytes in the first step."""
    hashes: dict[tuple[str, int], list[str]] = {}
    for run in runs:
        if run.gathered_sha256:
            hashes.setdefault((run.format, run.first_step), []).append(run.gathered_sha256)
    return {name: len(set(found)) == 1 for (name, _), found in hashes.items() if len(found) == len(FRAMEWORKS)}


def smooth(losses: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Return steps, and at each the mean loss over the last ten steps, or fewer in runs of less than 50 steps."""
    width = min(10, max(1, len(losses) // 5))
    return np.arange(width, len(losses) + 1), np.convolve(losses, np.full(width, 1 / width), "valid")


def plot(runs: list[Run]) -> "Figure":
    """Draw losses, and below them the difference from bf16 in the same framework on the same batches."""
    # Not at the top: matplotlib takes most of a second to import, on every rank.
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    formats = list(dict.fromkeys(run.format for run in runs))
    compared = [(run, base) for run in runs if (base := baseline(run, runs)) is not run]
    rows = 2 if compared else 1
    figure = Figure(figsize=(8, 4 * rows), layout="constrained")
    axes = figure.subplots(rows, sharex=True, squeeze=False)

    def draw(plot: Any, run: Run, losses: Sequence[float], held_out: Sequence[float]) -> None:
        color, (line, mark) = f"C{formats.index(run.format)}", LINES[run.framework]
        plot.plot(*smooth(losses), line, color=color)
        plot.plot([step for step, _ in run.validation], held_out, mark, color=color)

    for run in runs:
        draw(axes[0, 0], run, run.losses, [loss for _, loss in run.validation])
    for run, base in compared:
        apart = [loss - other for (_, loss), (_, other) in zip(run.validation, base.validation, strict=True)]
        draw(axes[1, 0], run, np.subtract(run.losses, base.losses), apart)
    figure.suptitle(f"byte-level GPT on {runs[0].text}")
    axes[0, 0].set_title(NOTE, fontsize=8, loc="left")
    axes[0, 0].set_ylabel("loss, nats per byte")
    if compared:
        axes[1, 0].axhline(0, color=f"C{formats.index('bf16')}")
        axes[1, 0].set_ylabel("loss above that of bf16, nats per byte")
    axes[-1, 0].set_xlabel("step")
    axes[-1, 0].xaxis.get_major_locator().set_params(integer=True)
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    handles = [Line2D([], [], color=f"C{index}", label=name) for index, name in enumerate(formats)]
    for framework in dict.fromkeys(run.framework for run in runs):
        line, mark = LINES[framework]
        handles.append(Line2D([], [], color="0.3", linestyle=line, marker=mark, label=framework))
    figure.legend(handles=handles, loc="outside lower center", ncols=5)
    return figure
