"""`linear_cross_entropy(recipe=)` in JAX equals `cross_entropy` of `linear`, chunk by chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import cross_entropy, linear, linear_cross_entropy
from support.formats import RECIPES, nearest
from support.pairs import turns

STATELESS = {name: recipe for name, recipe in RECIPES.items() if not recipe.stateful}
ROWS, CLASSES, WIDTH = 96, 256, 128
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((ROWS, WIDTH), np.float32)
W = 0.2 * RANDOM.standard_normal((CLASSES, WIDTH), np.float32)
LABELS = RANDOM.integers(0, CLASSES, ROWS)
LABELS[5] = -100


def apart(x, w, recipe, chunk, reduction, seed=None):
    """Compute the loss from whole logits, chunk by chunk."""
    losses = []
    for i, start in enumerate(range(0, ROWS, chunk)):
        own = slice(start, start + chunk)
        of_chunk = None if seed is None else jnp.asarray([seed, i << 16], jnp.uint32)
        logits = linear(x[own], w, recipe, seed=of_chunk)
        losses.append(cross_entropy(logits, LABELS[own], reduction="none", z_loss=1e-3))
    made = jnp.concatenate(losses)
    return {"none": made, "sum": made.sum(), "mean": made.sum() / (LABELS != -100).sum()}[reduction]


WAYS = [("mean", ROWS), ("sum", 64), ("none", ROWS), ("mean", 64), ("sum", ROWS), ("none", 64)]


@turns(1, name=list(STATELESS), way={f"{reduction}-{chunk}": (reduction, chunk) for reduction, chunk in WAYS})
def test_a_head_is_a_layer_and_a_loss(name, way):
    """The codes of a chunk are those of `linear` on its rows. Each recipe has both chunk sizes."""
    recipe, (reduction, chunk) = nearest(STATELESS[name]), way
    options = {"recipe": recipe, "reduction": reduction, "chunk": chunk}
    head = lambda x, w: linear_cross_entropy(x, w, LABELS, z_loss=1e-3, **options)  # noqa: E731
    weights = jnp.linspace(0.5, 2, ROWS) if reduction == "none" else 1.0
    got = jax.jit(jax.value_and_grad(lambda x, w: (weights * head(x, w)).sum(), (0, 1)))(X, W)
    of = functools.partial(apart, recipe=recipe, chunk=chunk, reduction=reduction)
    want = jax.jit(jax.value_and_grad(lambda x, w: (weights * of(x, w)).sum(), (0, 1)))(X, W)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-6)
    for a, b in zip(got[1], want[1], strict=True):
        # Chunk scales follow the gradient of logits, whose share of a mean is rounded at another place: some codes
        # differ. Otherwise only the order of sums differs.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-2 * float(jnp.abs(b).max()))
        assert np.mean(np.abs(a - b) > 1e-5 * np.abs(b).max()) < 0.05


def test_seeds_belong_to_chunks():
    options = {"recipe": "NVFP4", "chunk": 32, "z_loss": 1e-3}
    of_seed = jax.jit(jax.grad(lambda x, seed: linear_cross_entropy(x, W, LABELS, seed=seed, **options)))
    grads = [of_seed(X, seed) for seed in (1, 1, 2)]
    assert (grads[0] == grads[1]).all()
    assert (grads[0] != grads[2]).any()
    want = jax.jit(jax.grad(lambda x: apart(x, W, RECIPES["NVFP4"], 32, "mean", seed=1)))(X)
    np.testing.assert_allclose(grads[0], want, rtol=1e-5, atol=2e-2 * float(jnp.abs(want).max()))
    assert jnp.mean(jnp.abs(grads[0] - want) > 1e-4 * jnp.abs(want).max()) < 0.05


@pytest.mark.parametrize("name", ["MXFP8", "BlockScaling"])
def test_classes_of_devices(name):
    """In `shard_map`, block formats have the codes of one device."""
    mesh = jax.make_mesh((2,), ("tp",), devices=jax.devices()[:2], axis_types=(AxisType.Auto,))
    head = functools.partial(linear_cross_entropy, labels=LABELS, recipe=name, chunk=64)

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("tp")), out_specs=(P(), (P(), P("tp"))))
    def cut(x, w):
        return jax.value_and_grad(lambda x, w: head(x, w, axis_name="tp"), (0, 1))(x, w)

    got, want = jax.jit(cut)(X, W), jax.jit(jax.value_and_grad(lambda x, w: head(x, w), (0, 1)))(X, W)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_dtypes():
    step = jax.value_and_grad(lambda x, w: linear_cross_entropy(x, w, LABELS, recipe="CurrentScaling"), (0, 1))
    loss, (dx, dw) = jax.eval_shape(step, jnp.asarray(X, jnp.bfloat16), W)
    assert (loss.dtype, dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16, jnp.float32)


REFUSED = [
    ({"recipe": "DelayedScaling"}, r"recipe \(DelayedScaling\) is not supported: chunks.*pass another"),
    ({"recipe": "NVFP4"}, r"NVFP4 uses stochastic rounding"),
    ({"recipe": "MXFP8", "w": W[:100]}, r"w \(100, 128\) is not a whole number of 32x32 blocks"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED, ids=["delayed", "seed", "blocks"])
def test_what_is_refused(options, text):
    options = {"w": W, **options}
    with pytest.raises(ValueError, match=text):
        linear_cross_entropy(X, labels=np.zeros(ROWS, np.int32), **options)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_rows_that_a_mesh_cuts(kind):
    """XLA gathers sharded rows on Auto meshes; on Explicit meshes, types raise first."""
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(kind,))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    head = jax.jit(lambda x: linear_cross_entropy(x, W, LABELS, recipe="MXFP8"))
    with jax.set_mesh(mesh):
        if kind is AxisType.Explicit:
            with pytest.raises(ValueError, match=r"recipe \(MXFP8\) needs local arrays, but x \(96, 128\) is sharded"):
                head(x)
        else:
            np.testing.assert_allclose(head(x), linear_cross_entropy(X, W, LABELS, recipe="MXFP8"), rtol=1e-6)
