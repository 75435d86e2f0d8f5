"""Checkpoints of JAX trees, bit for bit: orbax with and without a target, onto another mesh, and flax serialization."""

from __future__ import annotations

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import formats
from qshard.formats import Usage
from qshard.jax import PrimaryWeight, QuantizedArray, describe, init_delayed, linear, quantize, rebuild, update_delayed
from qshard.recipes import DelayedScaling
from support.awkward import assert_bits_equal, awkward_values
from support.formats import NAMED

ocp = pytest.importorskip("orbax.checkpoint")
serialization = pytest.importorskip("flax.serialization")
pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided when restoring:UserWarning")
RECIPE = DelayedScaling(history=2)
SHAPE = (256, 512)


def mesh_of(count, *shape, names=("a", "b")):
    shape = shape or (count,)
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names[: len(shape)], axis_types=kinds, devices=jax.devices()[:count])


def put(tree, mesh):
    """Shard the axes of every leaf over the mesh axes that divide them."""

    def spec(leaf):
        free = list(mesh.axis_names)
        return P(*[free.pop(0) if free and size and size % mesh.shape[free[0]] == 0 else None for size in leaf.shape])

    return jax.tree.map(lambda leaf: NamedSharding(mesh, spec(leaf)), tree)


@functools.cache
def tree():
    """Return a tree of all named formats, in both planes where supported, at various depths, and a state."""
    x = jnp.asarray(awkward_values(SHAPE, seed=1))
    coded = {str(fmt): quantize(x, fmt, usage=Usage.BOTH if fmt.shares_codes else Usage.ROWWISE) for fmt in NAMED}
    deep = quantize(x.astype(jnp.bfloat16).reshape(8, 32, 512), formats.MXFP8_E4M3, usage=Usage.COLUMNWISE)
    primary = PrimaryWeight.of(quantize(x, formats.NVFP4_16x16), jnp.float32(3))
    made = {
        "primary": primary,
        "layers": [coded, (deep, {"b/c": deep})],
        "w": x,
        "states": {"0": init_delayed(RECIPE, (3,))},
    }
    return jax.device_put(made, put(made, mesh_of(8)))


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), got, want)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a tree by orbax, and return its path and metadata."""
    path = tmp_path_factory.mktemp("orbax") / "all"
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, tree(), custom_metadata={"mine": 1, **describe(tree())})
        checkpointer.wait_until_finished()
        return path, checkpointer.metadata(path)


def restore(path, target=None):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, target)


def test_orbax_without_a_target(saved):
    path, metadata = saved
    plain = restore(path)
    assert not any(isinstance(leaf, QuantizedArray) for leaf in jax.tree.leaves(plain, is_leaf=_is_quantized))
    again = rebuild(plain, metadata.custom_metadata)
    again["layers"][1] = tuple(again["layers"][1])  # Orbax restores tuples as lists.
    assert_same(again, tree())


def _is_quantized(node):
    return isinstance(node, QuantizedArray)


@pytest.mark.parametrize("mesh", [(4, 2, 2), (8, 2, 4), (1, 1)], ids=str)
def test_orbax_onto_another_mesh(saved, mesh):
    """The target is built from the checkpoint alone."""
    path, metadata = saved
    other = mesh_of(*mesh)
    target = rebuild(metadata.item_metadata.tree, metadata.custom_metadata)
    target = jax.tree.map(
        lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to), target, put(target, other)
    )
    again = restore(path, target)
    for leaf, want in zip(jax.tree.leaves(again), jax.tree.leaves(target), strict=True):
        assert leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim)
    again = rebuild(again, metadata.custom_metadata)
    again["layers"][1] = tuple(again["layers"][1])
    assert_same(again, tree())
    codes = again["layers"][0]["MXFP8_32x32"]
    x = jnp.ones((16, SHAPE[1]))
    assert_bits_equal(linear(x, codes, "MXFP8"), linear(x, tree()["layers"][0]["MXFP8_32x32"], "MXFP8"))


def test_a_manager_keeps_it(tmp_path):
    """A CheckpointManager restores a step, with and without a target of eval_shape."""
    made = {"w": tree()["layers"][0]["NVFP4_16x16"]}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(3, args=ocp.args.StandardSave(made, custom_metadata=describe(made)))
        manager.wait_until_finished()
        kept = manager.item_metadata(3).custom_metadata
        assert_same(rebuild(manager.restore(3, args=ocp.args.StandardRestore()), kept), made)
        target = jax.eval_shape(lambda: made)
        target = jax.tree.map(
            lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to), target, put(target, mesh_of(2))
        )
        assert_same(rebuild(manager.restore(3, args=ocp.args.StandardRestore(target)), kept), made)


def test_what_does_not_fit_is_refused(saved):
    path, metadata = saved
    plain, kept = restore(path), metadata.custom_metadata
    with pytest.raises(
        ValueError, match=r"rebuild: metadata \(\{'mine': 1\}\) has no 'qshard\.tree'; save the result of"
    ):
        rebuild(plain, {"mine": 1})
    with pytest.raises(ValueError, match=r"rebuild: version \(2\) is not 1, which this version of qshard reads"):
        rebuild(plain, {"qshard.tree": '{"version": 2, "nodes": []}'})
    with pytest.raises(ValueError, match=r"rebuild: tree has nothing at layers/0/FP8_128x128 \(layers is absent\)"):
        rebuild({"w": plain["w"]}, kept)
    with pytest.raises(ValueError, match=r"rebuild: layers/0/FP8_128x128 \(data, scale_inv\) was saved as a"):
        rebuild({**plain, "layers": [{key: {"data": 1, "scale_inv": 2} for key in plain["layers"][0]}]}, kept)
    with pytest.raises(ValueError, match=r"rebuild: metadata \('\{.version.: 1, .nodes.: \[\{.at.: \[.layers'\) is"):
        rebuild(plain, {"qshard.tree": kept["qshard.tree"].replace("E4M3", "E9M3").replace("e4m3", "e9m3")})
    # Orbax silently casts codes to the dtype of the target.
    w = {"w": quantize(jnp.ones(SHAPE), formats.FP8_E4M3)}
    other = {"w": quantize(jnp.ones(SHAPE), formats.FP8_E5M2)}
    with pytest.raises(ValueError, match=r"rebuild: w \(format FP8_E5M2\) was saved with format FP8_E4M3; restore it"):
        rebuild(other, describe(w))


def test_flax_serialization_has_all_formats():
    bits = serialization.to_bytes(tree())
    empty = jax.tree.map(jnp.zeros_like, tree())
    assert_same(serialization.from_bytes(empty, bits), tree())
    assert_same(serialization.from_state_dict(empty, serialization.to_state_dict(tree())), tree())


def test_flax_serialization_refuses_another_format():
    w, other = (quantize(jnp.ones(SHAPE), fmt) for fmt in (formats.FP8_E4M3, formats.FP8_E5M2))
    with pytest.raises(ValueError, match=r"target \(format FP8_E5M2\) does not have the format of the state, FP8_E4M3"):
        serialization.from_bytes(other, serialization.to_bytes(w))
    with pytest.raises(ValueError, match=r"state \(w\) is not the state of a QuantizedArray; pass a target like the"):
        serialization.from_bytes(w, serialization.to_bytes({"w": jnp.ones(3)}))


@pytest.mark.parametrize("order", [("flax.serialization", "qshard.jax"), ("qshard.jax", "flax.serialization")])
def test_either_may_be_imported_first(order):
    code = f"import {order[0]}, {order[1]}\n" + (
        "q = qshard.jax.init_delayed('DelayedScaling')\n"
        "print(type(flax.serialization.from_bytes(q, flax.serialization.to_bytes(q))).__name__)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "LinearState\n"


OPTIMIZER = optax.adamw(1e-2)


@jax.jit
def step(run, x):
    def loss(params, states):
        return jnp.mean((linear(x, params["w"], RECIPE, state=states) - x) ** 2)

    value, (gradient, amaxes) = jax.value_and_grad(loss, (0, 1))(run["params"], run["states"])
    updates, state = OPTIMIZER.update(gradient, run["optimizer"], run["params"])
    params = optax.apply_updates(run["params"], updates)
    return {"params": params, "optimizer": state, "states": update_delayed(run["states"], amaxes, RECIPE)}, value


def through_flax(run, folder):
    (folder / "run").write_bytes(serialization.to_bytes(run))
    return serialization.from_bytes(jax.tree.map(jnp.zeros_like, run), (folder / "run").read_bytes())


def through_orbax(run, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", run)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "run", jax.eval_shape(lambda: run))


@pytest.mark.parametrize("through", [through_flax, through_orbax])
def test_a_run_goes_on_with_the_same_bits(through, tmp_path):
    """Weights, optimizer state and delayed scales resume with the same bits."""
    w = jax.random.normal(jax.random.key(0), (64, 64)) / 8
    run = {"params": {"w": w}, "optimizer": OPTIMIZER.init({"w": w}), "states": init_delayed(RECIPE)}
    xs = jax.random.normal(jax.random.key(1), (4, 16, 64)) * jnp.array([1, 3, 2, 1])[:, None, None]
    for x in xs[:2]:
        run, _ = step(run, x)
    again = through(run, tmp_path)
    for x in xs[2:]:
        run, value = step(run, x)
        again, same = step(again, x)
        assert value == same
    assert_same(again, run)
