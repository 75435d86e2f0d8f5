"""Train a byte-level GPT with PyTorch FSDP2, first with bfloat16 weights on the wire, then with quantized ones.

    python examples/train_torch.py [--recipe fp8 | --formats bf16,fp8,mxfp8] [--steps N] [--text FILE]
        [--weights shard|primary|zero] [--mesh fsdp|hsdp|fsdp,tp] [--loss plain|fused] [--experts N]
        [--checkpoint DIR [--every N] [--resume]] [--log-numerics FILE]

Runs on the GPUs present through NCCL, or on the CPU with two gloo ranks. Comments (1), (2) mark effects of a recipe.
"""

import interrupt  # isort: skip

if __name__ == "__main__":
    interrupt.install()  # before the imports below, which take seconds

import os
import time
from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import checkpoint
import checkpoint_torch
import experts_torch
import numerics_log
import options
import qshard.torch_bridge as qshard
import report
import weights
from corpus import Batch, Corpus, load
from gathered import GatheredBytes, record_gathered
from gpt import PEAKS, GPTConfig, Schedule, initial_weights
from progress import TrainingProgress
from qshard.numerics import StepStats
from qshard.recipes import DelayedScaling, Recipe
from ranks import launch

CONFIG = GPTConfig()
RANK_TIMEOUT = timedelta(seconds=120)  # a rank that waits longer for another rank fails


