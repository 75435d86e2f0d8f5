"""Train the byte-level GPT with PyTorch FSDP2, first with bfloat16 weights on the wire, then with quantized ones.

    python examples/train_torch.py [--recipe fp8 | --formats bf16,fp8,mxfp8] [--steps N] [--text FILE]

Runs on the GPUs present through NCCL, or on the CPU with two gloo ranks. What a recipe changes is marked (1) and (2).
"""

import interrupt  # isort: skip

if __name__ == "__main__":
    interrupt.install()  # before the imports below, which take seconds

import os
import time
from argparse import Namespace
from contextlib import closing
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import options
import qshard.torch_bridge as qshard
import report
from corpus import Batch, Corpus, load
from gpt import GPTConfig, Schedule, initial_weights, is_quantized
from progress import TrainingProgress
from qshard.recipes import Recipe
from ranks import launch

CONFIG = GPTConfig()
RANK_TIMEOUT = timedelta(seconds=120)  # a rank that waits longer for another one gives up


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.projection = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(-3))  # [batch, heads, context, width / heads]
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        x = x + self.projection(attention)
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class GPT(nn.Module):
    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, bias=False)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens [batch, context] to float32 logits [batch, context, vocabulary]."""
        positions = torch.arange(tokens.shape[-1], device=tokens.device)
        x = (self.embedding(tokens) + self.position(positions)).to(self.compute_dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()


# FSDP gathers bfloat16 weights. A GPU also computes in bfloat16, but most CPUs are many times slower in it than in
# float32: there the activations are float32, and these layers widen the gathered weight to the dtype of their input.
class WideningLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class WideningLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), eps=self.eps)


def widen(model: nn.Module) -> None:
    """Let the plain layers of `model` take float32 activations."""
    widening = {nn.Linear: WideningLinear, nn.LayerNorm: WideningLayerNorm}
    for layer in model.modules():
        layer.__class__ = widening.get(type(layer), type(layer))


def sharded_model(recipe: Recipe | None, device: torch.device) -> GPT:
    """Build the model from the shared initial weights and shard it over all ranks."""
    model = GPT(CONFIG, torch.bfloat16 if device.type == "cuda" else torch.float32).to(device)
    model.load_state_dict({name: torch.from_numpy(weight) for name, weight in initial_weights(CONFIG).items()})
    if recipe is not None:  # (1) the linear layers of the blocks gather and multiply in the formats of the recipe
        qshard.convert(model, recipe, filter=lambda layer, name: is_quantized(f"{name}.weight"))
    if device.type == "cpu":
        widen(model)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for module in (*model.blocks, model):  # a block's weights are gathered when it runs, and freed after it
        fully_shard(module, mesh=mesh, mp_policy=precision)
    return model


class GatheredBytes(TorchDispatchMode):
    """Counts the bytes that all-gathers write while it is active."""

    total = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if op is torch.ops.c10d._allgather_base_.default:
            self.total += args[0].nbytes
        return op(*args, **(kwargs or {}))


def record_gathered(model: GPT) -> dict[str, list[np.ndarray]]:
    """Keep a copy of every gathered weight, by name, when its layer runs for the first time."""
    gathered: dict[str, list[np.ndarray]] = {}
    hooks = {}

    def copy(layer: nn.Module, inputs: object, name: str) -> None:
        weight: Any = layer.weight
        parts = [part for part in weight.rowwise if part is not None] if hasattr(weight, "rowwise") else [weight]
        gathered[name] = [
            part.detach().clone().contiguous().flatten().view(torch.uint8).cpu().numpy() for part in parts
        ]
        hooks.pop(name).remove()

    for layer_name, layer in model.named_modules():
        if hasattr(layer, "weight"):
            name = f"{layer_name}.weight"
            hooks[name] = layer.register_forward_pre_hook(partial(copy, name=name))
    return gathered


def resident_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of this rank's shards of the weights and of the optimizer's state."""
    state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in (*model.parameters(), *state)]
    return sum(value.numel() * value.element_size() for value in local)


def train(name: str, corpus: Corpus, schedule: Schedule, device: torch.device, events: mp.Queue) -> None:
    """Train with one format. Rank 0 reports its progress, and at the end the run, to `events`."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    on_gpus = device.type == "cuda"
    where = f"{ranks} {'GPUs' if on_gpus else 'CPU ranks'}"
    kind = torch.cuda.get_device_name() if on_gpus else "CPU"
    run = report.Run("torch", name, where, corpus.name, schedule.steps, device=kind)
    report_event = events.put if rank == 0 else lambda event: None
    report_event(("start", f"torch {name}"))

    recipe = options.RECIPES[name]
    model = sharded_model(recipe, device)
    matrices = [weight for weight in model.parameters() if weight.ndim == 2]
    gains = [weight for weight in model.parameters() if weight.ndim == 1]
    groups = [{"params": matrices, "weight_decay": schedule.weight_decay}, {"params": gains, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=schedule.betas, eps=schedule.eps)

    def loss_of(batch: Batch) -> Tensor:
        part = slice(rank * schedule.batch // ranks, (rank + 1) * schedule.batch // ranks)
        tokens, targets = (torch.from_numpy(half[part]).long().to(device) for half in batch)
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def mean_over_ranks(loss: Tensor) -> float:
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / ranks

    def step(batch: Batch, learning_rate: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe is not None:  # (2) one all-reduce finds the scales of all weights (delayed: of all tensors)
            qshard.update_scales(model)
        return mean_over_ranks(loss)

    gathered, held_out = record_gathered(model), corpus.validation(schedule.batch, CONFIG.context)
    for index in range(schedule.steps):
        batch = corpus.batch(index, schedule.batch, CONFIG.context)
        start = time.perf_counter()
        if index == 0:
            with GatheredBytes() as count:
                loss = step(batch, schedule.learning_rate(index))
            run.gathered_bytes, run.gathered_sha256 = count.total, report.digest(gathered)
        else:
            loss = step(batch, schedule.learning_rate(index))
        run.seconds.append(time.perf_counter() - start)
        run.losses.append(loss)
        report_event(("step", loss))
        if schedule.validates_after(index):
            with torch.no_grad():
                losses = [mean_over_ranks(loss_of(batch)) for batch in held_out]
            run.validation.append((index + 1, float(np.mean(losses))))
            report_event(("validation", *run.validation[-1]))
    run.resident_bytes = resident_bytes(model, optimizer)
    report_event(("run", run))


def worker(rank: int, ranks: int, rendezvous: str, corpus: Corpus, arguments: Namespace, events: mp.Queue) -> None:
    """Be one rank: join the others, then train with each format in turn."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rendezvous, timeout=RANK_TIMEOUT, world_size=ranks, rank=rank)
    for name in arguments.formats:
        train(name, corpus, Schedule(steps=arguments.steps, batch=arguments.batch), device, events)
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
