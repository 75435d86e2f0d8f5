"""Weight layouts other than `[N, K]`: `[K, N]`, three axes, `einsum`, `DotGeneral`, and rows added by `vmap`.

Each must have the bits of `linear` on the same matrices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qshard import formats
from qshard.jax import DotGeneral, compute_scales, einsum, gathered_weight, init_delayed, linear
from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling, Recipe
from support.awkward import assert_bits_equal
from support.formats import MIXES, RECIPES
from support.hlo import collectives

SEED = 7
KINDS = [CurrentScaling(), DelayedScaling(), BlockScaling(), MXFP8(), NVFP4()]
# 1-D blocks, where [K, N] stores the other plane, and stochastic rounding of a weight.
VECTORS = Recipe(weight=formats.NVFP4.with_options(rounding="stochastic"), activation="NVFP4", gradient="NVFP4")
OTHERS = [recipe for recipe in (*RECIPES.values(), *MIXES.values()) if recipe not in KINDS]
every_kind = pytest.mark.parametrize(
    "recipe", [*KINDS, VECTORS, *(pytest.param(recipe, marks=pytest.mark.slow) for recipe in OTHERS)]
)
kinds = pytest.mark.parametrize("recipe", KINDS, ids=lambda recipe: type(recipe).__name__)


def values(*shape, seed=0, dtype=np.float32):
    """Return small integers: fp32 sums are exact in any order, but FP8 still rounds."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def assert_alike(got, want):
    """Compare two trees bit for bit, in the shapes of `got`."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bits_equal(np.asarray(a), np.asarray(b).reshape(a.shape))


def state_of(recipe):
    return {"state": init_delayed(recipe)} if recipe.stateful else {}


def step(product, x, w, dy, states=None):
    """Return y, dx, dw and the cotangent of the states."""
    y, vjp = jax.vjp(product, x, w, states or {})
    return y, *vjp(dy)


@functools.cache
def expected(recipe, dtype="float32"):
    """Return operands x [2, 32, 64], w [96, 64] and dy, and the step of `linear` on them."""
    x, w, dy = values(2, 32, 64, dtype=dtype), values(96, 64, seed=1), values(2, 32, 96, seed=2, dtype=dtype)

    def program(x, w, dy, states):
        return step(lambda x, w, states: linear(x, w, recipe, seed=SEED, **states), x, w, dy, states)

    return (x, w, dy), jax.jit(program)(x, w, dy, state_of(recipe))


@every_kind
def test_kn_has_the_bits_of_nk(recipe):
    """`[K, N]` has the bits of `[N, K]` in every format, with the same random numbers for weights too."""
    (x, w, dy), want = expected(recipe, "bfloat16")

    def program(x, w, dy, states):
        def product(x, w, states):
            return linear(x, w, recipe, weight_layout="KN", seed=SEED, **states)

        return step(product, x, w, dy, states)

    y, dx, dw, states = jax.jit(program)(x, w.T, dy, state_of(recipe))
    assert_alike((y, dx, states), (*want[:2], want[3]))
    # Its operands are swapped, and so is the order of fp32 sums, which a Hadamard transform makes inexact.
    np.testing.assert_allclose(dw.T, want[2], rtol=1e-5, atol=1e-5)
    if recipe in KINDS[:-1]:
        assert_alike(dw.T, want[2])


def test_kn_takes_codes_and_scales():
    """Scales equal those of `[N, K]`, and the gathered plane is the one that forward reads."""
    x, w = values(64, 128), values(128, 256, seed=1)
    scales = compute_scales(w, "CurrentScaling")
    assert_alike(
        linear(x, w, CurrentScaling(), weight_layout="KN", weight_scales=scales), linear(x, w.T, "CurrentScaling")
    )
    whole = gathered_weight(w, "CurrentScaling", weight_layout="KN")
    assert_alike(linear(x, whole, CurrentScaling(), weight_layout="KN"), linear(x, w.T, "CurrentScaling"))
    vectors = Recipe(weight="FP8_1x128", activation="FP8_1x128", gradient="FP8_1x128")
    assert list(gathered_weight(w, vectors, weight_layout="KN").planes) == [formats.Usage.COLUMNWISE]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda x, w: linear(x, w, "MXFP8", weight_layout="KM"),
            ValueError,
            r"weight_layout \('KM'\) is not a layout; pass 'NK' for w \[N, K\] or",
        ),
        (
            lambda x, w: linear(x, w, "CurrentScaling", weight_layout="KN"),
            ValueError,
            r"linear: w \(256, 128\) does not fit x",
        ),
        (lambda x, w: linear(x, w[None], "CurrentScaling"), ValueError, r"linear: w \(1, 256, 128\) does not have two"),
    ],
)
def test_refusals_of_linear(call, error, text):
    with pytest.raises(error, match=text):
        call(values(64, 128), values(256, 128))


SHAPES = {
    "...k,nk->...n": (96, 64),
    "btk,kn->btn": (64, 96),
    "btd,dhk->bthk": (64, 3, 32),
    "btd,hkd->bthk": (3, 32, 64),
    "...hk,hkd->...d": (2, 32, 96),
    "bthk,dhk->btd": (96, 2, 32),
    "btd,hdk->bthk": (3, 64, 32),
    "btd,dhk->bhtk": (64, 3, 32),
}


@pytest.mark.parametrize(
    ("subscripts", "recipe"),
    [*((each, MXFP8()) for each in SHAPES), ("btd,dhk->bthk", DelayedScaling()), ("btd,hdk->bthk", BlockScaling())],
)
def test_einsum(subscripts, recipe):
    """Products with weights of two and three axes, in any axis order, and their gradients equal `linear`."""
    (x, w, dy), want = expected(recipe)
    terms = subscripts.replace("...", "bt").replace("->", ",").split(",")
    # Maps the operands of `linear` (bt, K and N) to these labels.
    n_labels = [label for label in terms[1] if label in terms[2]]
    k_labels = [label for label in terms[1] if label in terms[0]]
    sizes = dict(zip(terms[1], SHAPES[subscripts], strict=True))

    def arranged(array, labels, term):
        """Unfold the last axis of an array into `labels`, and order its axes as in `term`."""
        array = array.reshape(*array.shape[: -1 if labels else None], *(sizes[label] for label in labels))
        names = [*[label for label in "bt" if label in term], *labels]
        return jnp.transpose(array, [names.index(label) for label in term])

    def weight(w):
        whole = w.reshape(*(sizes[label] for label in n_labels + k_labels))
        return jnp.transpose(whole, [(n_labels + k_labels).index(label) for label in terms[1]])

    def program(x, w, dy, states):
        def product(x, w, states):
            return einsum(subscripts, x, w, recipe, seed=SEED, **states)

        return step(product, arranged(x, k_labels, terms[0]), weight(w), arranged(dy, n_labels, terms[2]), states)

    got = jax.jit(program)(x, w, dy, state_of(recipe))
    y, dx, dw, states = want
    assert_alike(got, (arranged(y, n_labels, terms[2]), arranged(dx, k_labels, terms[0]), weight(dw), states))


def test_dot_general_is_that_of_lax():
    """Axes, shapes and dtypes are those of `lax.dot_general`."""
    unit = formats.FP8_E4M3.with_options(pow2=True)
    dot_general = DotGeneral(CurrentScaling(weight=unit, activation=unit))
    cases = [
        ((2, 3, 16), (16, 4, 8), ((2,), (0,))),
        ((4, 2, 8), (8, 4, 3), ((0, 2), (1, 0))),
        ((16,), (16,), ((0,), (0,))),
    ]
    for x_shape, w_shape, axes in cases:
        x, w = jnp.full(x_shape, 2.0), jnp.full(w_shape, 0.5)  # Exact in FP8.
        dims = (axes, ((), ()))
        for preferred in (None, jnp.bfloat16, jnp.float32):
            want = lax.dot_general(x, w, dims, preferred_element_type=preferred)
            got = dot_general(x, w, dims, preferred_element_type=preferred)
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            np.testing.assert_array_equal(got, want)


def test_a_wider_result_is_rounded_once():
    x, w = values(64, 128, dtype=jnp.bfloat16), values(128, 256)
    got = DotGeneral("CurrentScaling")(x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    assert_alike(got, linear(x.astype(jnp.float32), w.T, "CurrentScaling"))


BATCH = (((2,), (1,)), ((0,), (0,)))
PLAIN = (((2,), (0,)), ((), ()))


@pytest.mark.parametrize(
    ("recipe", "x_shape", "w_shape", "dims", "text"),
    [
        ("CurrentScaling", (2, 32, 64), (2, 64, 32), BATCH, r"has batch axes \(\(0,\), \(0,\)\)"),
        ("CurrentScaling", (2, 32, 64), (64, 32), (((), ()), ((), ())), "has no contracted axis"),
        ("MXFP8", (2, 32, 40), (40, 32), PLAIN, r"x \(2, 32, 40\) is not a whole number of 1x32 blocks"),
        ("MXFP8", (2, 32, 64), (64, 40), PLAIN, r"w \(64, 40\) is not a whole number of 32x32 blocks"),
    ],
)
def test_what_no_recipe_can_make(recipe, x_shape, w_shape, dims, text):
    """Unsupported operands raise, or give the plain product with `otherwise="plain"`."""
    x, w = values(*x_shape, dtype=jnp.bfloat16), values(*w_shape, seed=1)
    with pytest.raises(ValueError, match=text):
        DotGeneral(recipe)(x, w, dims)
    plain = lax.dot_general(x, w.astype(x.dtype), dims, preferred_element_type=x.dtype)
    assert_alike(DotGeneral(recipe, otherwise="plain")(x, w, dims), plain)


def test_plain_is_for_nothing_else():
    x, w = values(2, 32, 64), values(64, 32)
    assert_alike(DotGeneral("MXFP8", otherwise="plain")(x, w, PLAIN), linear(x, w.T, "MXFP8"))
    with pytest.raises(ValueError, match=r"'fsdp'\) is not an axis of the mesh"):
        DotGeneral("MXFP8", otherwise="plain", gather_axis="fsdp")(x, w, PLAIN)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: DotGeneral("MXFP9"), ValueError, r"DotGeneral: recipe \('MXFP9'\) is not a recipe name; did you mean"),
        (lambda: DotGeneral("MXFP8", otherwise="bf16"), ValueError, r"otherwise \('bf16'\) is not 'raise' or 'plain'"),
        (
            lambda: DotGeneral("MXFP8", gather_axes="a"),
            TypeError,
            r"gather_axes is not an option of linear; .*gather_axis",
        ),
        (lambda: DotGeneral("MXFP8", seed=1), TypeError, "DotGeneral: seed changes with every call; pass it to the"),
        (lambda: einsum("btd,dh", 1.0, 1.0, "MXFP8"), ValueError, "not two operands and a result"),
    ],
)
def test_refusals(make, error, text):
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("subscripts", "text"),
    [
        ("bd,dhk->bhk", "do not have a label for each of the 3 axes of x"),
        ("btd,dh->bth", "do not have a label for each of the 3 axes of w"),
        ("btd,dhk->btk", r"einsum: subscripts \('b.*d,dhk->b.*'\) repeat, sum or add an axis; name each axis of x and"),
        ("btd,dhk->bhk", r"einsum: subscripts \('b.*d,dhk->b.*'\) repeat, sum or add an axis; name each axis of x and"),
        ("bbd,dhk->bhk", r"einsum: subscripts \('b.*d,dhk->b.*'\) repeat, sum or add an axis; name each axis of x and"),
        ("btd,dhk->bthkz", r"einsum: subscripts \('b.*d,dhk->b.*'\) repeat, sum or add an axis; name each axis of x"),
        ("btd,dhb->bth", "has batch axes|contract"),
    ],
)
def test_refusals_of_einsum(subscripts, text):
    """`jnp.einsum` accepts sums over an axis of one operand; a product with a weight has none."""
    with pytest.raises(ValueError, match=text):
        einsum(subscripts, values(2, 32, 64), values(64, 4, 16), "CurrentScaling")


def test_precision_that_no_recipe_has():
    x, w = values(2, 32, 64), values(64, 32)
    dot_general = DotGeneral("CurrentScaling")
    assert_alike(dot_general(x, w, PLAIN, precision=lax.Precision.DEFAULT), dot_general(x, w, PLAIN))
    with pytest.raises(ValueError, match=r"precision \(.*HIGHEST"):
        dot_general(x, w, PLAIN, precision=lax.Precision.HIGHEST)


def test_equal_dot_generals_are_one_program():
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def program(dot_general, x, w):
        traced.append(dot_general)
        return dot_general(x, w, PLAIN)

    for _ in range(2):
        program(DotGeneral(MXFP8(), reshard_after_forward=False), values(2, 32, 64), values(64, 32))
    assert len(traced) == 1
    assert DotGeneral("MXFP8") != DotGeneral("MXFP8", otherwise="plain")


@kinds
def test_rows_that_vmap_adds(recipe):
    """Vectors under two `vmap`s have the bits of one matrix, forward and in both gradients."""
    (x, w, dy), _ = expected(recipe)
    states = state_of(recipe)

    def rows(x, w, states):
        row = functools.partial(linear, recipe=recipe, seed=SEED, vmap_as_rows=True)
        return jax.vmap(jax.vmap(lambda x: row(x, w, **states)))(x)

    def matrix(x, w, states):
        return linear(x.reshape(-1, 64), w, recipe, seed=SEED, **states).reshape(dy.shape)

    assert_alike(jax.jit(rows)(x, w, states), jax.jit(matrix)(x, w, states))
    got, want = (jax.jit(functools.partial(step, product))(x, w, dy, states) for product in (rows, matrix))
    assert_alike(got, want)


@pytest.mark.parametrize("recipe", ["CurrentScaling", "MXFP8"])
def test_gradients_of_single_examples(recipe):
    """`vmap(grad(f))` has one gradient of the weight for each example, also in several `vmap`s."""
    x, w = values(2, 4, 64), values(32, 64, seed=1) / 8

    def gradients(product):
        def loss(w, x):
            return jnp.sin(product(x, w)).sum()

        of_examples = jax.vmap(jax.vmap(jax.value_and_grad(loss, (0, 1)), (None, 0)), (None, 0))
        of_pairs = jax.vmap(jax.grad(lambda w, x: jax.vmap(loss, (None, 0))(w, x).sum()), (None, 0))
        return jax.jit(lambda w, x: (*of_examples(w, x)[1], of_pairs(w, x)))(w, x)

    got = gradients(functools.partial(linear, recipe=recipe, vmap_as_rows=True))
    for made, want in zip(got, gradients(lambda x, w: w @ x), strict=True):
        assert made.shape == want.shape
        assert jnp.linalg.norm(made - want) < 0.2 * jnp.linalg.norm(want)


def test_gradients_of_sums_of_single_examples():
    """The gradient of y is the same for all examples, and JAX does not map over it."""
    x, w = values(4, 64), values(32, 64, seed=1)
    each = jax.grad(lambda w, x: linear(x, w, "CurrentScaling", vmap_as_rows=True).sum())
    made = jax.jit(jax.vmap(each, (None, 0)))(w, x)
    np.testing.assert_allclose(made, np.broadcast_to(x[:, None], made.shape), rtol=0.1, atol=0.05)


@pytest.mark.parametrize("of_examples", [False, True], ids=["grad of vmap", "vmap of grad"])
def test_gradients_of_examples_on_an_explicit_mesh(of_examples):
    """The gradient of `x` is sharded like `x`."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))

    def loss(x, w):
        return jnp.sin(linear(x, w, "CurrentScaling", vmap_as_rows=True)).sum()

    with jax.set_mesh(mesh):
        x = jax.device_put(values(32, 64), jax.NamedSharding(mesh, P("data")))
        w = jax.device_put(values(32, 64, seed=1), jax.NamedSharding(mesh, P()))
        each = jax.vmap(jax.grad(loss), (0, None))
        total = jax.grad(lambda x, w: jax.vmap(loss, (0, None))(x, w).sum())
        got = jax.jit(each if of_examples else total)(x, w)
    assert got.sharding.spec == P("data", None)
    assert_alike(got, jax.grad(loss)(np.asarray(x), np.asarray(w)))


