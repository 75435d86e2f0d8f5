"""Model of a training step on many GPUs: time, bytes on the wire and memory, from measured rows and a stated network.

Writes the tables of docs/dev/scaling.md, between `<!-- rows: NAME -->` and `<!-- end -->`. The page has the formulas.
`bench_step_torch.py`, with its profile, `bench_fsdp2.py` and `bench_collectives.py` write the rows, in `results/`.

    python benchmarks/scaling_model.py [--check]     --check: write nothing; fail if the page differs
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from dataclasses import dataclass

from model_shapes import Shape
from qshard.recipes import NAMED

GIB, MB = 2**30, 1e6
BF16, FLOAT32 = 2, 4  # bytes
MASTER_AND_STATES = 3 * FLOAT32  # bytes of a weight, with the two states of Adam
LOGITS = 3  # copies of the logits in bfloat16 at the peak: logits, logarithms, gradients
RECIPES = {
    "bf16": None,
    **dict.fromkeys(("torchao", "fp8"), "CurrentScaling"),
    **{"block": "BlockScaling", "mxfp8": "MXFP8", "nvfp4": "NVFP4"},
}
"""Recipe of each kind of `bench_step_torch.py`, by its first word."""


@dataclass(frozen=True)
class Links:
    """Links of a GPU. Rates are bytes that it receives in a second, latencies are of one hop.

    Attributes:
      nvlink: rate within a host, measured.
      network: rate between hosts, assumed: 80 % of 400 Gb/s.
      nvlink_hop: seconds, assumed.
      network_hop: seconds, assumed.
      host: GPUs of a host.
    """

    nvlink: float
    network: float = 0.8 * 400e9 / 8
    nvlink_hop: float = 1e-6
    network_hop: float = 5e-6
    host: int = 8

    def ring(self, nbytes: float, ranks: int) -> float:
        """Return the time of a ring that gathers or scatters `nbytes`. Ranks fill one host after the other."""
        slow = math.ceil(ranks / self.host) if ranks > self.host else 0
        rate = self.network if slow else self.nvlink
        return nbytes * (ranks - 1) / ranks / rate + slow * self.network_hop + (ranks - 1 - slow) * self.nvlink_hop

    def all_reduce(self, nbytes: float, ranks: int, *, on_hosts: bool = False) -> float:
        """Return the time of a tree that reduces and distributes `nbytes`. `on_hosts`: each rank has its own host."""
        slow = on_hosts or ranks > self.host
        rate, hop = (self.network, self.network_hop) if slow else (self.nvlink, self.nvlink_hop)
        return 2 * (nbytes * (ranks - 1) / ranks / rate + math.log2(ranks) * hop)


@dataclass(frozen=True)
class Wire:
    """Bytes of whole arrays that a step moves.

    Attributes:
      block: codes or values of one block, gathered in forward and in backward.
      amaxes: amaxes of one block, reduced with each gather, or once a step under ZeRO.
      root: embedding and head, gathered once.
      gradients: gradients of one block.
    """

    block: float
    amaxes: float
    root: float
    gradients: float


def wire(kind: str, shape: Shape) -> Wire:
    recipe = RECIPES[kind.split()[0]]
    weights = sum(math.prod(sizes) for sizes in shape.linears.values())
    root = 2 * BF16 * shape.vocabulary * shape.width
    if recipe is None:
        return Wire(BF16 * weights, 0, root, BF16 * weights)
    fmt = NAMED[recipe].weight
    codes = weights / fmt.element.codes_per_byte
    amaxes = FLOAT32 * weights / math.prod(fmt.block) if fmt.block else 0
    return Wire(codes, amaxes, root, BF16 * weights)


def step_megabytes(kind: str, shape: Shape) -> dict[str, float]:
    """Return megabytes of a step, by the purposes of `bench_fsdp2.py`, without norms and single scales."""
    sent = wire(kind, shape)
    passes = 1 if "zero" in kind.split() else 2
    return {
        "gathered": (2 * shape.layers * sent.block + sent.root) / MB,
        "reduced": (shape.layers * sent.gradients + sent.root) / MB,
        "amaxes": passes * shape.layers * sent.amaxes / MB,
    }


@dataclass(frozen=True)
class Anchor:
    """A measured step. Its compute time and memory predict other numbers of GPUs and other shapes.

    Attributes:
      kind: the kind of `bench_step_torch.py`.
      ranks: GPUs of the measurement.
      shape: model of the measurement.
      parts: milliseconds by purpose, scaled so that they add up to the step without exposed communication.
      peak: peak bytes.
    """

    kind: str
    ranks: int
    shape: Shape
    parts: Mapping[str, float]
    peak: float

    @classmethod
    def of(cls, row: Mapping[str, str], profile: Mapping[str, str], shape: Shape) -> Anchor:
        measured = {name: float(profile[name]) for name in PARTS}
        step = float(row["running_ms"]) * (1 - float(profile["exposed"]) / float(profile["step"]))
        total = sum(measured.values())
        parts = {name: ms * step / total for name, ms in measured.items()}
        return cls(row["kind"], int(row["ranks"]), shape, parts, float(row["peak_GiB"]) * GIB)

    def compute(self, shape: Shape, ranks: int) -> tuple[float, float]:
        """Return seconds of forward and backward, and of the optimizer, without communication."""
        times = {name: ms * work(name, shape) / work(name, self.shape) / 1e3 for name, ms in self.parts.items()}
        optimizer = times.pop("optimizer") * self.ranks / ranks
        return sum(times.values()), optimizer

    def peak_bytes(self, shape: Shape, ranks: int) -> float:
        """Return the peak: at the begin of backward, or of the optimizer's step."""
        activations = self.peak - fixed_bytes(self.kind, self.shape, self.ranks)
        activations *= work("activations", shape) / work("activations", self.shape)
        optimizer = (MASTER_AND_STATES + FLOAT32) * shape.weights / ranks
        return max(activations + fixed_bytes(self.kind, shape, ranks), optimizer)


