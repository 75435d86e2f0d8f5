"""Held-out loss of the GPT of examples/train_torch.py in bf16 and in NVFP4, with and without the parts of its recipe.

Prints the loss of each kind on the held-out text after the last step, and its distance from bf16 with the same seed.
One process trains one kind after another, as rank 0 of 1; a seed gives other initial weights and random bits.

    OMP_NUM_THREADS=1 python benchmarks/nvfp4_losses.py [--steps 600] [--seeds 1] [--kinds bf16,nvfp4] [--out FILE]

A kind takes about 5 minutes on one idle core.
"""

from __future__ import annotations

import argparse
import csv
import pathlib
import sys
import tempfile
import time
from typing import NamedTuple

import torch
import torch.distributed as dist

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))

import qshard.torch_bridge as qt
import train_torch
import weights
from corpus import Batch, Corpus, load
from gpt import PEAKS, Schedule, initial_weights
from qshard.formats import NVFP4 as FORMAT
from qshard.recipes import NVFP4

KEPT = "blocks[-15%:].*"  # The last of four blocks stays in bf16.
TAIL = 0.2  # The part of the steps after `switch_recipe`.
PLAIN = FORMAT.with_options(nonfinite="nan")
NO_HADAMARD = NVFP4(activation=PLAIN, gradient=PLAIN.with_options(rounding="stochastic"))
NEAREST = NVFP4(gradient=PLAIN.with_options(hadamard=True))


class Kind(NamedTuple):
    """Recipe of the layers of blocks, or None for bf16; layers that stay in bf16; and whether the tail is in bf16."""

    recipe: NVFP4 | None
    kept: str | None = KEPT
    tail: bool = False


KINDS = {
    "bf16": Kind(None),
    "nvfp4": Kind(NVFP4()),
    "no_hadamard": Kind(NO_HADAMARD),
    "nearest": Kind(NEAREST),
    "all_layers": Kind(NVFP4(), kept=None),
    "wgrad_bf16": Kind(NVFP4(wgrad="bf16")),
    "bf16_tail": Kind(NVFP4(), tail=True),
}


def train(kind: Kind, corpus: Corpus, schedule: Schedule, seed: int, mesh: dist.DeviceMesh) -> float:
    """Train one kind and return its loss on the held-out text."""
    torch.manual_seed(seed)
    config = train_torch.CONFIG
    recipe = {kind.kept: None, "*": kind.recipe} if kind.recipe is not None and kind.kept else kind.recipe
    model = train_torch.make_model(config, "shard", recipe, mesh, torch.device("cpu"), "plain")
    initial = {name: torch.from_numpy(value) for name, value in initial_weights(config, seed).items()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.to_local().copy_(initial[name])  # One rank has whole weights.
    optimizer = weights.make_optimizer(model, "shard", None, schedule, "adamw")

    def loss_of(batch: Batch) -> torch.Tensor:
        return model(*(torch.from_numpy(half).long() for half in batch))

    begun = time.perf_counter()
    for step in range(schedule.steps):
        if kind.tail and step == round((1 - TAIL) * schedule.steps):
            qt.switch_recipe(model, None)
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(step)
        loss = loss_of(corpus.batch(seed * schedule.steps + step, schedule.batch, config.context))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}, loss {loss.item():.4f}, {time.perf_counter() - begun:.0f} s", flush=True)
    with torch.no_grad():
        held_out = [loss_of(batch).item() for batch in corpus.validation(schedule.batch, config.context)]
    return sum(held_out) / len(held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=32, help="windows of 32 bytes in a step")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--out", type=pathlib.Path, help="a CSV file; kinds that it has are not trained again")
    options = parser.parse_args()
    schedule = Schedule(options.steps, options.batch, PEAKS["adamw"])
    corpus = load(None, schedule.batch, train_torch.CONFIG.context)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/rendezvous", rank=0, world_size=1)
        mesh = weights.make_mesh("fsdp", torch.device("cpu"), 1)
        rows: dict[tuple[str, int], float] = {}
        if options.out and options.out.exists():
            with options.out.open(newline="") as file:
                rows = {(row["kind"], int(row["seed"])): float(row["loss"]) for row in csv.DictReader(file)}
        for seed in range(options.seeds):
            for name in options.kinds.split(","):
                if (name, seed) not in rows:
                    rows[name, seed] = train(KINDS[name], corpus, schedule, seed, mesh)
                if options.out:
                    with options.out.open("w", newline="") as file:
                        writer = csv.writer(file)
                        writer.writerows([("kind", "seed", "loss"), *((*key, loss) for key, loss in rows.items())])
                above = 100 * (rows[name, seed] / rows.get(("bf16", seed), float("nan")) - 1)
                print(f"{name}, seed {seed}: loss {rows[name, seed]:.4f}, {above:+.2f} % above bf16", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
