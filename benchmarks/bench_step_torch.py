"""Training step of a model under FSDP2 in PyTorch: bfloat16, qshard and rivals; time, memory and a profile.

`step_torch.py` has the model, by default of 2.0 B weights: float32 shards, gathered and reduced in bfloat16 unless
quantized, and AdamW. The recipe applies to the linear layers and experts of the blocks, not to embedding, routers and
head. `--model moe-qwen` and others have a mixture of experts in each block (`mixture_torch.py`). A kind is a recipe and
options:

    bf16, fp8, ...    no quantization with torch's fused AdamW, or a recipe of `examples/options.py` with qshard's AdamW
    torchao           dynamic per-tensor scaling, float8 gathers, scales computed once per step, torch's fused AdamW
    te-delayed, te-current, te-block    TransformerEngine's Linear, which gathers bfloat16; torch's fused AdamW

    compiled          torch.compile for each block
    budget            beside compiled: PyTorch's activation_memory_budget is 0.9, so backward repeats norms and casts
    fused             convert(fuse=True) for the norms, and qshard's swiglu and MoE
    loss              LinearCrossEntropy instead of the head and torch's cross_entropy
    bf16-states       bfloat16 states in qshard's AdamW
    muon, muon-fp8    qshard's Muon instead of AdamW; with 3 of 5 steps of Newton-Schulz in FP8
    primary           codes as parameters, masters in the optimizer
    ordered         gradients summed in float32 by `reduce_gradients_in_order`, not in bfloat16 by NCCL
    codes           beside ordered or zero: gradients are sent as MXFP8, not in bfloat16
    zero              ZeroOptimizer(shard_weights=True) of a bfloat16 model, bfloat16 gradients on the wire
    whole             a bfloat16 model on one rank, not sharded, and torch's fused AdamW with bfloat16 states

Peak memory is PyTorch's, for a step after the first. The profile is of rank 0, in milliseconds per step, with the parts
of `step_profile.py`. Kinds without their library are skipped. A kind that fails does not stop the others.

    python benchmarks/bench_step_torch.py [--model 8b] [--steps 6] [--kinds "bf16,bf16 compiled,fp8"] [--kernels 20]
    python benchmarks/bench_step_torch.py --flat --kinds bf16,fp8    # 50 steps: constant time and memory?
    python benchmarks/bench_step_torch.py --ranks 1 --kinds "bf16 compiled whole,fp8 compiled whole"
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import qshard.torch_bridge as qshard
import step_profile
import step_torch
from bench_device import COMPILER
from cases import measure_cases
from model_shapes import Shape, shape_of

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import options

OF_TE = {"te-delayed": "DelayedScaling", "te-current": "Float8CurrentScaling", "te-block": "Float8BlockScaling"}
LIBRARIES = {"torchao": "torchao", **dict.fromkeys(OF_TE, "transformer_engine")}
WORDS = (
    "compiled",
    "budget",
    "fused",
    "loss",
    "bf16-states",
    "muon",
    "muon-fp8",
    "primary",
    "ordered",
    "codes",
    "zero",
    "whole",
)
FP8_STEPS = {"muon": 0, "muon-fp8": 3}
BUDGET = 0.9
KINDS = (
    *("bf16", "bf16 compiled", "torchao compiled", *OF_TE),
    *(
        "fp8",
        "fp8 compiled",
        "fp8 compiled budget",
        "fp8 compiled loss budget",
        "fp8 fused",
        "fp8 fused ordered",
        "fp8 fused bf16-states",
        "fp8 fused zero",
        "fp8 fused zero bf16-states",
    ),
    *("fp8 fused loss", "fp8 fused loss zero", "fp8 fused loss bf16-states", "fp8 fused loss zero bf16-states"),
    *("delayed fused", "block", "block compiled", "block fused", "mxfp8 fused", "nvfp4 fused"),
)
WARM_UP = 3
"""Backend of torch.compile."""


def wrong_with(kind: str) -> str | None:
    """Return why a kind does not exist, or None."""
    recipe, *words = kind.split() or [""]
    if recipe not in options.RECIPES and recipe not in LIBRARIES:
        return f"{recipe!r} is not one of {', '.join((*options.RECIPES, *LIBRARIES))}"
    if unknown := [word for word in words if word not in WORDS]:
        return f"{unknown[0]!r} is not one of {', '.join(WORDS)}"
    if "zero" in words and {"primary", "ordered"} & {*words}:
        return "zero goes with neither primary nor ordered"
    if "whole" in words and {"primary", "ordered", "zero", "bf16-states", *FP8_STEPS} & {*words}:
        return "whole is not sharded, and has torch's optimizer"
    if "budget" in words and "compiled" not in words:
        return "budget goes with compiled"
    if {*FP8_STEPS} <= {*words}:
        return "muon and muon-fp8 are two optimizers"
    if {*FP8_STEPS} & {*words} and "bf16-states" in words:
        return "muon does not go with bf16-states"
    takes = {"compiled", "budget", "whole"} if recipe == "torchao" else set() if recipe in OF_TE else set(WORDS)
    if recipe == "bf16":
        takes -= {"fused", "primary"}
    if misplaced := [word for word in words if word not in takes]:
        return f"{recipe} is not there in {misplaced[0]!r}"
    return None


def is_missing(kind: str) -> bool:
    """Return whether a kind's library is not installed."""
    library = LIBRARIES.get(kind.split()[0])
    return library is not None and importlib.util.find_spec(library) is None