def test_vmap_over_weights_too_is_a_product_each():
    x, w = values(3, 32, 64), values(3, 96, 64, seed=1)
    rows = functools.partial(linear, recipe="MXFP8", vmap_as_rows=True)
    got = jax.vmap(lambda x, w: jax.vmap(rows, in_axes=(0, None))(x, w))(x, w)
    assert_alike(got, jnp.stack([linear(x[i], w[i], "MXFP8") for i in range(3)]))


def test_rows_too_few_for_their_blocks_are_refused_if_vmap_adds_none():
    """A mesh that may shard rows adds no padding rows, so too few rows raise unless `vmap` adds more."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    loss = jax.grad(lambda w, x: linear(x, w, "MXFP8", vmap_as_rows=True).sum())
    with jax.set_mesh(mesh):
        w, x = (jax.device_put(a, jax.NamedSharding(mesh, P())) for a in (values(32, 64), values(256, 64)))
        whole = jax.jit(jax.grad(lambda w, x: linear(x, w, "MXFP8").sum()))(w, x)
        many = jax.jit(jax.grad(lambda w, x: jax.vmap(lambda x: linear(x, w, "MXFP8", vmap_as_rows=True))(x).sum()))
        assert_alike(many(w, x), whole)
        with pytest.raises(ValueError, match="is not a whole number of 32x1 blocks"):
            jax.jit(loss)(w, x[0])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
def test_weights_of_three_axes_on_meshes(kind):
    """Attention projections, D sharded by FSDP and heads by tensor parallelism, gather the codes of local heads."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(kind, kind))
    up, down, rows = P("fsdp", "tp", None), P("tp", None, "fsdp"), P("fsdp")
    shapes = (8, 32, 512), (512, 4, 64), (4, 64, 512), (8, 32, 512)
    args = [values(*shape, seed=i) for i, shape in enumerate(shapes)]

    def program(x, up, down, dy, specs):
        own = [{"weight_spec": spec, "gather_axis": "fsdp"} if spec else {} for spec in specs]
        out = rows if any(specs) and kind is AxisType.Explicit else None

        def product(x, up, down):
            h = einsum("btd,dhk->bthk", x, up, MXFP8(), **own[0])
            return einsum("bthk,hkd->btd", h, down, MXFP8(), out_sharding=out, **own[1])

        return step(lambda x, w, _: product(x, *w), x, (up, down), dy)

    want = jax.jit(functools.partial(program, specs=(None, None)))(*args)
    with jax.set_mesh(mesh):
        specs = (rows, up, down, rows)
        cut = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in zip(args, specs, strict=True)]
        compiled = jax.jit(functools.partial(program, specs=(up, down))).lower(*cut).compile()
        got = compiled(*cut)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):  # fp32 sums in another order.
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(jnp.abs(b).max()))
    gathered = {array for each, arrays in collectives(compiled) if each == "all-gather" for array in arrays}
    assert {"u8[512,128]", "u8[128,512]"} <= gathered
    assert all(array.startswith("u8[") for array in gathered), gathered
