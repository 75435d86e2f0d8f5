"""`linear` in both front ends: its three products, the seed of each operand, and its errors.

Operands have the reference's bits (test_quantize.py), so results may differ only in the sums: fp32 in any order, with
the roundings that `support/fronts.py` gives for each front end.
"""

import math

import numpy as np
import pytest

from qshard import formats, recipes, reference
from qshard.formats import Usage
from qshard.recipes import ROLE_SEEDS, Recipe, Role
from support.awkward import BFLOAT16, fits
from support.formats import NAMED, RECIPES, STATELESS, every_recipe, every_stateless_recipe, stochastic
from support.fronts import some
from support.products import DTYPES, assert_is_product, operands

pytestmark = pytest.mark.usefixtures("optimized")
SEED = 0x0123456789ABCDEF
UNIT = formats.FP8_E4M3.with_options(pow2=True)  # Represents an identity matrix exactly.
# One row, one axis, no rows, partial blocks of rows, whole blocks. `shapes_of` drops K and N that a format rejects.
SHAPES = [(1, 1), (5, 16), (2, 3, 7), (64,), (0, 64), (40, 64), (3, 7, 32), (2, 64, 128)]
# Of x, w and dy. JAX compiles each recipe once for them.
FITTED = ((256, 64), (64, 64), (256, 64))
ROWS, COLUMNS = Usage.ROWWISE, Usage.COLUMNWISE


def shapes_of(recipe):
    """Return (shape of x, N) pairs that the recipe supports: only rows are padded with zeros."""
    return [
        (shape, n)
        for shape in SHAPES
        for n in (37, 96)
        if fits(recipe.weight, (n, shape[-1]), Usage.BOTH)
        and fits(recipe.activation, (32, shape[-1]), Usage.BOTH)
        and fits(recipe.gradient, (32, n), Usage.BOTH)
    ]


def plane(x, recipe, role, usage):
    """Return the exact values of a plane of a tensor in `role`; activations and gradients include padded rows."""
    x = x.reshape(-1, x.shape[-1])
    x = np.pad(x, ((0, 0 if role is Role.WEIGHT else -len(x) % 32), (0, 0)))
    q = reference.quantize(x, recipe.format(role), usage, seed=SEED ^ ROLE_SEEDS[role])
    return q.dequantize(np.float32, usage=usage).astype(np.float64)


def assert_products(front, got, x, w, dy, recipe):
    """Check that y, dx and dw are products of the reference's planes, in the dtypes of x, x and w."""
    y, dx, dw = got
    assert [a.dtype for a in got] == [x.dtype, x.dtype, w.dtype]
    assert [a.shape for a in got] == [dy.shape, x.shape, w.shape]
    count = math.prod(x.shape[:-1])
    rounding = {"roundings": front.result_roundings, "operand_rounding": front.operand_rounding(recipe)}
    values = {(r, u): plane(a, recipe, r, u) for a, r in zip((w, x, dy), Role, strict=True) for u in (ROWS, COLUMNS)}
    weight, activation, gradient = Role
    assert_is_product(y, values[activation, ROWS][:count], values[weight, ROWS], **rounding)
    assert_is_product(dx, values[gradient, ROWS][:count], values[weight, COLUMNS].T, **rounding)
    assert_is_product(dw, values[gradient, COLUMNS].T, values[activation, COLUMNS].T, **rounding)


@pytest.mark.each_value
@every_stateless_recipe
def test_three_products(front, recipe):
    """Each operand is quantized in blocks along the contracted axis."""
    cases = [(*case, dtype) for case in shapes_of(recipe) for dtype in DTYPES]
    assert cases
    for shape, n, dtype in some(front, cases, str(recipe)):
        x, w, dy = operands(shape, n, dtype)
        assert_products(front, front.linear(x, w, dy, recipe, seed=SEED), x, w, dy, recipe)


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BFLOAT16, np.float32), (np.float32, np.float16)], ids=str)
def test_dtypes_may_differ(front, x_dtype, w_dtype):
    """y and dx have the dtype of x, dw that of w."""
    recipe = RECIPES["CurrentScaling"]
    x, w, dy = (
        a.astype(dtype) for a, dtype in zip(operands(dtype=np.float16), (x_dtype, w_dtype, x_dtype), strict=True)
    )
    assert_products(front, front.linear(x, w, dy, recipe), x, w, dy, recipe)


