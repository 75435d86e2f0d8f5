"""Experts in JAX: operands with exact sums, a step of `ragged_dot`, and a loop of `linear` over experts.

Operands have few mantissa bits and one exponent or two, so that products and fp32 sums are exact in any order.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from qshard.jax import linear, ragged_dot

SIZES = np.array([40, 0, 3, 129, 0, 17], np.int32)
E, M, N, K, SEED = len(SIZES), 200, 64, 96, 0x0123456789ABCDEF
ENDS = np.cumsum(SIZES)


def exact(*shape, seed=0):
    """Return signed numbers of {4, 5, 6, 7}, which give every block and expert the same scale."""
    random = np.random.default_rng(seed)
    return (random.choice([-1, 1], shape) * random.integers(4, 8, shape)).astype(np.float32)


X, W, DY = exact(M, K), exact(E, N, K, seed=1), exact(M, N, seed=2)
LEFT = M - ENDS[-1]


def seed_of(expert):
    """Return the seed of an expert as a uint64 in two uint32."""
    return jnp.asarray([SEED & 0xFFFFFFFF, (SEED >> 32) ^ expert], jnp.uint32)


@functools.partial(jax.jit, static_argnames=("recipe", "weight_layout", "weight_spec", "gather_axis"))
def step(x, w, dy, sizes, recipe, state=None, weight_layout="NK", **options):
    """Return y, the gradients of x and w, and the cotangent of the state."""
    options |= {"weight_layout": weight_layout, "seed": SEED}
    call = lambda x, w, state: ragged_dot(x, w, sizes, recipe, state=state, **options)  # noqa: E731
    y, vjp = jax.vjp(call, x, w, state)
    return y, *vjp(dy)


@functools.partial(jax.jit, static_argnames="recipe")
def alone(x, w, dy, seed, recipe, state):
    y, vjp = jax.vjp(lambda x, w, state: linear(x, w, recipe, seed=seed, state=state), x, w, state)
    return y, *vjp(dy)


def looped(x, w, dy, recipe, states=None, sizes=SIZES):
    """Run `linear` for each expert that has rows."""
    ends = np.cumsum(sizes)
    results = [np.zeros((len(x), w.shape[1]), np.float32), np.zeros_like(x), np.zeros_like(w), {}]
    for expert, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        if size:
            own = slice(end - size, end)
            state = None if states is None else jax.tree.map(lambda leaf, e=expert: leaf[e], states)
            made = alone(x[own], w[expert], dy[own], seed_of(expert), recipe, state)
            results[0][own], results[1][own], results[2][expert], results[3][expert] = made
    return results


MESH = {"expert": 2, "fsdp": 2}


def mesh_of(kind=AxisType.Auto, **sizes):
    sizes = sizes or MESH
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)