def build(kind: str, shape: Shape) -> Callable[[], torch.Tensor]:
    recipe, *words = kind.split()
    model = step_torch.fresh(shape)
    after: Callable[[], Any] = lambda: None  # noqa: E731
    around: Callable[[], Any] = contextlib.nullcontext
    if recipe == "torchao":
        after = convert_to_torchao(model, is_sharded="whole" not in words)
    elif recipe in OF_TE:
        around = convert_to_te(model, OF_TE[recipe])
    elif options.RECIPES[recipe] is not None:
        for block in model.blocks if shape.experts and "fused" in words else ():
            block.mixture = block.mixture.fused(options.RECIPES[recipe])
        given = {"primary": "primary" in words, "fuse": "fused" in words}
        qshard.convert(model, options.RECIPES[recipe], filter=step_torch.is_quantized, **given)
        if "zero" not in words:
            after = partial(qshard.update_scales, model)
    for block in model.blocks:
        if "fused" in words:
            block.swiglu = qshard.swiglu
        if "compiled" in words:
            block.compile(backend=COMPILER)
    states = dict.fromkeys(("exp_avg_dtype", "exp_avg_sq_dtype"), torch.bfloat16) if "bf16-states" in words else {}
    if {"zero", "whole"} & {*words}:
        model.to(torch.bfloat16)
    wire: Any = "MXFP8_E4M3" if "codes" in words else torch.bfloat16
    muon = [{"ns_fp8_steps": FP8_STEPS[word]} for word in words if word in FP8_STEPS]
    if "whole" in words:
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    elif "zero" in words:
        given = {"shard_weights": True, "units": [*model.blocks], "reduce_dtype": wire, "parity": "master"}
        given |= {"optimizer_class": qshard.Muon, **muon[0]} if muon else {"optimizer_class": qshard.AdamW}
        optimizer = qshard.ZeroOptimizer(model, lr=1e-4, **given, **states)
    else:
        step_torch.shard(model)
        if "ordered" in words:
            qshard.reduce_gradients_in_order(model, wire)
        if muon:
            optimizer = qshard.Muon(model.named_parameters(), lr=1e-4, **muon[0])
        elif states or options.RECIPES.get(recipe) is not None:
            optimizer = qshard.AdamW(model.parameters(), lr=1e-4, **states)
        else:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return step_torch.step_of(model, optimizer, shape, after, around, fused_loss="loss" in words)


def convert_to_torchao(model: step_torch.Model, is_sharded: bool) -> Callable[[], Any]:
    """Convert the model. Return the function that ends a step: one all-reduce for the scales of sharded weights."""
    from torchao.float8 import (
        Float8LinearConfig,
        convert_to_float8_training,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=is_sharded)
    convert_to_float8_training(model, config=config, module_filter_fn=step_torch.is_quantized)
    return partial(precompute_float8_dynamic_scale_for_fsdp, model) if is_sharded else lambda: None


def convert_to_te(model: step_torch.Model, recipe: str) -> Callable[[], Any]:
    """Convert the model. Return the context manager for forward passes."""
    import transformer_engine.common.recipe as recipes
    import transformer_engine.pytorch as te

    for block in model.blocks:
        for name, layer in [*block.named_children()]:
            if isinstance(layer, nn.Linear):
                made = te.Linear(layer.in_features, layer.out_features, bias=False, params_dtype=layer.weight.dtype)
                with torch.no_grad():
                    made.weight.copy_(layer.weight)
                setattr(block, name, made)
    autocast = getattr(te, "autocast", None) or te.fp8_autocast  # new and old name; the third argument is the recipe
    return partial(autocast, True, False, getattr(recipes, recipe)())


def measure(kind: str, arguments: argparse.Namespace) -> dict[str, dict[str, object]]:
    torch._dynamo.reset()  # kinds compile the same functions, and the number of versions is limited
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # instead of silently running eagerly
    torch._functorch.config.activation_memory_budget = BUDGET if "budget" in kind.split() else 1.0
    gc.collect()
    torch.cuda.empty_cache()
    shape = shape_of(arguments)
    step = build(kind, shape)
    began = time.perf_counter()
    step().item()
    first = time.perf_counter() - began
    for _ in range(WARM_UP - 1):
        step()
    found = step_torch.time_steps(step, step_torch.FLAT_STEPS if arguments.flat else arguments.steps)
    of_case = {"kind": kind, "ranks": dist.get_world_size(), "layers": shape.layers, "tokens": shape.tokens}
    row = {**of_case, **found.row(), "first_s": f"{first:.1f}", "loss": f"{found.loss:.4f}"}
    if arguments.flat:
        return {f"{arguments.out}_flat": row | found.flat_row()}
    if step_torch.DEVICE == "cpu":
        return {arguments.out: row}
    parts, kernels = step_profile.profile(step)
    if dist.get_rank() == 0:
        for name, ms in [*kernels.items()][: arguments.kernels]:
            print(f"{ms:8.2f} ms  {step_profile.part_of(name)}: {name[:200]}")
    profile = {name: f"{ms:.1f}" for name, ms in parts.items()}
    return {arguments.out: row, f"{arguments.out}_profile": of_case | profile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    step_torch.add_arguments(parser, "step_torch", mixtures=True)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--kernels", type=int, default=0, help="print so many kernels of each kind, longest first")
    arguments = parser.parse_args()
    kinds = [" ".join(kind.split()) for kind in arguments.kinds.split(",")]
    for kind in kinds:
        if wrong := wrong_with(kind):
            parser.error(f"--kinds: {kind!r}: {wrong}")
    if not step_torch.has_device():
        parser.exit(message="bench_step_torch: no CUDA device, nothing to measure\n")
    if missing := [kind for kind in kinds if is_missing(kind)]:
        print(f"bench_step_torch: left out, their libraries are not installed: {', '.join(missing)}")
    kinds = [kind for kind in kinds if kind not in missing]
    sys.exit(measure_cases(measure, kinds, arguments, step_torch.DEVICE))


if __name__ == "__main__":
    main()
