"""Host time of calls on small tensors, eager and compiled, compared with the framework's own calls.

On tensors so small that the device keeps up with the queue, a call costs the time of Python, the bridge and launches.
Rows have the median over rounds of microseconds per call, and its ratio to a base call: an addition into an existing
tensor (`torch.add`, or `jnp.add` for JAX), `nn.Linear`, or a bf16 step of the examples' GPT on one device. Its compiled
and captured steps (`torch.compile` with mode "reduce-overhead") are of width 512, 6 layers and 8 x 256 tokens.

Some rows are lower bounds and have no target. A layer written as a Python `autograd.Function` costs at least as much as
such a function of three `torch.mm`, plus its launches. A compiled step costs at least as much as the step in bf16, plus
its further launches. Both bounds add as many launches as qshard has, by `torch.add` into an existing tensor. A jitted
function in JAX costs at least as much as one kernel with four results, returned as a tuple or a dataclass.

    python benchmarks/bench_host.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import torch
from torch import nn

import qshard.torch_bridge as qshard
import rows
from qshard import formats
from qshard.formats import Usage
from qshard.torch_bridge._ops.bind import into
from step_profile import kernels_of

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import options
import train_torch
from gpt import GPTConfig, initial_weights

SIZE = 512
FORMATS = ("FP8_E4M3", "FP8_1x128", "FP8_128x128", "MXFP8_E4M3", "MXFP8_32x32", "NVFP4", "NVFP4_16x16")
E4M3 = {"element": "float8_e4m3fn"}
LEAST = "autograd.Function of three torch.mm"

Calls = dict[str, tuple[int, Callable[[], object]]]
"""Maps a name to (calls in a row before the host waits for the device, call)."""


def small_calls() -> Calls:
    x, scale = torch.randn(64, 64, device="cuda"), torch.tensor(2.0, device="cuda")
    code, out = torch.empty(64, 64, device="cuda", dtype=torch.uint8), torch.empty_like(x)
    y = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    calls: Calls = {
        "torch.add into a given output": (100, lambda: torch.add(x, x, out=out)),
        "cast_tensor into given outputs": (100, lambda: into(code).cast_tensor(x, scale, **E4M3)),
        "torch.ops.qshard.cast_tensor": (100, lambda: torch.ops.qshard.cast_tensor(x, scale, **E4M3)),
    }
    for name in FORMATS:
        for usage in (Usage.ROWWISE, Usage.BOTH):
            what = "both" if usage is Usage.BOTH else "rowwise"
            calls[f"quantize {name} {what}"] = (
                50,
                lambda name=name, usage=usage: qshard.quantize(y, getattr(formats, name), usage=usage),
            )
    return calls


class ThreeProducts(torch.autograd.Function):
    """`nn.Linear` as a Python function, with `more` = (forward, backward) additional launches."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, more: tuple[int, int], out: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        ctx.more, ctx.out = more[1], out
        launch(more[0], out)
        return torch.mm(x, w.t())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, w = ctx.saved_tensors
        launch(ctx.more, ctx.out)
        return torch.mm(grad, w), torch.mm(grad.t(), x), None, None


def launch(count: int, out: torch.Tensor) -> None:
    for _ in range(count):
        torch.add(out, out, out=out)