PARTS = {
    "GEMM": "weights",
    "attention": "attention",
    "quantize": "activations",
    "norms and activations": "activations",
    "other elementwise": "activations",
    "copies": "bytes",
    "optimizer": "bytes",
    "loss": "vocabulary",
    "embedding": "vocabulary",
    "idle": "layers",
}
"""Quantity that each part of a profile is proportional to."""


def work(part: str, shape: Shape) -> float:
    """Return the quantity that a part is proportional to."""
    blocks = shape.layers * sum(math.prod(sizes) for sizes in shape.linears.values())
    head = shape.vocabulary * shape.width
    return {
        "weights": shape.tokens * (blocks + head),
        "attention": shape.layers * shape.tokens * shape.context * shape.width,
        "activations": shape.layers * shape.tokens * shape.width,
        "bytes": blocks + 2 * head,
        "vocabulary": shape.tokens * shape.vocabulary,
        "layers": shape.layers,
    }[PARTS.get(part, part)]


def fixed_bytes(kind: str, shape: Shape, ranks: int) -> float:
    """Return bytes that do not grow with the blocks: shards and states, gathered weights, logits."""
    sent = wire(kind, shape)
    logits = LOGITS * BF16 * shape.tokens * shape.vocabulary
    stored = MASTER_AND_STATES * shape.weights
    if "zero" in kind.split():
        stored += shape.layers * sent.block + sent.root
    return stored / ranks + sent.root + 2 * sent.block + logits


@dataclass(frozen=True)
class Step:
    """Seconds of a step. `forward`, `backward`, `gather`, `scatter` and `all_reduce` are of one block.

    A block's gather runs beside the compute of the block before, and its reductions beside the block after, so a block
    takes the longer of compute and communication. Reductions between replicas (`all_reduce`) use other links than those
    of a group, or wait for them. `ends` are the first gathers and the last reductions, which run beside nothing.
    """

    layers: int
    optimizer: float
    forward: float
    backward: float
    gather: float
    scatter: float
    all_reduce: float
    ends: float

    @property
    def seconds(self) -> float:
        sent = max(self.gather + self.scatter, self.all_reduce)
        loops = self.layers * (max(self.forward, self.gather) + max(self.backward, sent))
        return self.optimizer + loops + self.ends

    @property
    def sent_for_compute(self) -> float:
        """Communication of a backward pass in parts of its compute. Above 1 it is exposed."""
        return max(self.gather + self.scatter, self.all_reduce) / self.backward


def predict(anchor: Anchor, shape: Shape, ranks: int, links: Links, group: int = 0) -> Step:
    """Predict a step under FSDP2, or under HSDP with `group` ranks that shard weights."""
    group = min(group or ranks, ranks)
    sent, layers, replicas = wire(anchor.kind, shape), shape.layers, ranks // group
    compute, optimizer = anchor.compute(shape, group)
    amaxes = links.all_reduce(sent.amaxes, group) if sent.amaxes else 0.0
    gather, scatter = links.ring(sent.block, group) + amaxes, links.ring(sent.gradients, group)
    all_reduce = links.all_reduce(sent.gradients / group, replicas, on_hosts=True)
    root = 2 * links.ring(sent.root, group) + links.all_reduce(sent.root / group, replicas, on_hosts=True)
    ends = gather + scatter + all_reduce + root
    return Step(layers, optimizer, compute / 3 / layers, 2 * compute / 3 / layers, gather, scatter, all_reduce, ends)


if __name__ == "__main__":
    import scaling_page

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    scaling_page.write(scaling_page.PAGE, check=parser.parse_args().check)
