"""Programs of `linear` on Auto meshes: no cast runs twice, no activations are sent, and ops get JAX's knowledge."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import init_delayed, linear
from qshard.recipes import as_recipe
from support.hlo import collectives

ROWS, WIDTH, FFN = (8, 64), 256, 384  # FFN / 4 is not a multiple of 128.


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def mesh_of(*sizes):
    names = ("fsdp", "tp")[: len(sizes)]
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def placed(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8", "BlockScaling"])
def test_one_cast_of_x_for_all_that_read_it(name):
    """Gradients share one cast of x, however JAX splits jitted functions."""
    mesh = mesh_of(4)
    with jax.set_mesh(mesh):
        x, w = (
            placed(mesh, values(256, WIDTH).astype(jnp.bfloat16), "fsdp"),
            placed(mesh, values(WIDTH, WIDTH, seed=1), "fsdp"),
        )

        def loss(x, *ws):
            ys = [linear(x, w, name, weight_spec=P("fsdp"), gather_axis="fsdp") for w in ws]
            return sum(jnp.sum(y * (i + 1.0)) for i, y in enumerate(ys))

        counts = []
        for layers in (1, 3):
            arguments = tuple(range(1 + layers))
            program = jax.jit(jax.grad(loss, argnums=arguments)).lower(x, *[w] * layers).compile()
            calls = [line for line in program.as_text().splitlines() if "custom-call(" in line and "bf16" in line]
            counts.append(sum("transpose(jvp" not in line and "qshard_" in line for line in calls))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "NVFP4"])
def test_tensor_parallel_parts_that_are_no_whole_runs(name):
    """With `weight_spec` as the sharding of x and y, no values are sent."""
    recipe = as_recipe(name, "test")
    given, state = {"seed": 0} if recipe.stochastic else {}, init_delayed(recipe) if recipe.stateful else None

    def loss(x, up, down, state, names=(None, None)):
        own = {"gather_axis": names[0], "state": state, **given}
        specs = [{"weight_spec": P(*axes)} if names[0] else {} for axes in ((names[1], names[0]), names)]
        h = linear(x, up, recipe, **specs[0], **own)
        return jnp.mean(linear(jax.nn.gelu(h), down, recipe, **specs[1], **own) ** 2)

    operands = values(*ROWS, WIDTH), values(FFN, WIDTH, seed=1), values(WIDTH, FFN, seed=2)
    step = jax.value_and_grad(loss, argnums=(0, 1, 2, 3))
    want = jax.jit(step)(*operands, state)
    mesh = mesh_of(2, 4)
    with jax.set_mesh(mesh):
        cuts = [("fsdp",), ("tp", "fsdp"), ("fsdp", "tp")]
        sharded = [placed(mesh, x, *cut) for x, cut in zip(operands, cuts, strict=True)]
        program = jax.jit(functools.partial(step, names=("fsdp", "tp"))).lower(*sharded, state).compile()
        got = program(*sharded, state)
    moved = [a for kind, arrays in collectives(program) if kind not in ("all-reduce", "reduce-scatter") for a in arrays]
    assert moved
    assert all(array.startswith("u8") for array in moved), moved
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        # A sum in another order may round h to another code.
        np.testing.assert_allclose(a, b, rtol=0, atol=0.02 * np.abs(b).max())


def test_ops_are_told_what_is_repeated():
    """A tensor scale is one value, whatever XLA's sharding."""
    mesh = mesh_of(4)
    with jax.set_mesh(mesh):
        x, w = placed(mesh, values(*ROWS, WIDTH), "fsdp"), placed(mesh, values(WIDTH, WIDTH, seed=1), "fsdp")
        for recipe, ops in {
            "CurrentScaling": ["cast_tensor", "cast_transpose"],
            "NVFP4": ["quantize_nvfp4_both", "quantize_nvfp4_stochastic_both"],
        }.items():
            one = functools.partial(linear, recipe=recipe, weight_spec=P("fsdp"), gather_axis="fsdp", seed=0)
            text = jax.jit(jax.grad(lambda x, w, one=one: jnp.sum(one(x, w)), argnums=(0, 1))).lower(x, w).as_text()
            for op in ops:
                calls = [line for line in text.splitlines() if f"@qshard_{op}(" in line]
                assert calls, op
                assert all("shared = true" in call for call in calls), (op, calls)


def test_vmap_says_no_more_of_operands_than_it_knows():
    """Under vmap, each tensor has its own scale, though one value is repeated within it."""
    mesh = mesh_of(4)
    x = values(3, 64, WIDTH) * np.float32([1, 10, 100])[:, None, None]
    w = values(3, WIDTH, WIDTH, seed=1)
    for recipe in ("CurrentScaling", "NVFP4"):
        one = functools.partial(linear, recipe=recipe, seed=0)
        want = [one(a, b) for a, b in zip(x, w, strict=True)]
        with jax.set_mesh(mesh):
            got = jax.jit(jax.vmap(one))(x, w)
        np.testing.assert_array_equal(got, np.stack(want))
