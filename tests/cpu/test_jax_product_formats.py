"""Formats of single products in JAX: what FSDP gathers for each product, and what is not supported."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import DotGeneral, Policy, gathered_weight, linear, policies, quantize, ragged_dot
from qshard.recipes import NVFP4, CurrentScaling
from support.hlo import collectives
from support.pairs import each_value

ROW = P("fsdp")
RECIPES = {
    "wgrad": NVFP4(wgrad="bf16"),
    "forward": NVFP4(forward="bf16"),
    "all": NVFP4(forward="MXFP8", dgrad="bf16", wgrad="BlockScaling"),
    "one scale": CurrentScaling(dgrad="MXFP8", wgrad="bf16"),
}


def operands(mesh):
    keys = jax.random.split(jax.random.key(0), 3)
    return [jax.device_put(jax.random.normal(key, (64, 64)), NamedSharding(mesh, ROW)) for key in keys]


def step(mesh, recipe, gather_axis="fsdp"):
    def products(x, w, dy):
        spec = NamedSharding(mesh, ROW) if gather_axis else None
        options = {"seed": 7, "weight_spec": spec, "gather_axis": gather_axis}
        y, pull = jax.vjp(lambda x, w: linear(x, w, recipe, **options), x, w)
        return y, *pull(dy)

    return jax.jit(products)


@pytest.fixture
def mesh():
    return jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:4])


@pytest.mark.parametrize(
    ("recipe", "gathers"),
    [
        (NVFP4(wgrad="bf16"), {"u8[64,32]": 2}),  # Codes of w, in forward and backward.
        (NVFP4(forward="bf16", wgrad="bf16"), {"u16[64,64]": 1, "u8[64,32]": 1}),
        (NVFP4(dgrad="bf16"), {"u16[64,64]": 1, "u8[64,32]": 1}),
    ],
    ids=str,
)
def test_gathers_send_what_the_product_reads(mesh, recipe, gathers):
    compiled = step(mesh, recipe).lower(*operands(mesh)).compile()
    sent = [name for kind, names in collectives(compiled) for name in names if kind == "all-gather"]
    large = [name for name in sent if name.endswith(("64,64]", "64,32]"))]
    assert {name: large.count(name) for name in large} == gathers


def test_gathered_codes_are_those_of_the_whole(mesh):
    """Gradients of x, from gathered codes, have the bits of one device with the codes of the whole weight."""
    recipe = NVFP4(forward="bf16", wgrad="bf16")
    alone = step(mesh, dataclasses.replace(recipe, forward=None, wgrad=None), None)
    given = operands(mesh)
    _, dx, _ = step(mesh, recipe)(*given)
    _, want, _ = alone(*(jnp.asarray(np.asarray(each)) for each in given))
    np.testing.assert_array_equal(dx, want)


BATCH, BOTH = P("fsdp", "seq"), P(("fsdp", "seq"))
MESHES = {
    # Mesh axes, shardings of x, w and dy, and options. Shards of w split blocks of every format with blocks.
    "explicit": (AxisType.Explicit, {"fsdp": 4, "seq": 2}, (BATCH, BOTH, BATCH), {"gather_axis": ("fsdp", "seq")}),
    "explicit, kept": (
        AxisType.Explicit,
        {"fsdp": 8},
        (ROW, ROW, ROW),
        {"gather_axis": "fsdp", "reshard_after_forward": False},
    ),
    "explicit, sharded K": (
        AxisType.Explicit,
        {"tp": 2},
        (P(None, None, "tp"), P(None, "tp"), P()),
        {"out_sharding": P(None, None, None)},
    ),
    "uneven": (AxisType.Auto, {"fsdp": 3}, (P(), ROW, P()), {"gather_axis": "fsdp"}),
    "uneven rows": (AxisType.Auto, {"fsdp": 3}, (ROW, P(), ROW), {}),
    "shard_map": (None, {"fsdp": 4, "seq": 2}, (BATCH, BOTH, BATCH), {"check_vma": True}),
    "shard_map, types off": (None, {"fsdp": 4, "seq": 2}, (BATCH, BOTH, BATCH), {"check_vma": False}),
}


@each_value(mode=list(MESHES), recipe=list(RECIPES))
def test_a_step_on_a_mesh_is_that_of_one_device(mode, recipe):
    """Operands have the same bits, so products differ by the order of sums in float32."""
    kind, sizes, specs, options = MESHES[mode]
    shapes = (8, 128, 256), (128, 256), (8, 128, 128)
    arrays = [np.random.default_rng(i).standard_normal(shape, np.float32) for i, shape in enumerate(shapes)]
    devices = jax.devices("cpu")[: np.prod([*sizes.values()])]
    types = (kind or AxisType.Auto,) * len(sizes)
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=types, devices=devices)
    shardings = [NamedSharding(mesh, spec) for spec in specs]

    def products(x, w, dy, **options):
        y, pull = jax.vjp(lambda x, w: linear(x, w, RECIPES[recipe], seed=7, **options), x, w)
        return y, *pull(dy)

    def constrained(*arrays):
        sharded = map(jax.lax.with_sharding_constraint, arrays, shardings)
        return products(*sharded, weight_spec=specs[1], **options)

    with jax.set_mesh(mesh):
        if kind is None:
            local = functools.partial(products, gather_axis=("fsdp", "seq"), axis_name=BATCH)
            got = jax.jit(jax.shard_map(local, in_specs=specs, out_specs=(specs[0], specs[0], specs[1]), **options))(
                *arrays
            )
        elif kind is AxisType.Explicit:
            step = functools.partial(products, weight_spec=specs[1], **options)
            got = jax.jit(step)(*jax.device_put(arrays, shardings))
        else:  # Outside of `jit` JAX has no uneven shards.
            got = jax.jit(constrained)(*arrays)
    for made, want in zip(got, jax.jit(products)(*arrays), strict=True):
        np.testing.assert_allclose(made, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("policy", [None, policies.codes_saveable], ids=["nothing saved", "codes saved"])
def test_recomputed_operands_have_the_same_bits(policy):
    x, w = (jax.random.normal(jax.random.key(i), (128, 128)) for i in range(2))

    def loss(x, w):
        return jnp.sum(jnp.sin(linear(x, w, RECIPES["all"], seed=1)))

    got = jax.jit(jax.grad(jax.checkpoint(loss, policy=policy), (0, 1)))(x, w)
    for a, b in zip(got, jax.jit(jax.grad(loss, (0, 1)))(x, w), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_policy_accepts_them():
    params, x = {"up": jnp.full((64, 32), 0.5)}, jnp.ones((16, 64))
    recipe = NVFP4(forward="MXFP8", dgrad="MXFP8", wgrad="bf16")
    policy = Policy.of(params, recipe)
    got = jax.grad(lambda params: jnp.sum(x @ policy(params)["up"]))(params)["up"]
    want = jax.grad(lambda w: jnp.sum(linear(x, w, recipe, weight_layout="KN")))(params["up"])
    np.testing.assert_array_equal(got, want)


def test_vmap_as_rows_is_one_matrix():
    x, w = jax.random.normal(jax.random.key(0), (128, 64)), jax.random.normal(jax.random.key(1), (32, 64))

    def loss(x, w, run):
        return jnp.sum(jnp.sin(run(x, w)))

    recipe = NVFP4(forward="MXFP8", dgrad="MXFP8", wgrad="bf16")
    rows = lambda x, w: jax.vmap(lambda x: linear(x, w, recipe, vmap_as_rows=True))(x)  # noqa: E731
    got = jax.grad(loss, (0, 1))(x, w, rows)
    want = jax.grad(loss, (0, 1))(x, w, lambda x, w: linear(x, w, recipe))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match=r"linear: w \(64, 64\) does not fit x \(64, 32\); pass w as \[N, K\]"):
        linear(jnp.ones((64, 32)), jnp.ones((64, 64)), NVFP4(forward="bf16"), seed=1)


def test_what_is_not_supported():
    x, recipe = jnp.ones((64, 64)), NVFP4(dgrad="bf16")
    with pytest.raises(ValueError, match="linear: w is codes, but forward and dgrad"):
        linear(x, quantize(x, recipe.weight), recipe, seed=1)
    with pytest.raises(NotImplementedError, match="gathered_weight: w has two formats"):
        gathered_weight(x, recipe, seed=1)
    with pytest.raises(NotImplementedError, match=r"ragged_dot: recipe .* has formats of single products"):
        ragged_dot(x, jnp.ones((2, 64, 64)), jnp.array([32, 32]), recipe)


@pytest.mark.parametrize(("rows", "kept"), [(48, False), (40, True)])
def test_only_the_planes_of_products_need_whole_blocks(rows, kept):
    """`otherwise="plain"` multiplies values where `linear` raises, and only there: wgrad reads no weight."""
    x, w, recipe = jnp.ones((32, 48)), jnp.ones((48, rows)), NVFP4(wgrad="MXFP8")
    product = functools.partial(
        DotGeneral(recipe, otherwise="plain"), dimension_numbers=(((1,), (0,)), ((), ())), seed=1
    )
    assert ("quantize_nvfp4" not in str(jax.make_jaxpr(product)(x, w))) == kept
    raises = pytest.raises(ValueError, match="16x16 blocks") if kept else contextlib.nullcontext()
    with raises:
        jax.grad(lambda w: linear(x, w, recipe, seed=1, weight_layout="KN").sum())(w)
