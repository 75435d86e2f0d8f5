"""flax layers as users write them: linen and nnx with a `DotGeneral`, and `convert`, have the bits of `linear`."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import DotGeneral, adamw, convert, einsum, init_delayed, linear, update_delayed
from qshard.recipes import MXFP8, NVFP4, BlockScaling, CurrentScaling, DelayedScaling
from support.awkward import assert_bits_equal
from support.hlo import collectives

nn, nnx = pytest.importorskip("flax.linen"), pytest.importorskip("flax.nnx")
from qshard.jax import linen  # noqa: E402
from qshard.jax import nnx as qnnx  # noqa: E402

STATELESS = [CurrentScaling(), BlockScaling(), MXFP8()]
recipes = pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: type(recipe).__name__)


def values(*shape, seed=0, dtype=np.float32):
    """Return small integers: fp32 sums are exact in any order, but FP8 still rounds."""
    return jnp.asarray(np.random.default_rng(seed).integers(-3, 4, shape), dtype)


def integers(_, shape, dtype=np.float32, *__, **___):
    """Initialize a kernel, with the same values for all keys."""
    return values(*shape, dtype=dtype)


X, DY = values(2, 32, 64), values(2, 32, 96, seed=1)


def assert_alike(got, want):
    """Compare two trees bit for bit, in the shapes of `got`."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_bits_equal(np.asarray(a), np.asarray(b).reshape(a.shape))


def step(function, x, w, dy):
    y, vjp = jax.vjp(function, x, w)
    return y, *vjp(dy)


def expected(x, kernel, dy, recipe, contracted=1, **options):
    """Return y, dx and the gradient of a kernel `[*K, *N]`, computed by `linear` on the matrices."""
    k = int(np.prod(kernel.shape[:contracted]))
    matrices = x.reshape(*x.shape[: x.ndim - contracted], k), kernel.reshape(k, -1).T
    product = functools.partial(linear, recipe=recipe, **options)
    dy = dy.reshape(*matrices[0].shape[:-1], -1)
    y, dx, dw = jax.jit(functools.partial(step, product))(*matrices, dy)
    return y, dx, dw.T


def without_bias(layer, params):
    return lambda x, kernel: layer.apply({"params": params | {"kernel": kernel}}, x)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("recipe", "how"),
    [
        pytest.param(
            recipe, how, id=f"{type(recipe).__name__}-{how}", marks=[] if i == j or not i else pytest.mark.slow
        )
        for i, recipe in enumerate(STATELESS)
        for j, how in enumerate(("dot_general", "dot_general_cls", "module"))
    ],
)
def test_linen_layers(recipe, how):
    given = {
        "dot_general": {"dot_general": DotGeneral(recipe)},
        "dot_general_cls": {"dot_general_cls": functools.partial(DotGeneral, recipe)},
        "module": {"dot_general_cls": functools.partial(linen.DotGeneral, recipe)},
    }[how]
    for layer, x, dy, contracted in [
        (nn.Dense(96, use_bias=False, kernel_init=integers, **given), X, DY, 1),
        (nn.DenseGeneral((3, 32), use_bias=False, kernel_init=integers, **given), X, DY.reshape(2, 32, 3, 32), 1),
        (
            nn.DenseGeneral(96, axis=(-2, -1), use_bias=False, kernel_init=integers, **given),
            X.reshape(2, 32, 2, 32),
            DY,
            2,
        ),
    ]:
        kernel = jax.jit(layer.init)(jax.random.key(0), x)["params"]["kernel"]
        made = jax.jit(functools.partial(step, without_bias(layer, {})))(x, kernel, dy)
        assert_alike(made, expected(x, kernel, dy, recipe, contracted))


