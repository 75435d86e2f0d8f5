"""torchtitan's training command on CPUs, which torchtitan does not support.

    python titan_trainer.py runs.json

`runs.json` lists runs: a name, the number of ranks, and the arguments of `python -m torchtitan.train`. Ranks are forked
from one process that has imported torchtitan. Each run writes NAME.json: the losses and gradient norms of its steps,
and a digest of rank 0's parameters and optimizer states.

These parts need GPUs and are replaced; all else is torchtitan's:
- statistics of device memory, and the `device_ids` of a barrier;
- gradients are summed, because gloo has no premultiplied sums;
- attention: `flex_attention` has no backward pass on CPUs, and `varlen_attn` is a CUDA kernel.
Models keep 2 layers and get narrow experts.
"""

import hashlib
import json
import os
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch
from torchtitan.tools import utils

# ruff: noqa: E402
utils.device_type, utils.device_module = "cpu", torch.cpu  # Before torchtitan imports these names elsewhere.

import torchtitan.train
from torchtitan.components import metrics
from torchtitan.distributed import fsdp
from torchtitan.distributed import utils as ranks
from torchtitan.protocols.module import Module

LAYERS, EXPERT_WIDTH = 2, 256


class CausalAttention(Module):
    """Attention of PyTorch ops, with the log-sum-exp that gpt-oss requests. Packed documents attend to each other."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config):
        super().__init__()
        self.window = config.window_size[0]

    def forward(self, q_BLNH, k_BLNH, v_BLNH, *, scale=None, enable_gqa=False, out_transform=None, **options):
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        if enable_gqa:
            k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        scores = (q @ k.transpose(2, 3)).float() * (scale or q.shape[-1] ** -0.5)
        distance = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
        hidden = distance < 0 if self.window < 0 else (distance < 0) | (distance > self.window)
        scores = scores.masked_fill(hidden, -torch.inf)
        y = (scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2)
        return y if out_transform is None else out_transform(y, scores.logsumexp(-1).transpose(1, 2))


class NoMemory:
    device_name = "CPU"

    def get_peak_stats(self):
        return metrics.DeviceMemStats(0, 0, 0, 0, 0, 0)

    def reset_peak_stats(self):
        pass


def fit_to_cpus(config):
    """Replace the attention of a config, and make its model small."""
    model = config.model_spec.model
    model.layers = model.layers[:LAYERS]
    for layer in model.layers:
        if getattr(layer, "moe", None) is not None:
            layer.moe.routed_experts.inner_experts.hidden_dim = EXPERT_WIDTH
        window = getattr(layer.attention.inner_attention, "window_size", (-1, 0))
        layer.attention.inner_attention = CausalAttention.Config(window_size=window)
    return config


def digest(trainer):
    """Hash the local parameters and optimizer states of a trainer."""
    found = hashlib.sha256()
    states = [part.state_dict() for part in trainer.model_parts] + [trainer.optimizers.state_dict()]
    for state in states:
        for name, value in sorted(state.items()):
            if isinstance(value, torch.Tensor):
                local = value.to_local() if hasattr(value, "to_local") else value
                local = getattr(local, "shard", local)
                found.update(name.encode())
                found.update(local.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def replace_gpu_parts(result):
    """Replace the parts that need GPUs, and write what a run logs into `result`."""
    manager, trainer = torchtitan.train.ConfigManager, torchtitan.train.Trainer
    parse, log, sharded, train = (
        manager.parse_args,
        metrics.MetricsProcessor.log,
        fsdp.disable_fsdp_gradient_division,
        trainer.train,
    )

    def log_loss(self, step, loss, largest, norm, **options):
        result["losses"].append(loss)
        result["norms"].append(norm)
        log(self, step, loss, largest, norm, **options)

    def sum_gradients(model):
        sharded(model)
        for module in model.modules():
            if isinstance(module, fsdp.FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    def train_and_hash(self):
        if result["saves_initial"]:
            self.checkpointer.save(0, last_step=True)
        train(self)
        result["digest"] = digest(self)

    manager.parse_args = lambda self: fit_to_cpus(parse(self))
    metrics.MetricsProcessor.log = log_loss
    metrics.build_device_memory_monitor = NoMemory
    fsdp.disable_fsdp_gradient_division = sum_gradients
    ranks.set_pg_timeouts = lambda **options: None
    trainer.train = train_and_hash


def run_rank(run, rank, port):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(run["ranks"]))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port), **run["environment"])
    result = {"losses": [], "norms": [], "saves_initial": run["saves_initial"]}
    replace_gpu_parts(result)
    sys.argv[1:] = run["arguments"]
    torchtitan.train.main()
    if rank == 0:
        Path(f"{run['name']}.json").write_text(json.dumps(result))


def fork_rank(run, rank, port):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        run_rank(run, rank, port)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main():
    for run in json.loads(Path(sys.argv[1]).read_text()):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        children = [fork_rank(run, rank, port) for rank in range(run["ranks"])]
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes):
            sys.exit(f"{run['name']} failed")


if __name__ == "__main__":
    main()
