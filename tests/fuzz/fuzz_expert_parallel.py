"""Steps of `grouped_mlp(ep_axis=...)` on eight host devices, drawn from a product of features, against one device.

    python tests/fuzz/fuzz_expert_parallel.py --cases 100 --seed 1

A case is drawn from the seed and its number alone; `--first N --cases 1` runs one again. Rows of results may differ by
the order of sums, and if that moves a code of the next product, by a step of this code.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import random
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("NPROC", "16")  # As in conftest.py.
sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from qshard.jax._experts.token_exchange import least_bytes
from support.formats import RECIPES

EXPERTS, TOP_K, WIDTH, HIDDEN, SEED = 8, 2, 64, 64, 0x0123456789ABCDEF
MESHES: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"ep": 8}, ("ep",)),
    ({"ep": 2}, ("ep",)),
    ({"ep": 4, "one": 1}, ("ep",)),
    ({"one": 1, "ep": 4}, ("one", "ep")),
    ({"a": 2, "b": 2}, ("a", "b")),
    ({"a": 2, "b": 2}, ("b", "a")),
    ({"fsdp": 2, "ep": 4}, ("ep",)),
    ({"ep": 2, "fsdp": 4}, ("ep",)),
    ({"fsdp": 1, "ep": 4}, ("ep",)),
]
"""Mesh axes, and the axes of experts."""
LOADS = ["uniform", "skewed", "one expert", "some experts", "idle devices", "one source", "nowhere", "no rows"]
VALUES = ["normal", "normal", "normal", "zeros", "zero weight", "inf in x", "nan in x", "nan in w13", "inf in w2"]
RESULTS = {"": ("y",), "x": ("y", "dx", "dweights"), "w": ("y", "dw13", "dw2")}
RESULTS["xw"] = (*RESULTS["x"], *RESULTS["w"][1:])
LIMITS = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}
CODE_STEP = 0.15
"""The most that codes on the other side of a tie change a row."""


@dataclass(frozen=True)
class Case:
    """One step.

    Attributes:
      partial: `shard_map` is over the axes of experts only.
      transform: around the layer, or "vmap" around the step.
      wrt: the arguments with gradients, "x" and "w"; "" is a forward pass alone.
      least_bytes: of the exchange, so that small rows are sent in parts too.
    """

    recipe: str | None = None
    mesh: int = 0
    explicit: bool = False
    partial: bool = False
    check_vma: bool = True
    load: str = ""
    tokens: int = 0
    dtype: str = "float32"
    capacity: str = ""
    transform: str = "none"
    wrt: str = ""
    values: str = ""
    least_bytes: int = 0
    layout: str = "NK"

    @classmethod
    def draw(cls, seed: int, number: int) -> Case:
        draw = random.Random(f"{seed} {number}")
        recipe, wrt = draw.choice([None, *RECIPES]), draw.choice(["", "x", "w", "xw", "xw"])
        return cls(
            recipe=recipe,
            mesh=draw.randrange(len(MESHES)),
            explicit=draw.random() < 0.4,
            partial=draw.random() < 0.2,
            check_vma=draw.random() < 0.7,
            load=draw.choice(LOADS),
            tokens=draw.choice([1, 8, 24, 37]),
            dtype=draw.choice(["float32", "float32", "bfloat16", "float16"]),
            capacity=draw.choice(["worst", "worst", "fits", "too small"]),
            transform=draw.choice(["none", "none", "remat", "scan", "vmap", "jit"]),
            wrt="xw" if recipe == "DelayedScaling" and wrt == "w" else wrt,  # States must be differentiated too.
            values=draw.choice(VALUES),
            least_bytes=draw.choice([2**20, 1, 600]),
            layout=draw.choice(["NK", "NK", "KN"]),
        )

    @property
    def ep(self) -> tuple[str, ...]:
        return MESHES[self.mesh][1]

    @property
    def devices(self) -> int:
        return math.prod(MESHES[self.mesh][0][axis] for axis in self.ep)

    @property
    def groups(self) -> int:
        """The number of groups of devices that share experts: each has tokens of its own."""
        return 1 if self.partial else MESHES[self.mesh][0].get("fsdp", 1)

    @property
    def batched(self) -> bool:
        return self.transform == "vmap"

    @property
    def of_one_device(self) -> Case:
        """What a step on one device depends on, so that equal ones compile once."""
        return Case(recipe=self.recipe, dtype=self.dtype, transform=self.transform, wrt=self.wrt, layout=self.layout)


def experts_of_tokens(case: Case, source: np.random.Generator) -> np.ndarray:
    """Return int32 `[groups, devices, T, k]`."""
    tokens = 0 if case.load == "no rows" else case.tokens
    found = source.integers(0, EXPERTS, (case.groups, case.devices, tokens, TOP_K)).astype(np.int32)
    if case.load == "skewed":
        found[source.random(found.shape) < 0.8] = EXPERTS - 1
    elif case.load == "one expert":
        found[:] = source.integers(EXPERTS)
    elif case.load == "some experts":
        found[found % 3 == 0] = -1
    elif case.load == "idle devices":
        found[:, source.integers(case.devices) :] = -1
        found[..., 0] = np.where(found[..., 0] > 4, EXPERTS, found[..., 0])
    elif case.load == "one source":
        found[:, np.arange(case.devices) != source.integers(case.devices)] = -1
    elif case.load == "nowhere":
        found[:] = -1
    return found


def arguments_of(case: Case, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return x, weights, dy and indices, `[groups, devices, T, ...]`, and w13 and w2."""
    source = np.random.default_rng(seed)
    indices = experts_of_tokens(case, source)

    def normal(*shape: int) -> np.ndarray:
        return source.standard_normal(shape).astype(np.float32)

    x, dy = (normal(*indices.shape[:3], WIDTH) for _ in range(2))
    x *= 1 + np.arange(case.devices)[:, None, None]
    w13, w2 = normal(EXPERTS, 2 * HIDDEN, WIDTH) / WIDTH**0.5, normal(EXPERTS, WIDTH, HIDDEN) / HIDDEN**0.5
    poison = np.nan if "nan" in case.values else np.inf
    if case.values == "zeros":
        x[:] = 0
    elif case.values == "zero weight":
        w13[2], w2[5] = 0, 0
    elif "in x" in case.values and x.size:
        x[-1, case.devices // 2, -1, 3] = poison
    elif "in w13" in case.values:
        w13[3, 1, 2] = poison
    elif "in w2" in case.values:
        w2[3, 1, 2] = poison
    if case.layout == "KN":
        w13, w2 = (w.swapaxes(1, 2).copy() for w in (w13, w2))
    return [x, source.random(indices.shape, np.float32), dy, indices], [w13, w2]


def step(
    case: Case, x: Any, weights: Any, dy: Any, indices: Any, w13: Any, w2: Any, states: Any, **options: Any
) -> tuple[Any, ...]:
    """Return the `RESULTS`, and with gradients of all arguments the cotangents of states."""
    recipe = None if case.recipe is None else RECIPES[case.recipe]
    x, dy, w13, w2 = (each.astype(case.dtype) for each in (x, dy, w13, w2))
    given = {"seeds": (SEED, SEED + 1), "weight_layout": case.layout, **options}

    def layer(x: Any, weights: Any, w13: Any, w2: Any, states: Any, indices: Any) -> Any:
        return qj.grouped_mlp(x, indices, weights, w13, w2, recipe, states=states, **given)

    def call(*arguments: Any) -> Any:
        if case.transform == "scan":
            return jax.lax.scan(lambda h, _: (layer(h, *arguments[1:], indices), None), arguments[0], None, length=2)[0]
        around = {"remat": jax.checkpoint, "jit": jax.jit}.get(case.transform, lambda layer: layer)
        return around(layer)(*arguments, indices)

    if case.wrt == "x":
        y, vjp = jax.vjp(lambda x, weights: call(x, weights, w13, w2, states), x, weights)
    elif case.wrt == "w":
        y, vjp = jax.vjp(lambda w13, w2: call(x, weights, w13, w2, states), w13, w2)
    elif case.wrt:
        y, vjp = jax.vjp(call, x, weights, w13, w2, states)
    else:
        return (call(x, weights, w13, w2, states),)
    return y, *vjp(dy)


def batch(case: Case, run: Any) -> Any:
    return jax.vmap(run, in_axes=(0, 0, 0, 0, None, None, None)) if case.batched else run


@functools.cache
def on_one_device(case: Case) -> Any:
    return jax.jit(batch(case, functools.partial(step, case)))


def on_devices(case: Case, factor: float | None, arguments: list[Any]) -> Any:
    sizes, _ = MESHES[case.mesh]
    kinds = (AxisType.Explicit if case.explicit else AxisType.Auto,) * len(sizes)
    devices = jax.devices()[: math.prod(sizes.values())]
    mesh = jax.make_mesh((*sizes.values(),), (*sizes,), axis_types=kinds, devices=devices)
    options: dict[str, Any] = {"ep_axis": case.ep, "capacity_factor": factor}
    rows, weight, how = P(case.ep), P(case.ep), {"axis_names": set(case.ep)} if case.partial else {}
    if "fsdp" in sizes and not case.partial:
        rows = P(("fsdp", *case.ep))
        weight = P(case.ep, *(("fsdp", None) if case.layout == "NK" else (None, "fsdp")))
        options |= {"gather_axis": "fsdp", "weight_spec": weight}
        if case.recipe == "DelayedScaling" and not case.check_vma:
            options["axis_name"] = ()
    lead = (None,) if case.batched else ()
    rows = P(*lead, *rows)
    of_results = {"d" + name: P(*lead, *weight) for name in ("w13", "w2")}
    results = [of_results.get(name, rows) for name in RESULTS[case.wrt]]
    results += [P(*lead, case.ep)] if case.wrt == "xw" else []
    given = (rows,) * 4 + (weight, weight, P(case.ep))
    run = batch(case, functools.partial(step, case, **options))
    call = jax.shard_map(run, mesh=mesh, in_specs=given, out_specs=tuple(results), check_vma=case.check_vma, **how)
    shardings = [jax.NamedSharding(mesh, spec) for spec in given]
    return jax.jit(call)(*(jax.device_put(each, sharding) for each, sharding in zip(arguments, shardings, strict=True)))


def compare(case: Case, what: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Raise AssertionError unless a result is that of one device; where that is not finite, anything goes.

    On one device, a value that is not finite may reach the rows of more experts.
    """
    assert found.shape == expected.shape, (what, found.shape, expected.shape)
    poisoned, defined = " in " in case.values, np.isfinite(expected)
    assert not (~np.isfinite(found) & defined).any(), (what, "is not finite")
    assert poisoned or defined.all(), (what, "is not finite on one device")
    if not found.size or (poisoned and what in ("dw13", "dw2")):  # Amaxes of other experts are not finite, too.
        return
    a, b = (np.where(defined & np.isfinite(found), each, 0) for each in (found, expected))
    a, b = (each.reshape(-1, each.shape[-1]) for each in (a, b))
    norms, limit = np.linalg.norm(b, axis=1), LIMITS[case.dtype]
    scale = np.maximum(norms, np.linalg.norm(b) / len(b))
    error = np.linalg.norm(a - b, axis=1) / np.where(scale == 0, 1, scale)
    moved = error > limit
    most = 4 * limit if case.recipe is None else max(CODE_STEP, 4 * limit)
    assert error.max() <= most, (what, float(error.max()))
    assert case.recipe is None or moved.mean() <= 0.2 or moved.sum() <= 2, (what, float(moved.mean()))


def run_case(case: Case, seed: int) -> str:
    """Return what was checked. Raise AssertionError if results differ from those of one device."""
    of_tokens, weights = arguments_of(case, seed)
    indices = of_tokens[3]
    if case.batched:  # The second example has the tokens of other devices.
        of_tokens = [np.stack([each, np.roll(each, 1, 1)]) for each in of_tokens]
    states = None
    if case.recipe == "DelayedScaling":
        states = tuple(qj.init_delayed(RECIPES[case.recipe], (EXPERTS,)) for _ in range(2))
    lead = int(case.batched)
    merged = [each.reshape(*each.shape[:lead], case.groups, -1, each.shape[-1]) for each in of_tokens]
    alone = on_one_device(case.of_one_device)
    one = [alone(*(each.take(g, lead) for each in merged), *weights, states) for g in range(case.groups)]
    owners = np.where((indices >= 0) & (indices < EXPERTS), indices // (EXPERTS // case.devices), -1)
    received = np.array([[(of_group == device).sum() for device in range(case.devices)] for of_group in owners])
    most, sent = int(received.max()), indices.shape[2] * TOP_K
    overflows = case.capacity == "too small" and most > 1 and case.devices > 1
    factor = (most - overflows) / sent if most and case.capacity in ("fits", "too small") else None
    whole = [each.reshape(*each.shape[:lead], -1, each.shape[-1]) for each in of_tokens]
    with least_bytes(case.least_bytes):
        found = on_devices(case, factor, [*whole, *weights, states])
    for number, what in enumerate(RESULTS[case.wrt]):
        got = np.asarray(found[number], np.float32)
        parts = [np.asarray(each[number], np.float32) for each in one]
        of_weights = what in ("dw13", "dw2")
        if overflows and of_weights:
            assert np.isnan(got).any((-1, -2)).all(), (what, "of an overflow is finite")
        elif overflows:
            for g, part in enumerate(np.split(got, case.groups, lead)):
                assert received[g].max() < most or np.isnan(part).all(), (what, "of an overflow is finite")
        else:
            compare(case, what, got, sum(parts) if of_weights else np.concatenate(parts, lead))
    if case.values == "nan in w13" and not (overflows or case.batched):
        rows = np.isnan(np.asarray(found[0], np.float32)).any(1)
        assert rows[(indices.reshape(-1, TOP_K) == 3).any(1)].all(), "y of the expert with a NaN is finite"
    return "overflow" if overflows else "one device"


def is_refusal(case: Case, error: str) -> bool:
    """Return whether JAX or XLA refuses a case, with qshard and without it."""
    if case.partial and case.explicit:
        return "JAX does not sort over Explicit mesh axes" in error
    # XLA replaces operands without elements by constants. A manual region whose other operands are not used fails then.
    return case.load == "no rows" and "to be produced by a xla.sdy.GlobalToLocalShape" in error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    passed, failed = parser.parse_args(), 0
    for number in range(passed.first, passed.first + passed.cases):
        case = Case.draw(passed.seed, number)
        try:
            result = run_case(case, number)
        except Exception as error:
            if is_refusal(case, str(error)):
                result = "refused"
            else:
                failed += 1
                result = f"FAILED {case}"
                traceback.print_exc()
        print(number, result, flush=True)
        on_one_device.cache_clear()
        jax.clear_caches()
    print(f"{passed.cases} cases, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