@recipes
def test_linen_attention(recipe):
    """Projections with three axes have the bits of `einsum`. Scores are not quantized: they take no dot_general."""
    given = DotGeneral(recipe)
    layer = nn.MultiHeadDotProductAttention(num_heads=4, qkv_dot_general=given, out_dot_general=given, use_bias=False)
    params = jax.jit(layer.init)(jax.random.key(0), X)["params"]

    def by_hand(x, params):
        kernels = (params[name]["kernel"] for name in ("query", "key", "value"))
        heads = (einsum("btd,dhk->bthk", x, kernel, recipe) for kernel in kernels)
        return einsum("bthk,hkd->btd", nn.dot_product_attention(*heads), params["out"]["kernel"], recipe)

    made = jax.jit(functools.partial(step, lambda x, params: layer.apply({"params": params}, x)))(X, params, X)
    want = jax.jit(functools.partial(step, by_hand))(X, params, X)
    assert_alike(made[:1], want[:1])
    for got, like in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        # XLA fuses the softmax differently in the two programs.
        np.testing.assert_allclose(got, like, rtol=1e-4, atol=1e-4)


def test_scores_of_attention_are_refused():
    einsum_of = functools.partial(jnp.einsum, _dot_general=DotGeneral("CurrentScaling"))
    layer = nn.MultiHeadDotProductAttention(
        4, qk_attn_weights_einsum_cls=lambda: einsum_of, attn_weights_value_einsum_cls=lambda: einsum_of
    )
    with pytest.raises(ValueError, match=r"has batch axes \(\(0, 2\), \(0, 2\)\), so w is not one weight matrix"):
        layer.init(jax.random.key(0), X)


@recipes
def test_nnx_layers(recipe):
    given, rngs = DotGeneral(recipe), nnx.Rngs(0)
    for layer, x, dy, contracted in [
        (nnx.Linear(64, 96, use_bias=False, dot_general=given, kernel_init=integers, rngs=rngs), X, DY, 1),
        (
            nnx.LinearGeneral(64, (3, 32), use_bias=False, dot_general=given, kernel_init=integers, rngs=rngs),
            X,
            DY.reshape(2, 32, 3, 32),
            1,
        ),
        (
            nnx.LinearGeneral(
                (2, 32), 96, axis=(-2, -1), use_bias=False, dot_general=given, kernel_init=integers, rngs=rngs
            ),
            X.reshape(2, 32, 2, 32),
            DY,
            2,
        ),
        (
            nnx.Einsum("btd,dhk->bthk", (64, 3, 32), einsum_op=given.einsum, kernel_init=integers, rngs=rngs),
            X,
            DY.reshape(2, 32, 3, 32),
            1,
        ),
    ]:
        assert_alike(step_of(layer, x, dy), expected(x, layer.kernel[...], dy, recipe, contracted))


def step_of(layer, x, dy):
    """Return y, dx and the gradient of the kernel, under `nnx.jit`."""

    @nnx.jit
    def program(layer, x, dy):
        loss = nnx.grad(lambda layer, x: jnp.sum(layer(x) * dy), argnums=(0, 1))
        dlayer, dx = loss(layer, x)
        return layer(x), dx, dlayer["kernel"]

    return program(layer, x, dy)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(4, 64, use_bias=False, decode=False, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(64, 96, rngs=rngs), nnx.Linear(96, 64, rngs=rngs)])
        self.mix = nnx.Einsum("btd,dhk->bthk", (64, 4, 16), rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        x = x + self.layers[1](nnx.relu(self.layers[0](x)))
        return self.mix(x)


NAMES = ["attention.key", "attention.out", "attention.query", "attention.value", "layers.0", "layers.1", "mix"]


def test_convert_keeps_the_model():
    """`convert` keeps modules, parameters, values, paths and optimizer state, and changes the products of layers."""
    model = Block(nnx.Rngs(0))
    modules = dict(nnx.iter_modules(model))
    before, types = nnx.state(model), {path: type(module) for path, module in modules.items()}
    run = nnx.jit(lambda model: model(X))
    plain = run(model)
    seen = []
    assert convert(model, "CurrentScaling", filter=lambda layer, name: seen.append(name) or True) is model
    assert sorted(seen) == NAMES
    after = dict(nnx.iter_modules(model))
    assert all(after[path] is module and type(module) is types[path] for path, module in modules.items())
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)
    assert_alike(nnx.state(model), before)
    made = run(model)
    assert (made != plain).any()
    assert jnp.linalg.norm(made - plain) < 0.2 * jnp.linalg.norm(plain)
    names = [name for name in NAMES if name != "mix"]
    assert all(isinstance(after[_path(name)].dot_general, DotGeneral) for name in names)


