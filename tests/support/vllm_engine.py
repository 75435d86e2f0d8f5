"""One rank of vLLM's engine on a CPU, without its compiled extension: it loads weights and saves its parameters.

    python vllm_engine.py JOBS.json RANK RANKS

Run in a process of its own, with vLLM on the path, because vLLM changes the environment and torch's settings. For each
job, vLLM parses the configuration of the folder, builds the model for this rank of its tensor parallelism, and loads

- `file`: the folder, by its loader of safetensors files;
- `stream`: what `stream_weights` yields for a model that FSDP2 has sharded over the same ranks.

Parameters are saved before and after `process_weights_after_loading`. Linear layers choose a kernel when they are
created, and none supports this platform: stand-ins, which keep parameters as they are, are registered for it.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels import linear as kernels
from vllm.model_executor.layers import utils
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import PlatformEnum

import qshard.torch_bridge as qt


def register_kernels() -> None:
    """Let linear layers of every format be created on a CPU."""

    def accept(*_: Any, **__: Any) -> tuple[bool, None]:
        return True, None

    def leave(self: Any, layer: nn.Module) -> None:
        """Keep the parameters as they are: a kernel would give them its own layout."""

    stand_in: dict[str, Any] = dict.fromkeys(
        ("is_supported", "can_implement", "_supports_quant_scheme"), classmethod(accept)
    )
    stand_in["process_weights_after_loading"] = leave
    for kind, base in {
        "fp8": kernels.PerTensorTorchFP8ScaledMMLinearKernel,
        "fp8_block": kernels.TritonFp8BlockScaledMMKernel,
        "mxfp8": kernels.EmulationMxfp8LinearKernel,
        "mxfp4": kernels.EmulationMxfp4LinearKernel,
    }.items():
        kernels.register_linear_kernel(type("StandIn", (base,), stand_in), PlatformEnum.CPU, kind)
    # For NVFP4 weights with bfloat16 activations vLLM always takes this kernel.
    for name in ("is_supported", "process_weights_after_loading"):
        setattr(kernels.MarlinNvFp4LinearKernel, name, stand_in[name])
    # On a CPU with AMX, layers that are not quantized would be packed by the extension.
    utils.check_cpu_sgl_kernel = lambda *_: False


def trainer(values: dict[str, torch.Tensor]) -> nn.Module:
    """Return a model with these weights, by the same names, sharded over all ranks by FSDP2."""
    model = nn.Module()
    for name, value in values.items():
        *path, _ = name.split(".")
        if value.ndim == 1:
            layer: nn.Module = nn.RMSNorm(value.shape)
        else:
            layer = nn.Embedding(*value.shape) if "embed" in name else nn.Linear(*value.shape[::-1], bias=False)
        layer.weight = nn.Parameter(value)
        at = model
        for part in path[:-1]:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(path[-1], layer)
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    return model


def save(model: nn.Module, path: str) -> None:
    save_file({name: each.detach().clone().contiguous() for name, each in model.named_parameters()}, path)


def run(job: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Load the weights both ways, save the parameters, and return the classes that vLLM chose for the layers."""
    arguments = EngineArgs(
        model=job["folder"],
        skip_tokenizer_init=True,
        load_format="safetensors",
        dtype="bfloat16",
        max_model_len=64,
        enforce_eager=True,
        tensor_parallel_size=ranks,
        distributed_executor_backend="mp",
    )
    for source in ("file", "stream"):
        config = arguments.create_engine_config()
        with set_current_vllm_config(config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(ranks, rank, f"file://{job['folder']}.store", rank, backend="gloo")
                initialize_model_parallel(ranks)
            torch.set_default_dtype(torch.bfloat16)  # as vLLM does
            model = initialize_model(config)
            torch.set_default_dtype(torch.float32)
            if source == "file":
                get_model_loader(config.load_config).load_weights(model, config.model_config)
            else:
                values = load_file(Path(job["values"]) / "model.safetensors")
                model.load_weights(qt.stream_weights(trainer(values), job["engine"], weight_format=job["formats"]))
            save(model, f"{job['folder']}.{source}.{rank}.safetensors")
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            save(model, f"{job['folder']}.{source}.after.{rank}.safetensors")
    schemes = {
        name: type(getattr(module, "scheme", None) or module.quant_method).__name__
        for name, module in model.named_modules()
        if name.endswith("_proj")
    }
    return {"config": type(config.quant_config).__name__, "schemes": schemes}


def main(jobs: str, rank: int, ranks: int) -> None:
    register_kernels()
    results = {}
    for job in json.loads(Path(jobs).read_text()):
        try:
            results[Path(job["folder"]).name] = run(job, rank, ranks)
        except Exception:
            results[Path(job["folder"]).name] = {"error": traceback.format_exc()}
    Path(f"{jobs}.{rank}").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
