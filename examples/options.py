"""Command line of both training scripts: arguments, and one-line errors."""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import NoReturn

from corpus import text_file
from gpt import PEAKS, Schedule
from qshard.recipes import NAMED, Recipe

# A recipe says which format weights, activations and gradients are cast to. None is the baseline: bfloat16 weights are
# gathered and nothing is quantized.
SHORT = {"CurrentScaling": "fp8", "DelayedScaling": "delayed", "BlockScaling": "block"}
RECIPES: dict[str, Recipe | None] = {
    "bf16": None,
    **{SHORT.get(name, name.lower()): recipe for name, recipe in NAMED.items()},
}

# Kinds of local weights. All start from the same float32 values and gather the same codes.
KINDS = ("shard", "primary", "zero")
# Mesh axes, by value of `--mesh`.
MESHES = {"fsdp": ("fsdp",), "hsdp": ("replicate", "fsdp"), "fsdp,tp": ("fsdp", "tp")}
# The loss is computed from all logits by the framework, or from one chunk of them at a time by qshard.
LOSSES = ("plain", "fused")
MOST_EXPERTS = 256
SHOWN = (
    "fused",
    "primary",
    "zero",
    "hsdp",
    "fsdp,tp",
    "auto",
    "explicit",
    "muon",
)  # losses, kinds, meshes, modes and optimizers that the report names


class Parser(argparse.ArgumentParser):
    """An argument parser with one-line errors."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with status 2, as argparse does, but without the usage text."""
        fail(self.prog, f"{message} (--help lists the options)", 2)


def fail(program: str, message: str, status: int = 1) -> NoReturn:
    """End the program with one line on stderr."""
    print(f"{program}: error: {message}", file=sys.stderr)
    sys.exit(status)


def whole_number(value: str, most: int) -> int:
    """Parse a whole number from 1 to `most`."""
    if not (value.isdecimal() and len(value) <= len(str(most)) and 1 <= int(value) <= most):
        raise argparse.ArgumentTypeError(f"{value[:20]!r} is not a whole number from 1 to {most}")
    return int(value)


def expert_count(value: str) -> int:
    """Parse a number of experts."""
    if not (
        value.isdecimal()
        and len(value) <= len(str(MOST_EXPERTS))
        and (int(value) == 0 or 2 <= int(value) <= MOST_EXPERTS)
    ):
        raise argparse.ArgumentTypeError(f"{value[:20]!r} is not 0, or a whole number from 2 to {MOST_EXPERTS}")
    return int(value)


def formats(value: str) -> list[str]:
    """Parse a list of recipe names such as `bf16,fp8`."""
    names = list(RECIPES) if value == "all" else list(dict.fromkeys(value.split(",")))
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {', '.join(RECIPES)}")
    return names


def output_directory(value: str) -> Path:
    """Create the results directory before any time is spent on results."""
    path = Path(value)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot make the directory {value}: {error.strerror}") from error
    return path


def log_file(value: str) -> Path:
    """Check that a log can be written, before any time is spent on its contents."""
    path = Path(value)
    try:
        path.open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot write {value}: {error.strerror}") from error
    return path