def _path(name):
    return tuple(int(part) if part.isdigit() else part for part in name.split("."))


def test_convert_quantizes_kernels_as_they_are():
    """Kernels are quantized from float32, not from the bfloat16 of the layer. Results have the dtype of the layer."""
    layer = nnx.Linear(64, 96, dtype=jnp.bfloat16, use_bias=False, rngs=nnx.Rngs(0))
    convert(layer, "CurrentScaling")
    convert(layer, "MXFP8")  # A second call replaces the recipe.
    y = layer(X)
    assert_alike(y, linear(X.astype(jnp.bfloat16), layer.kernel[...].T, "MXFP8"))
    assert (y != linear(X.astype(jnp.bfloat16), layer.kernel[...].T.astype(jnp.bfloat16), "MXFP8")).any()


class Halved(nnx.Linear):
    def __call__(self, x):
        return super().__call__(x) / 2


def test_convert_says_what_it_leaves():
    rngs = nnx.Rngs(0)
    left = [
        (Halved(64, 64, rngs=rngs), "Halved overrides __call__"),
        (
            nnx.Linear(64, 64, dot_general=lambda *a, **k: lax.dot_general(*a), rngs=rngs),
            "its dot_general was replaced",
        ),
        (nnx.Linear(64, 64, precision="highest", rngs=rngs), "it has precision highest"),
        (nnx.LinearGeneral(64, 64, batch_axis={0: 2}, rngs=rngs), "its kernel has batch axes"),
        (nnx.LinearGeneral(64, 64, dot_general_cls=lambda: lax.dot_general, rngs=rngs), "it has a dot_general_cls"),
        (nnx.Einsum("btd,bdh->bth", (2, 64, 64), rngs=rngs), "its kernel has batch axes"),
    ]
    for layer, why in left:
        model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), layer)
        text = rf"convert: 1 of 2 layers were not converted: layers.1 \({why}\); exclude them with filter="
        with pytest.warns(UserWarning, match=text):
            convert(model, "CurrentScaling")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            convert(model, "CurrentScaling", filter=lambda layer, name: name == "layers.0")
        with pytest.raises(ValueError, match=rf"has no layer that can be converted: the model \({why}\)"):
            convert(layer, "CurrentScaling")
    lora = nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs)
    assert isinstance(convert(lora, "CurrentScaling").dot_general, DotGeneral)


@pytest.mark.parametrize(
    ("make", "options", "error", "text"),
    [
        (lambda: nn.Dense(4), {}, TypeError, r"is not an nnx\.Module; pass DotGeneral\(recipe\) to linen layers"),
        (lambda: nnx.LayerNorm(4, rngs=nnx.Rngs(0)), {}, ValueError, "has no linear layer that filter= selects"),
        (
            lambda: nnx.Linear(64, 40, rngs=nnx.Rngs(0)),
            {},
            ValueError,
            "has K = 64 and N = 40, which are no whole number of blocks of",
        ),
        (lambda: Block(nnx.Rngs(0)), {"filter": "layers"}, TypeError, "is not a function"),
        (lambda: Block(nnx.Rngs(0)), {"gather_axis": "fsdp"}, ValueError, r"convert: gather_axis \('fsdp'\) shards"),
        (lambda: Block(nnx.Rngs(0)), {"recipe": NVFP4()}, ValueError, "DotGeneral: NVFP4 uses stochastic rounding and"),
        (lambda: Block(nnx.Rngs(0)), {"gather_axes": "fsdp"}, TypeError, "gather_axes is not an option"),
        (
            lambda: nnx.Linear(4, 4, param_dtype=jnp.int32, kernel_init=nnx.initializers.ones, rngs=nnx.Rngs(0)),
            {},
            TypeError,
            "int32",
        ),
    ],
)
def test_convert_refuses(make, options, error, text):
    model = make()
    before = nnx.graphdef(model) if isinstance(model, nnx.Module) else None
    with pytest.raises(error, match=text):
        convert(model, **({"recipe": "MXFP8"} | options))
    assert before is None or nnx.graphdef(model) == before


