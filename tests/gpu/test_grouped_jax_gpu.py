"""`qshard.jax.ragged_dot` on a GPU with grouped products: codes of each expert, and products against fp64."""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from qshard import gemm_dispatch  # noqa: E402
from qshard._core.operands import OperandSpec  # noqa: E402
from qshard.formats import Usage  # noqa: E402
from qshard.jax import CodedWeight, linear, quantize, ragged_dot  # noqa: E402
from qshard.jax._experts.tiles import quantize_tiles, tiles_of  # noqa: E402
from qshard.jax._gemm.target_gpu import gpu_of  # noqa: E402
from qshard.recipes import NAMED, Recipe, Role  # noqa: E402
from support.awkward import assert_bits_equal  # noqa: E402
from support.gemm_bounds import assert_is_product_of_codes, assert_is_product_of_values  # noqa: E402

CODES = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
RECIPES = {"CurrentScaling": NAMED["CurrentScaling"], "E4M3": CODES, "BlockScaling": NAMED["BlockScaling"]}
SIZES = np.array([300, 0, 17, 640, 128, 3], np.int32)
E, K, N = len(SIZES), 512, 256
M = int(SIZES.sum()) + 40
ENDS = np.cumsum(SIZES)


@pytest.fixture(autouse=True)
def _on_a_gpu_with_grouped_products():
    with jax.default_device(jax.devices("cuda")[0]):  # The default of tests is the CPU.
        found = gpu_of(jnp.zeros(1))
        if found is None or not gemm_dispatch.grouped_runs_on("tensors", found):
            pytest.skip(f"grouped products run on Hopper with cuBLASLt 13.5 or newer, and here is {found}")
        yield


def values(dtype=jnp.bfloat16, layout="NK"):
    rng = np.random.default_rng(0)
    shapes = (M, K), (E, N, K) if layout == "NK" else (E, K, N), (M, N)
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes)


@functools.partial(jax.jit, static_argnames=("recipe", "layout"))
def step(x, w, dy, sizes, recipe, layout="NK"):
    y, pull = jax.vjp(lambda x, w: ragged_dot(x, w, sizes, recipe, weight_layout=layout), x, w)
    return (y, *pull(dy))


def experts():
    """The number and the rows of each expert with rows."""
    return [(e, slice(end - size, end)) for e, (size, end) in enumerate(zip(SIZES, ENDS, strict=True)) if size]


def ops_of(compiled):
    return collections.Counter(re.findall(r'custom_call_target="qshard_(\w+)"', compiled.as_text()))


def tensor(x):
    """A torch tensor on the GPU, in the dtype of x."""
    return torch.from_numpy(np.array(x, np.float32)).cuda().to(getattr(torch, jnp.dtype(x.dtype).name))


def numbers(x, fmt, usage):
    """The fp64 values of a plane of codes."""
    return tensor(quantize(x, fmt, usage=Usage.BOTH).dequantize("float32", usage=usage)).double()


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.GRADIENT], ids=lambda role: role.value)
def test_codes_are_those_of_each_expert(name, role):
    fmt, x = RECIPES[name].format(role), values()[0]
    tiles = jax.jit(functools.partial(tiles_of, RECIPES[name], M))(SIZES)
    spec = OperandSpec(fmt, Usage.BOTH, role)
    make = functools.partial(quantize_tiles, operand=spec, axes=(), seeds=None, scales=None)
    q = jax.jit(lambda x, tiles: make(x, tiles=tiles)[0])(x, tiles)
    stops = np.asarray(tiles.stops)
    for expert, own in experts():
        alone, start = quantize(x[own], fmt, usage=Usage.BOTH), 0 if expert == 0 else stops[expert - 1]
        rows = slice(start, start + SIZES[expert])
        assert_bits_equal(np.asarray(q.rowwise.data[rows]), np.asarray(alone.rowwise.data))
        assert_bits_equal(np.asarray(q.columnwise.data[:, rows]), np.asarray(alone.columnwise.data))


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("name", RECIPES)
def test_products_of_codes(name, layout):
    """y, dx and dw are the products of the codes of each expert alone, within the bounds of FP8 tensor cores."""
    recipe, (x, w, dy) = RECIPES[name], values(layout=layout)
    compiled = step.lower(x, w, dy, SIZES, recipe, layout).compile()
    found = ops_of(compiled)
    kind = "gemm_grouped_block" if name == "BlockScaling" else "gemm_grouped"
    assert (found[kind], found[f"{kind}_k"]) == (2, 1)
    y, dx, dw = compiled(x, w, dy, SIZES)
    assert not np.asarray(y[ENDS[-1] :]).any()
    assert not np.asarray(dx[ENDS[-1] :]).any()
    assert not np.asarray(dw[SIZES == 0]).any()
    across = layout == "KN"
    for e, own in experts():
        rows, columns = Usage.ROWWISE, Usage.COLUMNWISE
        forward = numbers(w[e], recipe.weight, columns if across else rows)
        backward = numbers(w[e], recipe.weight, rows if across else columns)
        forward, backward = (forward.T, backward) if across else (forward, backward.T)
        assert_is_product_of_codes(tensor(y[own]), numbers(x[own], recipe.activation, rows), forward, fast=True)
        assert_is_product_of_codes(tensor(dx[own]), numbers(dy[own], recipe.gradient, rows), backward)
        a, b = numbers(dy[own], recipe.gradient, columns), numbers(x[own], recipe.activation, columns)
        made = tensor(dw[e].T if across else dw[e])
        assert_is_product_of_codes(made, a.T, b.T)