def test_seeds_of_roles(front):
    """A product with an identity matrix returns an operand's values, except for the sign of zeros."""

    def exact(seed):
        """Return values with amax 2688: NVFP4's global scale is then 1, and its values are exact in bfloat16."""
        x = 400 * np.random.default_rng(seed).standard_normal((48, 32)).astype(np.float32)
        x.flat[0] = 2688
        return x

    def shown(x, fmt, role):
        return reference.quantize(x, fmt, seed=SEED ^ ROLE_SEEDS[role]).dequantize(np.float32)

    one = np.eye(32, dtype=np.float32)
    for fmt in (fmt.with_options(rounding="stochastic") for fmt in NAMED if fmt.scaling.global_scale):
        x, dy = exact(0), exact(1)
        recipe = Recipe(weight=UNIT, activation=fmt, gradient=fmt)
        y, dx, _ = front.linear(x, one, dy, recipe, seed=SEED)
        np.testing.assert_array_equal(y, shown(x, fmt, Role.ACTIVATION))
        np.testing.assert_array_equal(dx, shown(dy, fmt, Role.GRADIENT))
        recipe = Recipe(weight=fmt, activation=UNIT, gradient=UNIT)
        y, *_ = front.linear(one, x, exact(2).T.copy(), recipe, seed=SEED)
        np.testing.assert_array_equal(y, shown(x, fmt, Role.WEIGHT).T)


@pytest.mark.each_value
@pytest.mark.parametrize("name", sorted(set(RECIPES) & set(STATELESS)))
def test_products_are_near_those_without_quantization(front, name):
    """Rotations cancel, and stochastic rounding is unbiased.

    The cosine between normal values and their quantized values is 0.9993 in FP8 and 0.99 in FP4. A product of two
    quantized operands has the product of both cosines, less the noise of 256 rows.
    """
    recipe, rng = RECIPES[name], np.random.default_rng(0)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in FITTED)
    least = 0.97 if min(recipe.format(role).element.bits for role in Role) == 4 else 0.998
    for got, want in zip(front.linear(x, w, dy, recipe, seed=SEED), (x @ w.T, dy @ w, dy.T @ x), strict=True):
        assert (got * want).sum() > least * np.linalg.norm(got) * np.linalg.norm(want)


@pytest.mark.each_value
@every_recipe
def test_a_linear_map_is_fitted(front, recipe):
    """Gradient descent reaches 1% of the first loss in 12 steps; stateful recipes update their scales meanwhile."""
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(FITTED[0]).astype(np.float32), np.zeros(FITTED[1], np.float32)
    target = x @ rng.standard_normal((64, 64)).astype(np.float32).T / 8
    states = {role: (1, np.zeros(recipe.state_shapes["amax_history"])) for role in Role} if recipe.state_shapes else {}
    losses = []
    for seed in range(12):

        def run(dy, w=w, states=states, seed=seed):
            if not states:
                return front.linear(x, w, dy, recipe, seed=seed), states
            (products,), _, after = front.delayed_step([(x, w, dy)], recipe, states)
            return products, after

        error = run(np.zeros_like(target))[0][0] - target
        (_, _, dw), states = run(error * np.float32(2 / error.size))
        w = w - 8 * dw
        losses.append(np.mean(error**2))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("recipe", [r for r in RECIPES.values() if stochastic(r)], ids=lambda r: type(r).__name__)
def test_another_seed_draws_other_gradients_and_leaves_the_product_alone(front, recipe):
    x, w, dy = operands((32, 64), 64)
    (y, *first), (again, *same), (other_y, *others) = (front.linear(x, w, dy, recipe, seed=s) for s in (3, 3, 1 << 40))
    np.testing.assert_array_equal([y, y], [again, other_y])
    for a, b, c in zip(first, same, others, strict=True):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


def test_what_is_contracted_must_be_whole_blocks(front):
    x, w, dy = (np.ones(shape, np.float32) for shape in ((64, 48), (32, 48), (64, 32)))
    with pytest.raises(ValueError, match=r"x \(\d+, 48\) is not a whole number of \d+x32 blocks .*; pad the columns"):
        front.linear(x, w, dy, recipes.MXFP8())
