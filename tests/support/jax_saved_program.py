"""Run twice by tests/cpu/test_jax_export.py: `save DIR` exports programs, `load DIR` runs them in a process of its own.

Both compile the same function through JAX's persistent cache in DIR/cache and print how many programs that holds.
"""

import functools
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.xla_flags import xla_flags

MODE, FOLDER = sys.argv[1], Path(sys.argv[2])
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = xla_flags(8)

import jax  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

from qshard.formats import FP8_E4M3, Usage  # noqa: E402
from qshard.jax import adamw, cross_entropy, disabled_checks, linear, linear_cross_entropy, quantize  # noqa: E402
from qshard.recipes import CurrentScaling  # noqa: E402

SEED = np.int32(7)
LABELS = np.arange(64) % 40


def both(x):
    return quantize(x, FP8_E4M3, usage=Usage.BOTH)


def step(x, w):
    product = jax.value_and_grad(lambda w: linear(x, w, CurrentScaling()).sum())
    return product(w)


def nvfp4(x, w, seed):
    """A traced seed, random rounding, rotations, and an optimizer's kernel."""
    optimizer = adamw(1e-3)
    gradient = jax.grad(lambda w: linear(x, w, "NVFP4", seed=seed).sum())(w)
    return optimizer.update(gradient, optimizer.init(w), w)[0]


LOSSES = [
    (cut, options)
    for cut in ((P(None, "a"), P("a")), (P("a"), P()))
    for options in ({}, {"label_smoothing": 0.5}, {"z_loss": 0.5}, {"num_classes": 48})
]
"""How logits, or x and w, are cut; programs that differ in nothing that XLA sees."""


def loss(logits, _, **options):
    return cross_entropy(logits, LABELS, **options)


def linear_loss(x, w, **options):
    return linear_cross_entropy(x, w, LABELS, **options)


def main() -> None:
    x = np.load(FOLDER / "x.npy")
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    sharded = jax.device_put(x, NamedSharding(mesh, P("a")))
    programs = {
        "whole": (both, (x,)),
        "sharded": (both, (sharded,)),
        "step": (step, (x, x[:16])),
        "nvfp4": (nvfp4, (x, x[:16], SEED)),
    }
    if MODE == "save":
        for name, (function, args) in programs.items():
            exported = jax.export.export(jax.jit(function), disabled_checks=disabled_checks())(*args)
            (FOLDER / f"{name}.bin").write_bytes(exported.serialize())
    else:
        for name, (_, args) in programs.items():
            exported = jax.export.deserialize(bytearray((FOLDER / f"{name}.bin").read_bytes()))
            leaves = jax.tree.leaves(jax.jit(exported.call)(*args))
            np.savez(FOLDER / f"{name}.npz", *[np.asarray(leaf).view(f"u{leaf.dtype.itemsize}") for leaf in leaves])

    jax.config.update("jax_compilation_cache_dir", str(FOLDER / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_remove_custom_partitioning_ptr_from_cache_key", True)  # For the losses.
    jax.jit(both).lower(sharded).compile()
    losses = []
    for cut, options in LOSSES:
        operands = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in zip((x, x), cut, strict=True)]
        losses += [jax.jit(functools.partial(loss, **options))(*operands)]
        losses += jax.jit(jax.grad(functools.partial(linear_loss, **options)))(*operands).ravel()[:1].tolist()
    np.save(FOLDER / f"losses_{MODE}.npy", np.asarray(losses, np.float32))
    print(len([path for path in (FOLDER / "cache").iterdir() if path.name.endswith("-cache")]))


main()