def parse(
    description: str,
    rank: str,
    devices: int,
    most: int | None = None,
    kinds: tuple[str, ...] = KINDS,
    modes: tuple[str, ...] = (),
) -> tuple[Parser, argparse.Namespace]:
    """Parse the command line.

    Args:
      description: first line of the help text.
      rank: plural noun for ranks in messages, such as "GPUs".
      devices: the default number of ranks, rounded down to a power of two, and the most unless `most` is given.
      most: the most ranks, if several may share a device.
      kinds: kinds of weights that the script supports.
      modes: parallel modes that the script supports.

    Returns:
      The parser, for further errors, and the parsed arguments.
    """
    parser = Parser(description=description)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--formats", type=formats, metavar="A,B", help=f"train these, of {', '.join(RECIPES)}; or all")
    which.add_argument("--recipe", choices=RECIPES, default="fp8", help="train bf16 and this one (default: fp8)")

    def number(name: str, default: int, most: int, text: str) -> None:
        kind = partial(whole_number, most=most)
        parser.add_argument(name, type=kind, metavar="N", default=default, help=f"{text} (default: {default})")

    number("--steps", Schedule.steps, 1_000_000, "steps of each training")
    number("--batch", Schedule.batch, 65536, "windows of text in a step, over all ranks")
    number("--ranks", 1 << (devices.bit_length() - 1), 65536, f"{rank} to shard over")
    parser.add_argument("--text", type=text_file, metavar="FILE", help="train on it (default: Python's help topics)")
    parser.add_argument("--out", type=output_directory, default="build/train", help="results (default: %(default)s)")
    parser.add_argument("--loss", choices=LOSSES, default="plain", help="whether the head gives it, without logits")
    parser.add_argument(
        "--experts", type=expert_count, metavar="N", default=0, help="MLPs of a block, of which each token passes one"
    )
    parser.add_argument("--optimizer", choices=PEAKS, default="adamw", help="what updates matrices (default: adamw)")
    parser.add_argument("--weights", choices=kinds, default="shard", help="what a rank keeps of a weight")
    parser.add_argument("--mesh", choices=MESHES, default="fsdp", help="which ranks have parts of it")
    if modes:
        parser.add_argument(
            "--mode", choices=modes, default=modes[0], help="who cuts the program (default: %(default)s)"
        )
    parser.add_argument(
        "--log-numerics", type=log_file, metavar="FILE", help="write what each step does to each tensor of each layer"
    )
    parser.add_argument("--checkpoint", type=Path, metavar="DIR", help="save checkpoints in it")
    number("--every", 20, 1_000_000, "steps from one checkpoint to the next")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint, of either framework")
    options = parser.parse_args()
    options.asked = options.formats or [options.recipe]  # without the bf16 that is trained for comparison
    options.formats = options.formats or list(dict.fromkeys(["bf16", options.recipe]))
    most = most or devices
    if options.ranks > most:
        parser.error(f"--ranks {options.ranks} is more than {most} {rank}, the most on this machine")
    if options.batch % options.ranks:
        parser.error(f"--batch {options.batch} cannot be divided over {options.ranks} ranks")
    return parser, options


def mesh_shape(mesh: str, ranks: int) -> tuple[int, ...]:
    """Return the shape of a mesh: all ranks in a row, two replicas of shards, or pairs for tensor parallelism."""
    return {"fsdp": (ranks,), "hsdp": (2, ranks // 2), "fsdp,tp": (ranks // 2, 2)}[mesh]


def refusal(options: argparse.Namespace) -> str | None:
    """Return why the kind of weights, the mesh and the ranks do not go together, or None."""
    kind, mesh, ranks = options.weights, options.mesh, options.ranks
    if kind != "shard" and "bf16" in options.asked:
        return f"--weights {kind} is not for bf16, which has no codes to keep; leave bf16 out, or --weights"
    if kind == "zero" and mesh != "fsdp":
        return f"--weights zero cuts weights over all ranks alike, not over --mesh {mesh}; leave --mesh out"
    if options.experts and mesh == "fsdp,tp":
        return f"--experts {options.experts} is not for --mesh {mesh}, whose layers all tokens pass; leave --mesh out"
    if options.experts and options.log_numerics:
        return f"--log-numerics is not for --experts {options.experts}, whose layers it would leave out; leave one out"
    if mesh != "fsdp" and (ranks < 4 or ranks % 2):
        return f"--mesh {mesh} needs an even number of ranks, 4 or more, not {ranks}; give --ranks 4"
    return None


def shown_choices(options: argparse.Namespace, kind: str) -> list[str]:
    """Return the command-line choices that the report shows, for weights of `kind`."""
    given = {"loss": options.loss, "weights": kind, "mesh": options.mesh, "mode": getattr(options, "mode", None)}
    given["optimizer"] = options.optimizer
    shown = [f"--{name} {value}" for name, value in given.items() if value in SHOWN]
    return [*shown, *([f"--experts {options.experts}"] if options.experts else [])]
