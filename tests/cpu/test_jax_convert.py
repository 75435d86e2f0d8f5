"""`convert` of nnx models with their own einsums, recipes by layer, and the weights named in warnings."""

import copy
import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import Policy, convert, einsum, update_delayed
from qshard.recipes import NVFP4, CurrentScaling, DelayedScaling
from support.awkward import assert_bits_equal

nnx = pytest.importorskip("flax.nnx")
from qshard.jax import nnx as qnnx  # noqa: E402

D, N, K, H, F, V = 32, 4, 2, 16, 64, 96


class Einsum(nnx.Module):
    """Like that of tunix (models/llama3, gemma, qwen3) and of flax's gemma: equation, shape, `w` and one einsum."""

    def __init__(self, einsum_str, shape, *, rngs):
        self.einsum_str = einsum_str
        self.shape = shape
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))

    @jax.named_scope("einsum")
    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x, self.w[...])


class Embedder(nnx.Module):
    def __init__(self, *, rngs):
        self.input_embedding = nnx.Param(nnx.initializers.normal()(rngs.params(), (V, D)))


class RMSNorm(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.ones((D,)))

    def __call__(self, x):
        return x * self.w[...] / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


class Layer(nnx.Module):
    """Projections of tunix's Llama 3, and two of gemma in another order; without attention scores, for a short test."""

    def __init__(self, *, rngs):
        self.q_proj = Einsum("BTD,DNH->BTNH", (D, N, H), rngs=rngs)
        self.o_proj = Einsum("BTNH,NHD->BTD", (N, H, D), rngs=rngs)
        self.q_einsum = Einsum("BTD,NDH->BTNH", (N, D, H), rngs=rngs)
        self.kv_einsum = Einsum("BSD,CKDH->CBSKH", (2, K, D, H), rngs=rngs)
        self.gate_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(F, D, use_bias=False, rngs=rngs)
        self.norm = RMSNorm()

    def __call__(self, x):
        k, v = self.kv_einsum(self.norm(x))
        kv = jnp.tile(k * v, (1, 1, N // K, 1))
        x = x + self.o_proj(self.q_proj(x) + self.q_einsum(x) * kv)
        return x + self.down_proj(nnx.silu(self.gate_proj(x)))


class Llama(nnx.Module):
    def __init__(self, layers=2, seed=0):
        rngs = nnx.Rngs(seed)
        self.embedder = Embedder(rngs=rngs)
        self.layers = nnx.List([Layer(rngs=rngs) for _ in range(layers)])
        self.final_norm = RMSNorm()
        self.lm_head = Einsum("BTD,DV->BTV", (D, V), rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder.input_embedding[(tokens,)]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


TOKENS = jnp.arange(32).reshape(2, 16) % V
OWN = ["q_proj", "o_proj", "q_einsum", "kv_einsum"]
RULES = {"*": "einsum_str"}


def warned(model, recipe="CurrentScaling", **options):
    with pytest.warns(UserWarning, match="^convert: ") as caught:
        convert(model, recipe, **options)
    (one,) = caught
    assert one.filename == __file__
    return str(one.message)


def recipes_of(model):
    found = {}
    for path, module in nnx.iter_modules(model):
        multiplier = getattr(module, "dot_general", None) or getattr(module, "einsum_op", None)
        multiplier = getattr(multiplier, "dot_general", multiplier)
        if hasattr(multiplier, "recipe") and not isinstance(module, qnnx.DotGeneral):
            found[".".join(map(str, path))] = type(multiplier.recipe).__name__
    return found


def test_einsums_of_their_own_are_named():
    assert warned(Llama()) == (
        "convert: 9 of 13 layers were not converted: layers.0.kv_einsum, layers.0.o_proj, layers.0.q_einsum, "
        "layers.0.q_proj, lm_head (Einsum has its own w; for the weight of a product pass its "
        "equation in einsums=; 4 more like these); "
        "exclude them with filter= to silence this"
    )


@pytest.mark.parametrize("einsums", [RULES, {f"*.{n}": None for n in OWN}], ids=["attribute", "equations"])
def test_einsums_of_their_own_are_converted(einsums):
    """All are converted silently, with the bits of `einsum`; parameters, values and paths stay."""
    model = Llama()
    if None in einsums.values():
        einsums = {f"*.{n}": getattr(model.layers[0], n).einsum_str for n in OWN} | {"lm_head": "btd,dv->btv"}
    modules, before = dict(nnx.iter_modules(model)), nnx.state(model)
    plain = model(TOKENS)
    convert(model, "CurrentScaling", einsums=einsums)
    assert len(recipes_of(model)) == 13
    assert jax.tree.structure(nnx.state(model)) == jax.tree.structure(before)
    assert all(dict(nnx.iter_modules(model))[path] is module for path, module in modules.items())
    assert isinstance(model.lm_head, Einsum)
    x = jax.random.normal(jax.random.key(1), (2, 16, D))
    for name in ("q_proj", "q_einsum", "kv_einsum"):
        module = getattr(model.layers[0], name)
        want = jax.jit(lambda x, w, m=module: einsum(m.einsum_str, x, w, "CurrentScaling"))(x, module.w[...])
        assert_bits_equal(np.asarray(nnx.jit(lambda m, x: m(x))(module, x)), np.asarray(want))
    made = model(TOKENS)
    assert 0 < float(jnp.linalg.norm(made - plain)) < 0.2 * float(jnp.linalg.norm(plain))
    grads = nnx.jit(nnx.grad(lambda model: jnp.sum(model(TOKENS) ** 2)))(model)
    assert float(jnp.abs(grads["layers"][0]["kv_einsum"]["w"][...]).max()) > 0
    convert(model, "MXFP8", filter=lambda layer, name: name.startswith("layers.0.q"))  # Replaces their recipe.
    assert recipes_of(model)["layers.0.q_proj"] == "MXFP8"
    assert recipes_of(model)["lm_head"] == "CurrentScaling"


def test_results_have_the_dtypes_of_before():
    module = Einsum("BTD,DF->BTF", (D, F), rngs=nnx.Rngs(0))
    x = jnp.ones((2, 3, D), jnp.bfloat16)
    want = module(x).dtype
    assert convert(module, "CurrentScaling", einsums=RULES)(x).dtype == want == jnp.float32


def test_converted_einsums_travel():
    model = convert(Llama(1), "CurrentScaling", einsums=RULES)
    want = model(TOKENS)
    graph, state = nnx.split(model)
    for other in (nnx.merge(graph, state), nnx.clone(model), copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other.lm_head) is type(model.lm_head)
        assert_bits_equal(np.asarray(other(TOKENS)), np.asarray(want))
    fresh = convert(nnx.eval_shape(lambda: Llama(1)), "CurrentScaling", einsums=RULES)
    nnx.update(fresh, nnx.state(Llama(1)))
    assert_bits_equal(np.asarray(fresh(TOKENS)), np.asarray(want))


class Called(nnx.Module):
    """Like `Einsum` of gemma (gm/nn/_layers.py), called with the equation."""

    def __init__(self, shape, *, rngs):
        self.shape = shape
        self.w = nnx.Param(nnx.initializers.normal()(rngs.params(), shape))

    def __call__(self, eqn, x):
        return jnp.einsum(eqn, x, self.w[...])


def test_modules_that_are_called_with_the_equation():
    module, x = Called((N, D, H), rngs=nnx.Rngs(0)), jax.random.normal(jax.random.key(1), (2, 16, D))
    convert(module, "CurrentScaling", einsums={"*": "BTD,NDH->BTNH"})
    want = jax.jit(lambda x, w: einsum("BTD,NDH->BTNH", x, w, "CurrentScaling"))(x, module.w[...])
    assert_bits_equal(np.asarray(nnx.jit(lambda m, x: m("btd,ndh->btnh", x))(module, x)), np.asarray(want))
    with pytest.raises(
        ValueError, match=r"^einsum: 'BTD,NDH->BNTH' is not 'BTD,NDH->BTNH', the equation of this Called in"
    ):
        module("BTD,NDH->BNTH", x)


class Scaled(Einsum):
    def __call__(self, x):
        return super().__call__(x) * 2


class Biased(Einsum):
    def __init__(self, *args, rngs):
        super().__init__(*args, rngs=rngs)
        self.b = nnx.Param(jnp.zeros(F))

    def __call__(self, x):
        return super().__call__(x) + self.b[...]


class Two(nnx.Module):
    """Like tunix's experts: einsums over tensors of three axes."""

    def __init__(self, rngs):
        self.gate, self.down = (nnx.Param(rngs.params.normal((N, D, F))) for _ in range(2))

    def __call__(self, x):
        return jnp.einsum("btd,edf->btef", x, self.gate[...])


SQUARE = ("BTD,DF->BTF", (D, D))


@pytest.mark.parametrize(
    ("make", "einsums", "error", "text"),
    [
        (Einsum, {"*": "BTD,FD->BTF"}, ValueError, r"1 \(Einsum\) computes 'cda,ab->cdb', not 'BTD,FD->BTF' as in"),
        (Einsum, {"*": "BD,DF->BF"}, ValueError, r"1 \(Einsum\) cannot be called with an x of \(2, 32\): Einstein sum"),
        (Scaled, {"*": "BTD,DF->BTF"}, ValueError, r"1 \(Scaled\) does more than einsum 'BTD,DF->BTF': mul; call"),
        (Einsum, {"layers.2": "BTD,DF->BTF"}, ValueError, r"einsums \('layers.2'\) matches no module .* 'layers.1.w'"),
        (Einsum, {"*": "equation"}, ValueError, r"einsums \('\*'\) matches no module that can take an equation; the"),
        (Einsum, {"*": 3}, TypeError, r"einsums \(\{'\*': 3\}\) is not a dict of name patterns and equations; pass"),
        (Einsum, "BTD,DF->BTF", TypeError, r"convert: einsums \('BTD,DF->BTF'\) is not a dict of name patterns"),
        (
            Einsum,
            {"*": "BTD,DF,F->BTF"},
            ValueError,
            r"subscripts \('BTD,DF,F->BTF'\) are not two operands and a result",
        ),
    ],
)
def test_equations_that_are_not_those_of_the_module(make, einsums, error, text):
    """A square weight fits its transpose too: the traced program distinguishes them."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(D, D, rngs=rngs), make(*SQUARE, rngs=rngs))
    before = nnx.graphdef(model)
    with pytest.raises(error, match=text):
        convert(model, "CurrentScaling", einsums=einsums)
    assert nnx.graphdef(model) == before


def test_more_weights_or_a_bias_are_no_einsum():
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(D, D, rngs=rngs), Two(rngs))
    with pytest.raises(
        ValueError, match=r"layers\.1 \(Two\) has weights gate, down, and einsums\['\*'\] is an equation of one"
    ):
        convert(model, "CurrentScaling", einsums={"*": "btd,edf->btef"})
    left = "layers.1 (Two has its own gate, down; for weights of products call qshard.jax.einsum or ragged_dot)"
    assert left in warned(model)
    model = nnx.Sequential(nnx.Linear(D, D, rngs=rngs), Biased("BTD,DF->BTF", (D, F), rngs=rngs))
    with pytest.raises(ValueError, match=r"1 \(Biased\) does more than einsum 'BTD,DF->BTF': add"):
        convert(model, "CurrentScaling", einsums=RULES)
    model = nnx.Sequential(nnx.Linear(D, D, rngs=rngs), Einsum("EBD,EDF->EBF", (N, D, F), rngs=rngs))
    assert r"layers.1 (its weight has batch axes)" in warned(model, einsums=RULES)


def test_no_false_alarm():
    rngs = nnx.Rngs(0)

    class Model(nnx.Module):
        def __init__(self):
            self.embed, self.norm = nnx.Embed(8, 8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
            self.table, self.attention = Embedder(rngs=rngs), nnx.MultiHeadAttention(4, 64, decode=False, rngs=rngs)
            self.lora = nnx.LoRALinear(64, 64, lora_rank=4, rngs=rngs)
            self.pos_embed, self.cls_token = nnx.Param(jnp.ones((1, 4, 8))), nnx.Param(jnp.ones((1, 1, 8)))
            self.cache = nnx.Cache(jnp.ones((4, 4)))
            self.count = nnx.Param(jnp.ones((4, 4), jnp.int32))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = convert(Model(), "CurrentScaling")
    assert sorted(recipes_of(model)) == [*(f"attention.{name}" for name in ("key", "out", "query", "value")), "lora"]
    model = nnx.Sequential(nnx.Linear(64, 64, rngs=rngs), nnx.Conv(4, 8, (3,), rngs=rngs))
    assert "layers.1 (convolutions are not supported)" in warned(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert(model, {"*.1": None, "*": "CurrentScaling"})
        convert(model, "CurrentScaling", filter=lambda layer, name: name != "layers.1")
        convert(nnx.Linear(64, 64, rngs=rngs), "CurrentScaling", filter=lambda layer, name: layer.in_features == 64)


def test_recipes_by_layer():
    model = Llama(3)
    rules = {"layers.0.*": "DelayedScaling", "*.o_proj": NVFP4(), "lm_head": None, "*": "MXFP8"}
    convert(model, rules, einsums=RULES, rngs=nnx.Rngs(qshard=0))
    found = recipes_of(model)
    assert len(found) == 18
    assert {found[f"layers.0.{name}"] for name in [*OWN, "gate_proj"]} == {"DelayedScaling"}
    assert {name: found[f"layers.1.{name}"] for name in ("o_proj", "q_proj", "down_proj")} == {
        "o_proj": "NVFP4",
        "q_proj": "MXFP8",
        "down_proj": "MXFP8",
    }
    assert len(jax.tree.leaves(nnx.state(model, qnnx.ScalingState), is_leaf=lambda x: isinstance(x, nnx.Variable))) == 6
    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qnnx.ScalingState))
    grads = nnx.jit(nnx.grad(lambda model: jnp.mean(model(TOKENS) ** 2), argnums=wrt))(model)
    _, amaxes = nnx.split_state(grads, nnx.Param, qnnx.ScalingState)
    nnx.update(model, update_delayed(nnx.state(model, qnnx.ScalingState), amaxes, "DelayedScaling"))
    assert float(model.layers[0].q_proj.einsum_op.state.get_value().weight.scale) > 0


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({"*.query": "MXFP8", "*": "MXFP8"}, r"pattern '\*.query' matches no layer; the closest are 'layers.0.q"),
        (
            {"*": "MXFP8", "lm_head": None},
            r"pattern 'lm_head' has no effect: '\*' before it matches .*; put the narr",
        ),
        ({"*": None}, "gives no layer a recipe"),
        ({"*": "MXFP9"}, r"recipe\['\*'\] \('MXFP9'\) is not a recipe name"),
    ],
)
def test_rules_that_are_wrong(recipe, text):
    with pytest.raises(ValueError, match=f"^convert: .*{text}"):
        convert(Llama(1), recipe, einsums=RULES)
    assert "layers.1.down_proj" in warned(Llama(2), {"layers[:1].*": "MXFP8"}, einsums=RULES)
    assert "lm_head (no pattern matches it)" in warned(Llama(1), {"layers.*": "MXFP8"}, einsums=RULES)


def test_recipes_of_a_policy():
    params = {
        "layers": [{"up": jnp.ones((D, F)), "down": jnp.ones((F, D))} for _ in range(2)],
        "head": jnp.ones((D, V)),
    }
    policy = Policy.of(params, {"*.down": "MXFP8", "head": None, "*": CurrentScaling()})
    weights = policy(params)
    assert [type(w.dot_general.recipe).__name__ for w in weights["layers"][1].values()] == ["MXFP8", "CurrentScaling"]
    assert isinstance(weights["head"], jax.Array)
    x = jnp.full((32, D), 0.5)
    assert float((x @ weights["layers"][0]["up"])[0, 0]) == pytest.approx(D * 0.5, rel=2**-20)
    last = Policy.of(params, {"layers[-10%:].*": None, "*": "MXFP8"})(params)["layers"]
    assert [isinstance(layer["up"], jax.Array) for layer in last] == [False, True]
    first = Policy.of(params, {"layers[:1].*": "MXFP8"}, filter=lambda _, name: name == "layers.0.up")(params)
    assert not isinstance(first["layers"][0]["up"], jax.Array)
    with pytest.raises(ValueError, match="matches no layer"):  # The second of two blocks, although it has no weight.
        Policy.of(params, {"layers[-1:].*": "MXFP8"}, filter=lambda _, name: name == "layers.0.up")
    specs = {"up": P(), "down": P()}
    made = Policy({"up": "MXFP8", "*": None}, specs)({"up": jnp.ones((D, F)), "down": jnp.ones((F, D))})
    assert isinstance(made["down"], jax.Array)
    with pytest.raises(
        ValueError, match=r"^Policy: pattern '\*.dwn' matches no layer; the closest are 'layers.0.down'"
    ):
        Policy.of(params, {"*.dwn": "MXFP8", "*": "MXFP8"})
    with pytest.raises(
        ValueError, match=r"^Policy: recipe has no pattern for head \(a weight\); add one, such as '\*'"
    ):
        Policy.of(params, {"layers.*": "MXFP8"})


def test_own_einsums_under_fsdp():
    """A weight sharded along its first axis gives the bits of one device."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    module = Einsum("BTD,DNH->BTNH", (D, N, H), rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(1), (4, 16, D))
    want = nnx.jit(lambda m, x: m(x))(convert(nnx.clone(module), "CurrentScaling", einsums=RULES), x)
    with jax.set_mesh(mesh):
        module.w[...] = jax.device_put(module.w[...], NamedSharding(mesh, P("fsdp")))
        convert(module, "CurrentScaling", einsums=RULES, gather_axis="fsdp")
        assert module.einsum_op.dot_general.options["weight_spec"].spec == P("fsdp", None, None)
        got = nnx.jit(lambda m, x: m(x))(module, jax.device_put(x, NamedSharding(mesh, P("fsdp"))))
    assert_bits_equal(np.asarray(got), np.asarray(want))


def test_own_einsums_of_a_scan():
    """A module that stacks three layers has a kernel and a state for each."""

    @nnx.vmap(in_axes=0, out_axes=0)
    def stacked(rngs):
        return Einsum("BD,DF->BF", (D, D), rngs=rngs)

    model = convert(stacked(nnx.Rngs(0).split(3)), DelayedScaling(), einsums=RULES)
    assert model.einsum_op.state.get_value().weight.scale.shape == (3,)

    @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
    def run(layer, x):
        return layer(x)

    wrt = nnx.DiffState(0, nnx.Any(nnx.Param, qnnx.ScalingState))
    grads = nnx.grad(lambda model: jnp.sum(run(model, jnp.ones((16, D)))), argnums=wrt)(model)
    seen = grads["einsum_op"]["state"].get_value().weight.observed.amax
    np.testing.assert_array_equal(seen, jnp.abs(model.w[...]).max(axis=(1, 2)))


@pytest.mark.parametrize(
    ("filter", "text"),
    [
        (lambda name: True, r"filter \(<lambda>\(name\)\) does not take two arguments; pass a function of a layer and"),
        (["q"], r"filter \(\['q'\]\) is not a function; pass a function of a layer and its name"),
    ],
)
def test_filters_that_are_none(filter, text):
    with pytest.raises(TypeError, match=f"^convert: {text}"):
        convert(Llama(1), "CurrentScaling", filter=filter)
    with pytest.raises(TypeError, match=f"^Policy: {text.replace('a layer and', 'an array and')}"):
        Policy.of({"q": jnp.ones((D, D))}, "CurrentScaling", filter=filter)


def test_one_error_for_all_kernels_that_do_not_fit():
    """Names that differ only in numbers are listed once, and nothing is converted."""
    rngs = nnx.Rngs(0)
    sizes = {"a": (64, 40), "b": (48, 64), "c": (64, 64)}
    blocks = [nnx.Dict({name: nnx.Linear(*size, rngs=rngs) for name, size in sizes.items()}) for _ in range(3)]
    model = nnx.Sequential(*blocks)
    with pytest.raises(ValueError, match=r"^convert: layers\.0\.a\.kernel \(64, 40\) ") as raised:
        convert(model, "MXFP8")
    assert str(raised.value).endswith("; layers.0.a, layers.0.b (do not fit; 4 more like these)")
    assert all(block[name].dot_general is jax.lax.dot_general for block in blocks for name in sizes)
    with pytest.raises(ValueError, match=r"otherwise='plain' to convert$"):
        convert(model, "MXFP8", filter=lambda _, name: name in ("layers.0.a", "layers.0.c"))