def layers() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Return the layers to time. The last one takes additional launches as `more`."""
    made: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
    for name, recipe in options.RECIPES.items():
        layer = nn.Sequential(nn.Linear(SIZE, SIZE, bias=False, device="cuda", dtype=torch.bfloat16))
        if recipe is not None:
            qshard.convert(layer, recipe)
        made["nn.Linear" if recipe is None else f"Linear {name}"] = layer
    weight = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = torch.zeros(64, 64, device="cuda")

    def function(x: torch.Tensor, more: tuple[int, int] = (0, 0)) -> torch.Tensor:
        product: torch.Tensor = ThreeProducts.apply(x, weight, more, out)
        return product

    return made | {LEAST: function}


def launches() -> dict[str, tuple[int, int]]:
    """Count the launches of each layer, forward and backward. The backward pass adds to existing gradients."""
    x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    found = {}
    for name, layer in layers().items():

        def call(layer: Callable[[torch.Tensor], torch.Tensor] = layer) -> None:
            layer(x).backward(gradient)

        for _ in range(3):
            call()  # warm up
        forward = len(kernels_of(functools.partial(layer, x)))
        found[name] = forward, len(kernels_of(call)) - forward
    return found


def layer_calls() -> Calls:
    """Return calls of the forward and backward pass of one layer."""
    x = torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    gradient = torch.ones(SIZE, SIZE, device="cuda", dtype=torch.bfloat16)
    # In another process, because a profiler may slow down later calls.
    with multiprocessing.get_context("spawn").Pool(1) as child:
        launched = child.apply(launches)
    made, own = layers(), launched.pop(LEAST)
    ours: dict[tuple[int, int], str] = {}  # number of launches: first recipe with that number
    for name, passes in launched.items():
        if name != "nn.Linear":
            ours.setdefault(passes, name)
    for passes, name in sorted(ours.items()):
        more = passes[0] - own[0], passes[1] - own[1]
        made[f"{LEAST}, and the {sum(passes)} launches of {name}"] = functools.partial(made[LEAST], more=more)
    return {name: (10, lambda layer=layer: layer(x).backward(gradient)) for name, layer in made.items()}


def gpt_step(config: GPTConfig, recipe: str, batch: int, mode: str | None = None) -> Callable[[], None]:
    """Return a training step of the examples' GPT, with torch's fused AdamW. `torch.compile` takes `mode`."""
    tokens = torch.randint(0, 255, (batch, config.context + 1), device="cuda")
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    model = train_torch.GPT(config, torch.bfloat16).to("cuda", torch.bfloat16)
    model.load_state_dict({key: torch.from_numpy(value) for key, value in initial_weights(config).items()})
    if options.RECIPES[recipe] is not None:
        qshard.convert(model, options.RECIPES[recipe], filter=lambda _, name: "blocks" in name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=mode is not None)
    forward = model if mode is None else torch.compile(model, mode=mode)

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        forward(inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if recipe == "delayed":
            qshard.update_scales(model)

    return step


def gpt_calls() -> Calls:
    return {f"GPT {recipe}": (1, gpt_step(train_torch.CONFIG, recipe, batch=16)) for recipe in options.RECIPES}


def gpt_steps(mode: str) -> dict[str, Callable[[], None]]:
    """Return compiled steps of a GPT of width 512, in the recipes without state."""
    torch._dynamo.reset()
    config = dataclasses.replace(train_torch.CONFIG, layers=6, width=512, context=256)
    what = {"default": "compiled GPT", "reduce-overhead": "captured GPT"}[mode]
    return {f"{what} {recipe}": gpt_step(config, recipe, 8, mode) for recipe in ("bf16", "fp8", "block", "mxfp8")}


def step_launches() -> dict[str, int]:
    """Count the launches of each compiled step."""
    found = {}
    for name, step in gpt_steps("default").items():
        for _ in range(3):
            step()  # warm up
        found[name] = len(kernels_of(step))
    return found


def compiled_gpt_calls() -> Calls:
    # In another process, because a profiler may slow down later calls.
    with multiprocessing.get_context("spawn").Pool(1) as child:
        launched = child.apply(step_launches)
    made = gpt_steps("default")
    (base, step), *_ = made.items()
    out = torch.zeros(64, 64, device="cuda")
    for name in [*made][1:]:

        def with_launches(more: int = launched[name] - launched[base]) -> None:
            step()
            launch(more, out)

        made[f"{base}, and the {launched[name]} launches of {name}"] = with_launches
    return {name: (1, call) for name, call in made.items()}


def captured_gpt_calls() -> Calls:
    return {name: (1, step) for name, step in gpt_steps("reduce-overhead").items()}


@dataclass
class FourFields:
    a: Any
    b: Any
    c: Any
    d: Any


def jax_calls() -> Calls:
    import jax
    import jax.numpy as jnp

    import qshard.jax

    jax.tree_util.register_dataclass(FourFields, data_fields=list("abcd"), meta_fields=[])
    x = jax.device_put(jnp.ones((SIZE, SIZE), jnp.bfloat16), jax.devices()[0])
    four = jax.jit(lambda x: tuple(x + i for i in range(1, 5)))
    four_fields = jax.jit(lambda x: FourFields(*four(x)))
    calls: Calls = {
        "jnp.add": (50, lambda: jnp.add(x, x)),
        "a jitted function of four results": (50, lambda: four(x)),
        "a jitted function of a dataclass of four": (50, lambda: four_fields(x)),
    }
    for name in FORMATS:
        calls[f"qshard.jax.quantize {name} both"] = (
            50,
            lambda name=name: qshard.jax.quantize(x, getattr(formats, name), usage=Usage.BOTH),
        )
    return calls


def microseconds(calls: Calls, rounds: int, wait: Callable[[object], object]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(rounds + 2):
        for name, (count, call) in calls.items():
            wait(call())
            start = time.perf_counter()
            for _ in range(count):
                out = call()
            times[name] += [(time.perf_counter() - start) / count * 1e6] * (round_ > 1)  # the first rounds warm up
            wait(out)
    return {name: statistics.median(found) for name, found in times.items()}


def table(us: dict[str, float]) -> list[dict[str, object]]:
    """Build rows with the ratio to the first call."""
    beside, base = next(iter(us.items()))
    return [
        {"operation": name, "us": round(each, 2), "beside": beside, "times": round(each / base, 2)}
        for name, each in us.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parsed = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(message="bench_host: no CUDA device, nothing to measure\n")
    made: list[dict[str, object]] = []
    for calls in (small_calls, layer_calls, gpt_calls, compiled_gpt_calls, captured_gpt_calls):
        made += table(microseconds(calls(), parsed.rounds, lambda _: torch.cuda.synchronize()))
    import jax

    made += table(microseconds(jax_calls(), parsed.rounds, jax.block_until_ready))
    rows.write("host", torch.cuda.get_device_name(), made)


if __name__ == "__main__":
    main()
