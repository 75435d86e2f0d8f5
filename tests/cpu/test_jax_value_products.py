"""Bytes that `linear` moves on Auto meshes where x is sharded along K: codes are gathered, in place of values.

The bound is the same model without quantization, compiled beside it.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import recipes
from qshard.jax import init_delayed, linear
from qshard.jax._ops.custom_partitioning import spec_on
from support.hlo import traffic

M, K, N = 512, 512, 512
BLOCKS = [name for name, recipe in recipes.NAMED.items() if recipe.weight.block]
TENSORS = ["CurrentScaling", pytest.param("DelayedScaling", marks=pytest.mark.slow)]
X_SPECS = [P(None, "tp"), P("fsdp", "tp")]
W_SPECS = [P(), P("fsdp"), P("tp"), P(None, "tp"), P("fsdp", "tp"), P("tp", "fsdp")]
GATHERS = ("all-gather", "all-to-all", "collective-permute")


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mesh_of():
    return jax.make_mesh((2, 4), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def layer_of(name):
    if name is None:
        return lambda x, w, state: jnp.einsum("mk,nk->mn", x, w)
    recipe = getattr(recipes, name)()
    given = {"seed": 0} if recipe.stochastic else {}
    return lambda x, w, state: linear(x, w, recipe, state=state, **given)


def step(name, x, w):
    """y, and the gradients of x and w. The state of delayed scaling is differentiated too, for its amaxes."""
    state = init_delayed(recipes.DelayedScaling()) if name == "DelayedScaling" else None
    y, pull = jax.vjp(layer_of(name), x, w, state)
    return (y, *pull(jnp.sin(y))[:2])


@functools.cache
def compiled_step(name, x_spec, w_spec):
    mesh = mesh_of()
    shardings = NamedSharding(mesh, x_spec), NamedSharding(mesh, w_spec)

    def program(x, w):
        y, *gradients = step(name, x, w)
        return y, *map(jax.lax.with_sharding_constraint, gradients, shardings)

    args = [
        jax.device_put(a, sharding) for a, sharding in zip((values(M, K), values(N, K, seed=1)), shardings, strict=True)
    ]
    with jax.set_mesh(mesh):
        compiled = jax.jit(program).lower(*args).compile()
    return compiled, args


def gathered(name, x_spec, w_spec):
    """Return gathers of at least 64 bytes, so without amaxes of tensors."""
    moved = [each for each in traffic(compiled_step(name, x_spec, w_spec)[0]) if each.kind in GATHERS]
    return [each for each in moved if each.bytes >= 64]


@pytest.mark.each_value
@pytest.mark.parametrize("w_spec", W_SPECS, ids=str)
@pytest.mark.parametrize("x_spec", X_SPECS, ids=str)
@pytest.mark.parametrize(
    "name", [name if name == "MXFP8" else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]
)
def test_blocks_gather_codes(name, x_spec, w_spec):
    moved, plain = gathered(name, x_spec, w_spec), gathered(None, x_spec, w_spec)
    assert sum(each.bytes for each in moved) <= sum(each.bytes for each in plain)
    of_x = f"f32[{M},{K}]", f"f32[{M // 2},{K}]", f"f32[{K},{M}]", f"f32[{K},{M // 2}]"
    assert not [each for each in moved if set(each.arrays) & set(of_x)]


@pytest.mark.parametrize("w_spec", W_SPECS[1:], ids=str)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_gather_no_more_than_the_plain_model(name, w_spec):
    """XLA multiplies codes with one scale itself.

    It slices the codes of a replicated w and gathers its gradient, as it does for a w that is cast.
    """
    for x_spec in X_SPECS:
        moved, plain = gathered(name, x_spec, w_spec), gathered(None, x_spec, w_spec)
        assert sum(each.bytes for each in moved) <= sum(each.bytes for each in plain)


@pytest.mark.parametrize("w_spec", W_SPECS, ids=str)
def test_results_are_those_of_one_device(w_spec):
    compiled, args = compiled_step("MXFP8", X_SPECS[1], w_spec)
    want = jax.jit(functools.partial(step, "MXFP8"))(values(M, K), values(N, K, seed=1))
    for got, expected in zip(compiled(*args), want, strict=True):
        # Sums in another order, after which sin(y) may round to another code.
        difference = np.linalg.norm(np.asarray(got) - np.asarray(expected))
        assert difference < 2.0**-10 * np.linalg.norm(expected)


def test_fsdp_alone_is_left_to_xla():
    """No operand is gathered here, so the persistent cache can hold these programs."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    args = [jax.device_put(a, NamedSharding(mesh, P("fsdp"))) for a in (values(M, K), values(N, K, seed=1))]
    with jax.set_mesh(mesh):
        for options, is_left in (({"gather_axis": "fsdp", "weight_spec": P("fsdp")}, True), ({}, False)):
            text = jax.jit(functools.partial(linear, recipe="MXFP8", **options)).lower(*args).as_text()
            assert ("CustomSPMDPartitioning" not in text) == is_left


def test_spec_on():
    """A part of a mesh axis, or uneven shards, count as unsharded."""
    mesh = mesh_of()
    parts = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(AxisType.Auto,) * 3)
    for on, spec, want in (
        (mesh, P(("tp", "fsdp"), None), P(("tp", "fsdp"))),
        (mesh, P("fsdp", "tp"), P("fsdp", "tp")),
        (parts, P("a", ("b", "c")), P("fsdp", "tp")),
        (parts, P("b"), P()),
    ):
        array = jax.ShapeDtypeStruct((16, 16), jnp.float32, sharding=NamedSharding(on, spec))
        assert [entry for entry in spec_on(mesh, array) if entry] == list(want)
    uneven = jax.ShapeDtypeStruct((6,), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
    assert spec_on(mesh, uneven) == P()
