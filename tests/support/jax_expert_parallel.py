"""Expert parallelism in JAX: tokens of all devices, and a step of `grouped_mlp`. For CPUs and GPUs."""

import jax
import numpy as np
from jax.sharding import AxisType

import qshard.jax as qj
from qshard.recipes import Recipe
from support.formats import RECIPES

R, T, K, E, H, WIDE, SEED = 4, 24, 2, 8, 64, 64, 0x0123456789ABCDEF
ALL = RECIPES | {"E4M3": Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3"), "none": None}
ERROR = 2e-6
"""Part of the norm. Products have fp32 sums in another order, because XLA splits them by the number of rows."""


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def experts(width, hidden):
    return normal(E, 2 * hidden, width, seed=2) / width**0.5, normal(E, width, hidden, seed=3) / hidden**0.5


W13, W2 = experts(H, WIDE)


def tokens(load, devices=R, width=H):
    """Return x, weights of experts, the gradient of y and indices, of all devices.

    "uneven": devices use different numbers of rows, and expert 3 has none. "empty": only the experts of device 0 have
    tokens, and device 1 has no tokens of its own. "spread": every device receives as many rows as it sends.
    """
    random = np.random.default_rng(5)
    x, dy = (normal(devices * T, width, seed=seed) for seed in (6, 7))
    x *= np.repeat(1 + 3 * np.arange(devices), T)[:, None]
    indices = random.integers(0, 2 if load == "empty" else E, (devices, T, K)).astype(np.int32)
    if load == "uneven":
        for device in range(devices):
            indices[device, T - 5 * device :] = -1
        indices[indices == 3] = -1
    elif load == "empty":
        indices[1] = -1
    else:
        indices = np.broadcast_to((np.arange(T * K) % E).reshape(T, K), indices.shape).astype(np.int32)
    return x, random.random((devices * T, K), np.float32), dy, indices.reshape(-1, K)


def states_of(name):
    return tuple(qj.init_delayed(ALL[name], (E,)) for _ in range(2)) if name == "DelayedScaling" else None


def step(x, weights, dy, indices, w13, w2, states, *, name, **options):
    """Return y, the gradients of x, weights, w13 and w2, and the cotangents of states."""

    def call(x, weights, w13, w2, states):
        given = {"seeds": (SEED, SEED + 1), "states": states, **options}
        return qj.grouped_mlp(x, indices, weights, w13, w2, ALL[name], **given)

    y, vjp = jax.vjp(call, x, weights, w13, w2, states)
    return y, *vjp(dy)


def mesh_of(platform=None, **sizes):
    devices = jax.devices(platform)[: int(np.prod([*sizes.values()]))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def assert_close(found, expected, error=ERROR):
    for what, a, b in zip(("y", "dx", "dweights", "dw13", "dw2"), found, expected, strict=False):
        a, b = np.asarray(a), np.asarray(b)
        assert a.shape == b.shape, what
        assert np.linalg.norm(a - b) <= error * np.linalg.norm(b), (what, np.linalg.norm(a - b) / np.linalg.norm(b))
