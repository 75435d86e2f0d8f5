"""Programs that outlive their process: `jax.export`, saved and loaded, and JAX's persistent compilation cache."""

import functools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qshard.formats import FP8_E4M3, Usage
from qshard.jax import (
    QuantizedArray,
    adamw,
    cross_entropy,
    disabled_checks,
    linear,
    linear_cross_entropy,
    quantize,
)
from qshard.recipes import CurrentScaling
from support.awkward import TAME, assert_bits_equal, awkward_values

PROGRAM = Path(__file__).parents[1] / "support" / "jax_saved_program.py"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Run two processes in turn on one folder; return (folder, programs cached after each)."""
    folder = tmp_path_factory.mktemp("programs")
    np.save(folder / "x.npy", awkward_values((64, 256), kinds=TAME))
    counts = []
    for mode in ("save", "load"):
        result = subprocess.run(
            [sys.executable, str(PROGRAM), mode, str(folder)], capture_output=True, text=True, check=False, timeout=240
        )
        assert result.returncode == 0, result.stderr
        counts.append(int(result.stdout.split()[-1]))
    return folder, counts


@pytest.mark.parametrize("name", ["whole", "sharded"])
def test_exported_cast(saved, name):
    """A quantized array is a legal result, and the loading process needs only `import qshard.jax`."""
    folder, _ = saved
    q = quantize(np.load(folder / "x.npy"), FP8_E4M3, usage=Usage.BOTH)
    for got, want in zip(np.load(folder / f"{name}.npz").values(), jax.tree.leaves(q), strict=True):
        assert_bits_equal(got, np.asarray(want).view(got.dtype))


def test_exported_step(saved):
    folder, _ = saved
    x = np.load(folder / "x.npy")
    want = jax.jit(jax.value_and_grad(lambda w: linear(x, w, CurrentScaling()).sum()))(x[:16])
    for got, expected in zip(np.load(folder / "step.npz").values(), want, strict=True):  # fp32 sums in another order.
        np.testing.assert_allclose(got.view(np.float32), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_exported_update(saved):
    """NVFP4 with a seed argument, and the kernel of `adamw`, have the bits of the program before export."""
    folder, _ = saved
    x = np.load(folder / "x.npy")
    optimizer = adamw(1e-3)

    @jax.jit
    def update(w, seed):
        gradient = jax.grad(lambda w: linear(x, w, "NVFP4", seed=seed).sum())(w)
        return optimizer.update(gradient, optimizer.init(w), w)[0]

    (got,) = np.load(folder / "nvfp4.npz").values()
    assert_bits_equal(got.view(np.float32), np.asarray(update(x[:16], 7)))


def test_the_public_list_is_what_export_needs():
    """Without the list, export names the first custom call that JAX does not know."""
    step = jax.jit(lambda x: linear(x, x, "MXFP8"))
    with pytest.raises(ValueError, match=r"qshard_quantize_block"):
        jax.export.export(step)(np.ones((32, 32), np.float32))
    assert len(disabled_checks()) == len({str(check) for check in disabled_checks()})


def test_persistent_cache_hits(saved):
    """The second process hits the cache: the key of a program is the same in every run."""
    _, (first, second) = saved
    assert first == second > 0


def test_losses_of_auto_meshes_hit_the_persistent_cache(saved):
    """With JAX's flag, losses with partitioning callbacks hit the cache, and different losses share no entry."""
    folder, (first, _) = saved
    x, labels = np.load(folder / "x.npy"), np.arange(64) % 40
    want = []
    for options in ({}, {"label_smoothing": 0.5}, {"z_loss": 0.5}, {"num_classes": 48}):
        want.append(jax.jit(functools.partial(cross_entropy, labels=labels, **options))(x))
        gradient = jax.jit(jax.grad(functools.partial(linear_cross_entropy, w=x, labels=labels, **options)))(x)
        want.append(gradient[0, 0])
    want *= 2
    for mode in ("save", "load"):
        np.testing.assert_allclose(np.load(folder / f"losses_{mode}.npy"), np.asarray(want), rtol=1e-4, atol=1e-6)
    assert first >= len(want)


def test_quantized_arrays_are_serialized():
    """The static part of the pytree passes through jax.export and stays equal."""
    fmt = FP8_E4M3.with_options(pow2=True, eps=0.25)
    x = np.ones((2, 3, 32), np.float32)
    exported = jax.export.export(
        jax.jit(QuantizedArray.dequantize),
        disabled_checks=disabled_checks(),
    )(quantize(x, fmt))
    again = jax.export.deserialize(exported.serialize())
    assert again.in_tree == exported.in_tree
    np.testing.assert_array_equal(again.call(quantize(x, fmt)), x)
