"""`linear(local_axes=)` on a mesh partitioned by XLA has the bits of `shard_map` with scales per device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import init_delayed, linear
from qshard.recipes import CurrentScaling, as_recipe
from support.awkward import assert_bits_equal
from support.hlo import collectives

N, K, ROWS = 64, 128, 128
SIZE = 2.0 ** np.arange(8).repeat(ROWS // 8)[:, None]  # Each device has its own amax.


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X, W, DY = (values(ROWS, K) * SIZE).astype(np.float32), values(N, K, seed=1), values(ROWS, N, seed=2)


def step(x, w, dy, state, recipe, **options):
    """Return y, and the gradients of sum(y * dy)."""

    def product(x, w, state):
        return linear(x, w, recipe, gather_axis="fsdp", seed=3, state=state, **options)

    y, vjp = jax.vjp(product, x, w, state)
    return y, *vjp(dy)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "NVFP4"])
def test_bits_are_those_of_shard_map(name, kind):
    recipe, cut = as_recipe(name, "test"), P("fsdp", None)
    state = init_delayed(recipe) if recipe.stateful else None
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(kind,))
    inside = jax.shard_map(
        functools.partial(step, recipe=recipe),
        mesh=jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,)),
        in_specs=(cut, cut, cut, P()),
        out_specs=(cut, cut, cut, P()),
    )
    expected = jax.jit(inside)(X, W, DY, state)
    with jax.set_mesh(mesh):
        arrays = jax.device_put((X, W, DY), NamedSharding(mesh, cut))
        program = jax.jit(functools.partial(step, recipe=recipe, weight_spec=cut, local_axes="fsdp"))
        made = program(*arrays, state)
    for got, want in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        assert_bits_equal(got, np.asarray(want))


def test_beside_another_axis():
    """XLA partitions the mesh axis that is not named: y is that of one device with the same rows."""
    mesh = jax.make_mesh((2, 4), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
        w = jax.device_put(W, NamedSharding(mesh, P("tp", None)))
        y = jax.jit(lambda x, w: linear(x, w, CurrentScaling(), weight_spec=P("tp", None), local_axes="data"))(x, w)
    parts = [jax.jit(lambda x: linear(x, W, CurrentScaling()))(part) for part in np.split(X, 2)]
    # XLA fuses the two programs differently.
    np.testing.assert_allclose(y, np.concatenate(parts), rtol=1e-6, atol=1e-6 * np.abs(y).max())


@pytest.mark.parametrize("local_axes", [None, "fsdp"])
def test_gradients_beside_an_explicit_axis(local_axes):
    """The gradient of w is scattered over the mesh axis that is manual, and is that of each device's rows."""
    mesh, cut = jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2), P("fsdp", None)

    def product(x, w):
        return linear(x, w, CurrentScaling(), gather_axis="fsdp", local_axes=local_axes)

    with jax.set_mesh(mesh):
        x, w, dy = jax.device_put((X, W, DY), NamedSharding(mesh, cut))
        if local_axes is None:
            product = jax.shard_map(product, in_specs=cut, out_specs=cut, axis_names={"fsdp"})
        dw = jax.jit(jax.grad(lambda w, x, dy: (product(x, w) * dy).sum()))(w, x, dy)
    own = jax.jit(jax.grad(lambda w, x, dy: (linear(x, w, CurrentScaling()) * dy).sum()))
    want = sum(np.asarray(own(W, *each)) for each in zip(np.split(X, 2), np.split(DY, 2), strict=True))
    assert dw.sharding.spec == cut
    np.testing.assert_allclose(dw, want, rtol=1e-5, atol=1e-6 * np.abs(want).max())


def test_no_amax_of_x_is_reduced():
    """The amax of w is reduced, since its shards share a scale; that of x is not."""
    mesh, reduced = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,)), {}
    with jax.set_mesh(mesh):
        x, w = jax.device_put((X, W), NamedSharding(mesh, P("fsdp", None)))
        for axes in (None, ("fsdp",)):
            forward = functools.partial(linear, recipe=CurrentScaling(), gather_axis="fsdp", local_axes=axes)
            found = collectives(jax.jit(forward).lower(x, w).compile())
            reduced[axes] = sum(len(arrays) for kind, arrays in found if kind == "all-reduce")
    assert reduced == {None: 2, ("fsdp",): 1}


def test_errors():
    with pytest.raises(ValueError, match=r"local_axes \('data'\) is not an axis of the mesh \(\)"):
        linear(jnp.asarray(X), jnp.asarray(W), CurrentScaling(), local_axes="data")