@pytest.mark.parametrize("name", RECIPES)
def test_a_loop_over_experts(name):
    """Results are near those of `linear`, which adds the same codes in another order."""
    recipe, (x, w, dy) = RECIPES[name], values()
    got = step(x, w, dy, SIZES, recipe)
    for e, own in experts():
        y, pull = jax.vjp(lambda x, w: linear(x, w, recipe), x[own], w[e])
        for made, want in zip((got[0][own], got[1][own], got[2][e]), (y, *pull(dy[own])), strict=True):
            made, want = (np.asarray(t, np.float32) for t in (made, want))
            np.testing.assert_allclose(made, want, rtol=2**-6, atol=2**-6 * np.abs(want).max())


def test_kept_codes_are_not_cast_again():
    x, w, dy = values()
    codes = jax.jit(jax.vmap(lambda w: quantize(w, CODES.weight, usage=Usage.BOTH)))(w)

    @jax.jit
    def run(x, codes, sink, dy):
        given = functools.partial(ragged_dot, group_sizes=SIZES, recipe=CODES, weight_layout="NK")
        y, pull = jax.vjp(lambda x, w: given(x, CodedWeight(codes, w, None)), x, sink)
        return (y, *pull(dy))

    for made, want in zip(run(x, codes, w, dy), step(x, w, dy, SIZES, CODES), strict=True):
        assert_bits_equal(np.asarray(made), np.asarray(want))
    found = ops_of(run.lower(x, codes, w, dy).compile())
    assert not [op for op in found if op in ("cast_tensor", "cast_transpose", "transpose")]


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_values(dtype, layout):
    x, w, dy = values(dtype, layout)
    compiled = step.lower(x, w, dy, SIZES, None, layout).compile()
    assert sum(count for op, count in ops_of(compiled).items() if op.startswith("gemm_grouped_values")) == 3
    y, dx, dw = compiled(x, w, dy, SIZES)
    assert not np.asarray(y[ENDS[-1] :], np.float32).any()
    assert not np.asarray(dw[SIZES == 0], np.float32).any()
    for e, own in experts():
        weight = tensor(w[e] if layout == "NK" else w[e].T)
        assert_is_product_of_values(tensor(y[own]), tensor(x[own]), weight)
        assert_is_product_of_values(tensor(dx[own]), tensor(dy[own]), weight.T)
        made = tensor(dw[e] if layout == "NK" else dw[e].T)
        assert_is_product_of_values(made, tensor(dy[own]).T, tensor(x[own]).T)


def test_values_under_vmap_and_checkpoint():
    x, w, dy = values()
    want = step(x, w, dy, SIZES, None)
    two = jnp.stack([jnp.asarray(SIZES), jnp.zeros(E, jnp.int32)])
    mapped = jax.jit(jax.vmap(lambda sizes: step(x, w, dy, sizes, None)))(two)
    for made, expected in zip(mapped, want, strict=True):
        assert_bits_equal(np.asarray(made[0]), np.asarray(expected))
        assert not np.asarray(made[1], np.float32).any()
    again = jax.checkpoint(lambda x, w: ragged_dot(x, w, SIZES, None, weight_layout="NK"))
    y, pull = jax.vjp(again, x, w)
    for made, expected in zip((y, *pull(dy)), want, strict=True):
        assert_bits_equal(np.asarray(made), np.asarray(expected))


@pytest.mark.parametrize("recipe", [None, CODES], ids=["values", "E4M3"])
def test_more_rows_than_there_are(recipe):
    x, w, dy = values()
    y, dx, _ = step(x, w, dy, SIZES + np.array([0, 100, 0, 0, 0, 0], np.int32), recipe)
    assert np.isnan(np.asarray(y, np.float32)[0, 0])
    assert np.isnan(np.asarray(dx, np.float32)[0, 0])


def test_changed_sizes_reuse_the_program():
    """Sizes are data: no compilation, and no copy to the host, depends on them."""
    x, w, dy = values()
    moved = [jax.device_put(np.roll(SIZES, i)) for i in range(3)]
    step(x, w, dy, moved[0], CODES)
    before = step._cache_size()
    with jax.transfer_guard("disallow"):
        made = [step(x, w, dy, sizes, CODES)[0] for sizes in moved]
    assert step._cache_size() == before
    for y, sizes in zip(made, moved, strict=True):
        assert_bits_equal(np.asarray(y), np.asarray(step(x, w, dy, jax.device_get(sizes), CODES)[0]))
