"""ZeRO in `shard_map`: both stages have the bits of one device that runs all batches."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qshard import formats
from qshard.jax import linear, plan_zero
from support import hlo
from support.jax_zero import AXIS, RECIPES, assert_same_bits, batch_of, params_of, program, states_of


@pytest.mark.parametrize(
    ("name", "world"), [(name, 1 + i % 3) for i, name in enumerate(RECIPES) if name not in ("MXFP4", "MXFP6")]
)
def test_bits_of_one_device(name, world):
    """Losses and masters agree unsharded, with sharded states, and fully sharded."""
    assert_same_bits(name, world)


def test_bits_of_one_device_in_few_bits():
    """Blocks of low-precision weights and states are those of the whole, however they are sharded."""
    assert_same_bits("NVFP4", 3, dtype="bfloat16", mu_dtype="float8_e4m3fn", nu_dtype="float8_e5m2")


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("name", RECIPES)
def test_bits_of_one_device_for_all(name, world):
    assert_same_bits(name, world)


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_bits_over_many_steps(name):
    assert_same_bits(name, 2, steps=500 if name == "NVFP4" else 100)


def test_a_weight_that_is_used_twice():
    """Its gradient is a sum of two scaled products, which optimizing compilers must not fuse on one device alone."""
    w, x = (jax.random.normal(jax.random.key(i), (128, 128)) / 11 for i in range(2))

    def loss(params, x):
        return jnp.mean(
            linear(jax.nn.gelu(linear(x, params["w"], "CurrentScaling")), params["w"], "CurrentScaling") ** 2
        )

    def gradient(world):
        mesh = jax.make_mesh((world,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:world])
        plan = plan_zero({"w": w}, lambda path, p: "FP8_E4M3", world, AXIS)
        specs = {"in_specs": (P(AXIS), P()), "out_specs": P(AXIS)}
        of_devices = jax.shard_map(lambda m, x: plan.value_and_grad(loss, m, x)[1], mesh=mesh, **specs)
        optimized = jax.jit(of_devices, compiler_options={"xla_backend_optimization_level": 3})
        return plan.unshard(optimized(plan.shard({"w": w}), x))["w"]

    np.testing.assert_array_equal(gradient(2), gradient(1))


@pytest.mark.parametrize("shard_weights", [False, True])
def test_collectives(shard_weights):
    """One all-reduce of amaxes for all weights; codes are gathered once a step, or in forward and backward."""
    recipe = RECIPES["BlockScaling"]
    plan, step, masters, state = program(recipe, 2, shard_weights)
    x = jnp.concatenate([batch_of(0, r) for r in range(2)])
    lowered = step.lower(masters, state, states_of(recipe), x, 0)
    # As traced: XLA for CPUs drops the barrier between the two gathers of a weight, and merges them. XLA for GPUs drops
    # the backward gather of the first layer too, whose x has no gradient (test_jax_h100.py).
    assert lowered.as_text().count('"stablehlo.all_gather"') == (1 + 2 + 2 if shard_weights else 1)
    found = hlo.collectives(lowered.compile())
    assert [c for c in found if c[0] == "all-reduce"] == [("all-reduce", (f"s32[{plan.master.amaxes}]",))]
    gathers = [arrays for kind, arrays in found if kind == "all-gather"]
    assert all(array.startswith("u8[") for arrays in gathers for array in arrays), gathers


def test_slices_of_large_weights():
    """Slices begin past 2**31 in weights such as stacks of experts."""
    params = {"w": jax.ShapeDtypeStruct((2**20, 2**13), jnp.float32)}
    (leaf,) = plan_zero(params, lambda path, w: "FP8_E4M3", 4, AXIS).leaves
    mesh = jax.make_mesh((4,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    words = jax.jit(jax.shard_map(lambda: leaf.start[None], mesh=mesh, in_specs=(), out_specs=P(AXIS)))()
    assert [int(low) + (int(high) << 32) for low, high in words] == [device * leaf.length for device in range(4)]


def test_a_plan_for_another_number_of_devices():
    plan = plan_zero({"w": jnp.ones((128, 128))}, lambda path, w: "FP8_E4M3", 4, AXIS)
    mesh = jax.make_mesh((2,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    step = functools.partial(
        plan.value_and_grad, lambda weights: linear(jnp.ones((2, 128)), weights["w"], "MXFP8").sum()
    )
    with pytest.raises(ValueError, match=rf"plan_zero: world \(4\) is not the size of the mesh axis '{AXIS}' \(2\)"):
        jax.shard_map(step, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS))(plan.shard({"w": jnp.ones((128, 128))}))


@pytest.mark.parametrize("shard_weights", [False, True])
def test_parameters_without_elements(shard_weights):
    params = {"w": jnp.ones((32, 32)), "none": jnp.zeros((0, 32)), "bias": jnp.zeros(0)}
    recipe, world = RECIPES["NVFP4"], 2
    fmt = lambda path, p: recipe.weight if p.ndim == 2 else None  # noqa: E731
    plan = plan_zero(params, fmt, world, AXIS, shard_weights=shard_weights)
    mesh = jax.make_mesh((world,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:world])

    def gradient(masters, x):
        def loss(weights):
            seeds = [jax.random.key(i) for i in range(2)]
            pairs = zip(("w", "none"), seeds, strict=True)
            y = [linear(x, weights[name], recipe, seed=seed) for name, seed in pairs]
            return sum(map(jnp.sum, y)) + jnp.sum(y[1] + weights["bias"])

        return plan.value_and_grad(loss, masters)[1]

    made = jax.jit(jax.shard_map(gradient, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)))
    grads = plan.unshard(made(plan.shard(params), jnp.ones((64, 32))))
    assert {name: g.shape for name, g in grads.items()} == {name: p.shape for name, p in params.items()}
    assert jnp.all(grads["w"] == grads["w"][0, 0])
    assert grads["w"][0, 0] != 0


def test_bad_input():
    params = params_of()
    with pytest.raises(
        ValueError, match=r"plan_zero: \['down'\]\['w'\] cannot be gathered as codes of MXFP8_E4M3: its rowwise and"
    ):
        plan_zero(params, lambda path, p: formats.MXFP8_E4M3 if "w" in path else None, 2, AXIS)
    plan, _, masters, _ = program(RECIPES["MXFP8"], 1, False)
    mesh = jax.make_mesh((1,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def other(masters):
        loss = lambda w: jnp.sum(linear(jnp.ones((32, 32)), w["up"]["w"], RECIPES["CurrentScaling"]))  # noqa: E731
        return plan.value_and_grad(loss, masters)[1]

    with pytest.raises(ValueError, match=r"linear: w \(MXFP8_32x32\[nonfinite=nan\]\) is not in the weight"):
        jax.eval_shape(jax.shard_map(other, mesh=mesh, in_specs=P(AXIS), out_specs=P(AXIS)), masters)