def test_plain_where_blocks_do_not_fit():
    layer = nnx.Linear(64, 40, use_bias=False, rngs=nnx.Rngs(0))
    plain = layer(X)
    assert_alike(convert(layer, "MXFP8", otherwise="plain")(X), plain)


def test_random_numbers_of_nnx():
    """Each layer and call draws its own numbers, from a stream that is not among the parameters of a checkpoint."""
    model = Block(nnx.Rngs(0))
    params = nnx.state(model, nnx.Param)
    convert(model, NVFP4(), rngs=nnx.Rngs(qshard=1))
    assert jax.tree.structure(nnx.state(model, nnx.Param)) == jax.tree.structure(params)
    keys = [stream.key[...] for _, stream in nnx.iter_graph(model) if isinstance(stream, nnx.RngStream)]
    assert len(keys) == len({str(jax.random.key_data(key)) for key in keys}) == len(NAMES)
    grad = nnx.jit(nnx.grad(lambda model: jnp.sum(model(X) ** 2)))
    first, second = grad(model), grad(model)
    assert (first["layers"][0]["kernel"][...] != second["layers"][0]["kernel"][...]).any()


@pytest.mark.parametrize("jitted", [False, True])
def test_scaled_states_of_an_nnx_optimizer(jitted):
    """`nnx.Optimizer` replaces named tuples in the state by mappings in its first update."""
    model = nnx.Linear(128, 32, rngs=nnx.Rngs(0), param_dtype=jnp.bfloat16)
    transformation = adamw(0.1, mu_dtype="float8_e4m3fn", nu_dtype="float16", masters=True)
    params = nnx.to_pure_dict(nnx.state(model))
    state = transformation.init(params)
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)

    def train(model, optimizer):
        optimizer.update(model, nnx.state(model, nnx.Param))  # The gradients of half of the sum of squares.

    for _ in range(3):
        updates, state = transformation.update(params, state, params)
        params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        (nnx.jit(train) if jitted else train)(model, optimizer)
    assert_alike(nnx.to_pure_dict(nnx.state(model)), params)


@pytest.mark.parametrize("kind", ["linen", "nnx"])
def test_delayed_scaling(kind):
    """Over two steps, results and scales are those of `linear`; the second step uses scales of the first."""
    recipe = DelayedScaling(history=2)
    if kind == "linen":
        layer = nn.Dense(
            96, use_bias=False, dot_general_cls=functools.partial(linen.DotGeneral, recipe), kernel_init=integers
        )
        variables = layer.init(jax.random.key(0), X)
        kernel, states = variables["params"]["kernel"], variables[linen.STATES]
        apply = lambda x, kernel, states: layer.apply({"params": {"kernel": kernel}, linen.STATES: states}, x)  # noqa: E731
        inside = lambda states: states["DotGeneral_0"]["state"]  # noqa: E731
    else:
        layer = convert(nnx.Linear(64, 96, use_bias=False, kernel_init=integers, rngs=nnx.Rngs(0)), recipe)
        graph, params, states = nnx.split(layer, nnx.Param, qnnx.ScalingState)
        kernel = params["kernel"][...]

        def apply(x, kernel, states):
            return nnx.merge(graph, nnx.State({"kernel": nnx.Param(kernel)}), states)(x)

        inside = lambda states: states["dot_general"]["state"].get_value()  # noqa: E731
    own = init_delayed(recipe)

    def program(apply):
        def made(x, kernel, states):
            y, vjp = jax.vjp(apply, x, kernel, states)
            return y, *vjp(DY)

        return jax.jit(made)

    by_hand = program(lambda x, kernel, own: linear(x, kernel.T, recipe, state=own))
    for scale in (1.0, 0.5):
        *got, amaxes = program(apply)(scale * X, kernel, states)
        *want, own_amaxes = by_hand(scale * X, kernel, own)
        assert_alike(got, want)
        states, own = update_delayed(states, amaxes, recipe), update_delayed(own, own_amaxes, recipe)
        assert_alike(inside(states), own)
    assert float(own.activation.amax_history[0]) == 2 * float(own.activation.amax_history[1]) > 0


