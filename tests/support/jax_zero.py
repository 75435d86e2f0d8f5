"""What tests of ZeRO in JAX train, on one device and in `shard_map`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import adamw, init_delayed, linear, merge_observed, plan_zero, update_delayed
from qshard.recipes import DelayedScaling
from support.awkward import assert_bits_equal
from support.formats import ZEROED as RECIPES

AXIS = "data"
ROWS = 32


def params_of(dtype="float32"):
    keys = iter(jax.random.split(jax.random.key(0), 4))
    return {
        "up": {"w": jax.random.normal(next(keys), (96, 32), dtype) / 8, "b": jnp.zeros(96, dtype)},
        "down": {"w": jax.random.normal(next(keys), (32, 96), dtype) / 8},
        "scale": jnp.ones((), dtype),
    }


def formats_of(recipe):
    fits = recipe.weight.shares_codes and not isinstance(recipe, DelayedScaling)
    return lambda path, p: recipe.weight if fits and "'w'" in path else None


def batch_of(step, device):
    return jax.random.normal(jax.random.fold_in(jax.random.key(1), 100 * step + device), (ROWS, 32))


def loss_of(product, recipe, weights, states, x, seed):
    up, down = ({"state": s} if s is not None else {} for s in states)
    # As a product, whose gradient is one too: a sum XLA may fuse with what it is of, and then round otherwise.
    bias = jnp.ones((ROWS, 1), x.dtype) @ weights["up"]["b"][None]
    h = jax.nn.gelu(product(x, weights["up"]["w"], recipe, seed=(1, *seed), **up) + bias)
    y = product(h, weights["down"]["w"], recipe, seed=(2, *seed), **down)
    return jnp.mean((weights["scale"] * y - 2 * x) ** 2)


def product(x, w, recipe, *, seed, **state):
    seed = functools.reduce(jax.random.fold_in, seed, jax.random.key(2))
    return linear(x, w, recipe, seed=seed, **state)


def states_of(recipe):
    delayed = isinstance(recipe, DelayedScaling)
    return (init_delayed(recipe), init_delayed(recipe)) if delayed else (None, None)


def on_one_device(recipe, world, steps, dtype, **options):
    """Plain `linear`, whole masters, each one row; the batches of all devices one after the other."""
    optimizer = adamw(0.01, weight_decay=0.01, **options)
    params, states = params_of(dtype), states_of(recipe)

    @jax.jit
    def initial(params):
        masters = jax.tree.map(lambda p: p.astype(jnp.float32).reshape((1, -1) if p.ndim > 1 else p.shape), params)
        return masters, optimizer.init(masters)

    masters, state = initial(params)

    @jax.jit
    def gradient(masters, states, x, step, device):
        weights = jax.tree.map(lambda m, p: m.astype(dtype).reshape(p.shape), masters, params)
        loss = functools.partial(loss_of, product, recipe)
        return jax.value_and_grad(lambda w, s: loss(w, s, x, (step, device)), (0, 1))(weights, states)

    @jax.jit
    def update(grads, state, masters):
        total = jax.tree.map(lambda g: g.astype(jnp.float32), grads[0])
        for other in grads[1:]:
            total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, other)
        mean = jax.tree.map(lambda t, m: (t / world).reshape(m.shape), total, masters)
        updates, state = optimizer.update(mean, state, masters)
        return jax.tree.map(jnp.add, masters, updates), state

    losses = []
    for step in range(steps):
        each = [gradient(masters, states, batch_of(step, r), step, r) for r in range(world)]
        masters, state = update([grads for _, (grads, _) in each], state, masters)
        if isinstance(recipe, DelayedScaling):
            seen = [amaxes for _, (_, amaxes) in each]
            states = update_delayed(states, functools.reduce(merge_observed, seen), recipe)
        losses.append([float(loss) for loss, _ in each])
    return losses, jax.tree.map(lambda m, p: m.reshape(p.shape), masters, params)


def step_of(recipe, plan, optimizer):
    def step(masters, state, states, x, number):
        seed = (number, jax.lax.axis_index(AXIS))
        delayed = isinstance(recipe, DelayedScaling)

        def loss(weights, *states_and_x):
            own, x = states_and_x if delayed else (states, *states_and_x)
            return loss_of(product, recipe, weights, own, x, seed)

        value, grads = plan.value_and_grad(loss, masters, x, states=states if delayed else None)
        if delayed:
            grads, amaxes = grads
            states = update_delayed(states, amaxes, recipe, axis_name=AXIS)
        updates, state = optimizer.update(grads, state, masters)
        return jax.tree.map(jnp.add, masters, updates), state, states, value[None]

    return step


def mesh_of(world):
    return jax.make_mesh((world,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:world])


def program(recipe, world, shard_weights, dtype="float32", **options):
    mesh = mesh_of(world)
    params = params_of(dtype)
    plan = plan_zero(params, formats_of(recipe), world, AXIS, shard_weights=shard_weights)
    optimizer = adamw(0.01, weight_decay=0.01, **options)
    masters = jax.jit(plan.shard)(params)
    state = jax.jit(optimizer.init)(masters)
    cut = jax.tree.map(lambda leaf: P(AXIS) if leaf.ndim else P(), state)
    step = jax.shard_map(
        step_of(recipe, plan, optimizer),
        mesh=mesh,
        in_specs=(P(AXIS), cut, P(), P(AXIS), P()),
        out_specs=(P(AXIS), cut, P(), P(AXIS)),
    )
    return plan, jax.jit(step), masters, state


def put(tree, world, spec):
    """Put a tree on the mesh. Else the first step, with arguments on one device, is a program of its own."""
    mesh = mesh_of(world)
    return jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, spec if leaf.ndim else P())), tree)


def assert_same_bits(name, world, steps=3, dtype="float32", **options):
    recipe = RECIPES[name]
    losses, whole = on_one_device(recipe, world, steps, dtype, **options)
    assert losses[0] != losses[-1]
    for shard_weights in (False, True):
        plan, step, masters, state = program(recipe, world, shard_weights, dtype, **options)
        masters, state, states = (
            put(tree, world, spec) for tree, spec in ((masters, P(AXIS)), (state, P(AXIS)), (states_of(recipe), P()))
        )
        for number in range(steps):
            x = jnp.concatenate([batch_of(number, r) for r in range(world)])
            masters, state, states, values = step(masters, state, states, x, number)
            assert values.tolist() == losses[number], (shard_weights, number)
        unsharded = jax.jit(plan.unshard)(masters)
        jax.tree.map(lambda m, w: assert_bits_equal(np.asarray(m), np.asarray(w)), unsharded, whole)
