"""What the linear layers of both front ends do alike: the seed of each tensor, and rows that are no whole blocks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax
from qshard import formats, recipes, reference, torch_bridge
from qshard.formats import NVFP4, Usage
from qshard.recipes import ROLE_SEEDS, Recipe, Role
from support.awkward import assert_bits_equal
from support.fronts import TorchFront

SEED = 0x0123456789ABCDEF
TORCH = TorchFront("cpu")
UNIT = formats.FP8_E4M3.with_options(pow2=True)  # Holds an identity matrix as it is.
STOCHASTIC = NVFP4.with_options(rounding="stochastic")
RECIPES = {
    "mxfp8": recipes.MXFP8(),
    "nvfp4": recipes.NVFP4(),
    "mix": Recipe(weight=formats.FP8_E4M3, activation=STOCHASTIC, gradient=formats.MXFP8_E4M3),
    "squares": Recipe(weight=formats.NVFP4_16x16, activation=formats.MXFP8_32x32, gradient=formats.FP8_1x128),
    "one plane": Recipe(weight=formats.FP8_E4M3, activation=formats.FP8_E4M3, gradient=formats.MXFP8_E5M2),
}


def exact(*shape, seed=0):
    """Numbers whose largest is 2688: the global scale of NVFP4 is 1, and bfloat16 holds all values of it."""
    x = 400 * np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x.flat[0] = 2688
    return x


def jax_step(x, w, dy, recipe, **options):
    y, vjp = jax.vjp(lambda x, w: qshard.jax.linear(x, w, recipe, seed=SEED, **options), x, w)
    return y, *vjp(dy)


def torch_step(x, w, dy, recipe):
    tx, tw = TORCH.array(x).requires_grad_(), TORCH.array(w).requires_grad_()
    words = torch.tensor([SEED & 0xFFFFFFFF, SEED >> 32]).to(torch.int32)
    y = torch_bridge.linear(tx, tw, None, recipe, seed=words)
    y.backward(TORCH.array(dy))
    return tuple(map(TORCH.numpy, (y, tx.grad, tw.grad)))


STEPS = pytest.mark.parametrize("step", [jax_step, torch_step], ids=["jax", "torch"])


@STEPS
def test_seeds_of_roles(step):
    """Multiplied with an identity, an operand shows what it holds, but for the sign of zeros."""
    x, dy, one = exact(48, 32), exact(48, 32, seed=1), np.eye(32, dtype=np.float32)

    def values(a, fmt, role):
        return reference.quantize(a, fmt, seed=SEED ^ ROLE_SEEDS[role]).dequantize(np.float32)

    y, dx, _ = map(np.asarray, step(x, one, dy, Recipe(weight=UNIT, activation=STOCHASTIC, gradient=STOCHASTIC)))
    np.testing.assert_array_equal(y, values(x, STOCHASTIC, Role.ACTIVATION))
    np.testing.assert_array_equal(dx, values(dy, STOCHASTIC, Role.GRADIENT))
    w, square = exact(48, 32, seed=2), formats.NVFP4_16x16.with_options(rounding="stochastic")
    y, *_ = map(np.asarray, step(one, w, exact(32, 48), Recipe(weight=square, activation=UNIT, gradient=UNIT)))
    np.testing.assert_array_equal(y, values(w, square, Role.WEIGHT).T)


@STEPS
@pytest.mark.parametrize("shape", [(40, 64), (3, 7, 64), (64,)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_rows_of_zeros_make_blocks_whole(recipe, shape, step):
    """Products of the planes that the oracle makes of both tensors with rows of zeros.

    What differs is the order of fp32 sums, and in JAX a rounding of both operands to bfloat16, which holds those of
    MXFP8 as they are.
    """
    x, w, dy = exact(*shape), exact(32, 64, seed=1), exact(*shape[:-1], 32, seed=2)

    def plane(a, role, usage):
        a = a.reshape(-1, a.shape[-1])
        a = np.pad(a, ((0, 0 if role is Role.WEIGHT else -len(a) % 32), (0, 0)))
        q = reference.quantize(a, recipe.format(role), usage, seed=SEED ^ ROLE_SEEDS[role])
        return q.dequantize(np.float32, usage=usage).astype(np.float64)

    rows, columns = Usage
    roundings = 2**-16 if step is torch_step or recipe == recipes.MXFP8() else 2**-8
    for got, (a, b), like in zip(
        step(x, w, dy, recipe),
        [
            (plane(x, Role.ACTIVATION, rows), plane(w, Role.WEIGHT, rows).T),
            (plane(dy, Role.GRADIENT, rows), plane(w, Role.WEIGHT, columns)),
            (plane(dy, Role.GRADIENT, columns).T, plane(x, Role.ACTIVATION, columns)),
        ],
        [dy, x, w],
        strict=True,
    ):
        want, terms = (
            (p @ q)[: np.prod(like.shape[:-1], dtype=int)].reshape(like.shape) for p, q in ((a, b), (abs(a), abs(b)))
        )
        assert got.shape == like.shape
        assert (np.abs(np.asarray(got, np.float64) - want) <= roundings * terms).all()


def test_shards_with_rows_of_zeros_draw_what_the_whole_draws():
    """Eight shards of 5 rows, each made 16 for its own dw, are 40 rows all the same."""
    x, dy, one = exact(40, 32), exact(40, 32, seed=1), np.eye(32, dtype=np.float32)
    recipe = Recipe(weight=UNIT, activation=NVFP4, gradient=STOCHASTIC)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def local(x, dy):
        return jax_step(x, one, dy, recipe, axis_name="data")[:2]

    program = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    for got, want in zip(program(x, dy), jax_step(x, one, dy, recipe), strict=False):
        assert_bits_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize("out", [None, P(None, None, "model")], ids=str)
def test_rows_that_an_explicit_mesh_does_not_cut(out):
    """The type says so: zeros need nothing of other devices, whatever cuts K and N."""
    x, w, dy = exact(3, 7, 64), exact(32, 64, seed=1), exact(3, 7, 32, seed=2)
    want = jax_step(x, w, dy, RECIPES["mxfp8"])
    mesh = jax.make_mesh((2,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(mesh):
        cut = P("model" if out else None, None)
        args = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, P()), (w, cut), (dy, out or P()))]
        got = jax.jit(lambda *args: jax_step(*args, RECIPES["mxfp8"], out_sharding=out))(*args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