def test_layers_of_a_scan():
    """A module that stacks three layers has a kernel and a state for each."""
    recipe = DelayedScaling(history=2)

    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return nnx.Linear(64, 64, use_bias=False, rngs=rngs)

    model = convert(stacked(nnx.Rngs(0).split(3)), recipe)
    assert model.dot_general.state.get_value().weight.scale.shape == (3,)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qnnx.ScalingState))
    grads = nnx.grad(lambda model: jnp.sum(run(model, X)), argnums=wrt)(model)
    seen = grads["dot_general"]["state"].get_value().weight.observed.amax
    np.testing.assert_array_equal(seen, jnp.abs(model.kernel[...]).max(axis=(1, 2)))


@pytest.mark.each_value
@pytest.mark.parametrize("cut", [P("fsdp"), P(None, "fsdp")], ids=str)
@pytest.mark.parametrize("recipe", [CurrentScaling(), MXFP8()], ids=lambda recipe: type(recipe).__name__)
def test_fsdp_of_nnx(recipe, cut):
    """Kernels sharded along K or N on an Auto mesh gather codes and have the bits of one device."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    x, dy = values(8, 32, 256), values(8, 32, 1024, seed=1)
    layer = nnx.Linear(256, 1024, use_bias=False, kernel_init=integers, rngs=nnx.Rngs(0))
    want = expected(x, layer.kernel[...], dy, recipe)
    with jax.set_mesh(mesh):
        layer.kernel[...] = jax.device_put(layer.kernel[...], NamedSharding(mesh, cut))
        convert(layer, recipe, gather_axis="fsdp")
        rows = NamedSharding(mesh, P("fsdp"))
        graph, params = nnx.split(layer)

        def program(x, params, dy):
            return step(lambda x, params: nnx.merge(graph, params)(x), x, params, dy)

        args = jax.device_put(x, rows), params, jax.device_put(dy, rows)
        compiled = jax.jit(program).lower(*args).compile()
        y, dx, dparams = compiled(*args)
    assert_alike((y, dx), want[:2])
    dw = dparams["kernel"][...]
    np.testing.assert_allclose(dw, want[2], rtol=1e-5, atol=1e-4)  # fp32 sums over devices in another order.
    assert dw.sharding.is_equivalent_to(NamedSharding(mesh, cut), 2)
    gathered = [array for kind, arrays in collectives(compiled) if kind == "all-gather" for array in arrays]
    assert [array for array in gathered if array == "u8[256,1024]"]
    assert all(array.startswith("u8") for array in gathered), gathered


def test_convert_reads_how_kernels_are_cut():
    """`convert` reads shardings from arrays or metadata; a mesh axis without a role raises."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh):
        make = functools.partial(nnx.Linear, 64, 64, use_bias=False, rngs=nnx.Rngs(0))
        for layer in (
            make(kernel_metadata={"out_sharding": ("fsdp", "tp")}),
            nnx.eval_shape(lambda: make(kernel_metadata={"out_sharding": ("fsdp", "tp")}, rngs=nnx.Rngs(0))),
        ):
            with pytest.raises(
                ValueError, match=r"kernel is sharded over 'tp' .* which is neither gather_axis .'fsdp'. nor"
            ):
                convert(layer, "MXFP8", gather_axis="fsdp")
            convert(layer, "MXFP8", gather_axis="fsdp", kept_axes="tp")
            assert layer.dot_general.options["gather_axis"] == "fsdp"
            assert layer.dot_general.options["weight_spec"].spec == P("fsdp", "tp")