class Block(nn.Module):
    """One transformer block."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.router = experts_torch.Router(width, config.experts) if config.experts else None
        if config.experts:
            self.up = experts_torch.Experts(config.experts, width, 4 * width)
            self.down = experts_torch.Experts(config.experts, 4 * width, width)
        else:
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[batch, context, width]` to the same shape."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-3))  # [batch, heads, context, width / heads]
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.projection(attention)
        return x + self.mlp(self.mlp_norm(x))

    def mlp(self, x: Tensor) -> Tensor:
        """Apply the MLP, or the experts, to `[batch, context, width]`."""
        if self.router is not None:
            return experts_torch.routed(x, self.router, self.up, self.down)
        return self.down(F.relu(self.up(x)).square())


class GPT(nn.Module):
    """The model of `gpt.py`, with its loss."""

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype, loss: str = "plain") -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.fused = loss == "fused"
        head = qshard.LinearCrossEntropy if self.fused else partial(nn.Linear, bias=False)
        self.head = head(config.width, config.vocabulary)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of tokens `[batch, context]` against targets of the same shape."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = (self.embedding(tokens) + self.position(positions)).to(self.compute_dtype)
        for block in self.blocks:
            x = block(x)
        if self.fused:  # computes logits for some rows at a time and overwrites them by their gradient
            return self.head(self.norm(x), targets)
        logits = self.head(self.norm(x)).float()  # [batch, context, vocabulary]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# FSDP gathers bfloat16 weights. GPUs also compute in bfloat16, but most CPUs are many times slower in it than in
# float32. There activations are float32, and these layers widen the gathered weight to the dtype of their input.
class WideningLinear(nn.Linear):
    """A linear layer that widens its weight to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T`."""
        return F.linear(x, self.weight.to(x.dtype))


class WideningLayerNorm(nn.LayerNorm):
    """A layer norm that widens its weight to the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize the last axis of `x`."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), eps=self.eps)


def widen(model: nn.Module) -> None:
    """Make the plain layers of `model` accept float32 activations."""
    widening = {nn.Linear: WideningLinear, nn.LayerNorm: WideningLayerNorm}
    for layer in model.modules():
        layer.__class__ = widening.get(type(layer), type(layer))


def make_model(
    config: GPTConfig, kind: str, recipe: Recipe | None, mesh: DeviceMesh, device: torch.device, loss: str
) -> GPT:
    """Build the model from the shared initial weights and shard it over the mesh."""
    model = GPT(config, torch.bfloat16 if device.type == "cuda" else torch.float32, loss).to(device)
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in initial_weights(config).items()})
    if recipe is not None:  # (1) linear layers of blocks gather and multiply in the recipe's formats
        weights.quantize_layers(model, kind, recipe)
    if device.type == "cpu":
        widen(model)
    if kind == "zero":
        weights.narrow(model)  # ZeroOptimizer shards it
    else:
        weights.shard(model, mesh)
    return model


def train(name: str, corpus: Corpus, arguments: Namespace, device: torch.device, events: mp.Queue) -> None:
    """Train with one format. Rank 0 reports progress, and finally the run, to `events`."""
    schedule = Schedule(arguments.steps, arguments.batch, PEAKS[arguments.optimizer])
    rank, ranks, recipe = dist.get_rank(), dist.get_world_size(), options.RECIPES[name]
    kind = arguments.weights if recipe is not None else "shard"  # bf16 is trained for comparison
    mesh = weights.make_mesh(arguments.mesh, device, ranks)
    tensor_parallel = mesh["tp"].size() if arguments.mesh == "fsdp,tp" else 1
    devices = f"{ranks} {'GPUs' if device.type == 'cuda' else 'CPU ranks'}"
    where = " ".join([devices, *options.shown_choices(arguments, kind)])
    device_name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    config = replace(CONFIG, experts=arguments.experts)
    run = report.Run("torch", name, where, corpus.name, schedule.steps, device=device_name, experts=config.experts)
    report_event = events.put if rank == 0 else lambda event: None
    report_event(("start", f"torch {name}"))

    torch.manual_seed(0)  # for NVFP4's stochastic rounding: the same on all ranks and in each run
    before = weights.resident_bytes()
    model = make_model(config, kind, recipe, mesh, device, arguments.loss)
    optimizer = weights.make_optimizer(model, kind, recipe, schedule, arguments.optimizer)
    if kind == "zero":
        weights.load_exactly(model, config)

    def loss_of(batch: Batch) -> Tensor:
        parts, index = ranks // tensor_parallel, rank // tensor_parallel  # tensor-parallel ranks share their windows
        part = slice(index * schedule.batch // parts, (index + 1) * schedule.batch // parts)
        tokens, targets = (torch.from_numpy(half[part]).long().to(device) for half in batch)
        return model(tokens, targets)

    def mean_over_ranks(loss: Tensor) -> float:
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / ranks

    seen: list[StepStats] = []  # statistics of the last step, if logged

    def step(batch: Batch, learning_rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        if arguments.log_numerics and recipe is not None:
            with qshard.numerics_of(model) as watch:
                loss = loss_of(batch)
                loss.backward()
            seen.append(watch.stats())
        else:
            loss = loss_of(batch)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(recipe, DelayedScaling) and kind != "zero":  # (2) delayed scaling only: scales of the next step
            qshard.update_scales(model)
        return mean_over_ranks(loss)

    done, folder = 0, arguments.checkpoint and arguments.checkpoint / name
    if arguments.resume and (found := checkpoint.newest(folder)) is not None:
        done, run = checkpoint_torch.load(found, model, optimizer, run)
        for loss in run.losses:
            report_event(("step", loss))
    gathered = {} if run.gathered_sha256 else record_gathered(model)
    held_out = corpus.validation(schedule.batch, CONFIG.context)
    for index in range(done, schedule.steps):
        batch = corpus.batch(index, schedule.batch, CONFIG.context)
        start = time.perf_counter()
        if not run.gathered_sha256:
            with GatheredBytes() as count:
                loss = step(batch, schedule.learning_rate(index))
            run.gathered_bytes, run.gathered_sha256 = count.total, report.digest(gathered)
            gathered.clear()
        else:
            loss = step(batch, schedule.learning_rate(index))
        run.seconds.append(time.perf_counter() - start)
        run.losses.append(loss)
        report_event(("step", loss))
        if seen and rank == 0:
            numerics_log.append(arguments.log_numerics, name, index, loss, seen.pop())
        seen.clear()
        if schedule.validates_after(index):
            with torch.no_grad():
                losses = [mean_over_ranks(loss_of(batch)) for batch in held_out]
            run.validation.append((index + 1, float(np.mean(losses))))
            report_event(("validation", *run.validation[-1]))
        if folder and ((index + 1) % arguments.every == 0 or index + 1 == schedule.steps):
            checkpoint_torch.save(folder, index + 1, model, optimizer, run, settings(arguments, corpus))
    run.resident_bytes = weights.resident_bytes() - before
    report_event(("run", run))


def settings(arguments: Namespace, corpus: Corpus) -> dict[str, Any]:
    """Return the settings that a resumed run must match."""
    names = ("steps", "batch", "experts", "optimizer", "weights", "mesh")
    return {"framework": "torch", "text": corpus.name, **{name: getattr(arguments, name) for name in names}}


def worker(rank: int, ranks: int, rendezvous: str, corpus: Corpus, arguments: Namespace, events: mp.Queue) -> None:
    """Run one rank: join the process group, then train with each format in turn."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rendezvous, timeout=RANK_TIMEOUT, world_size=ranks, rank=rank)
    for name in arguments.formats:
        train(name, corpus, arguments, device, events)
    dist.destroy_process_group()


def main() -> None:
    """Start the ranks, show their progress, and write the report."""
    gpus = torch.cuda.device_count()
    if gpus:
        parser, arguments = options.parse(str(__doc__).splitlines()[0], "GPUs", gpus)
    else:
        most = 4 * len(os.sched_getaffinity(0))
        parser, arguments = options.parse(str(__doc__).splitlines()[0], "processes", 2, most)
    try:
        corpus = load(arguments.text, arguments.batch, CONFIG.context)
    except (OSError, ValueError) as error:
        options.fail(parser.prog, str(error))
    checkpoint.check(parser.prog, arguments, options.refusal(arguments), settings(arguments, corpus))
    numerics_log.begin(arguments)
    runs: list[report.Run] = []
    ranks = closing(launch(worker, arguments.ranks, corpus, arguments))
    with TrainingProgress(arguments.steps) as progress, ranks as events:
        for kind, *values in events:
            if kind == "run":
                runs += values
            else:
                getattr(progress, kind)(*values)
    report.present(runs, arguments.out)


if __name__ == "__main__":
    main()
