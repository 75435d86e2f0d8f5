"""`einsum` with sharded folded axes: the equations of Gemma and tunix under FSDP and tensor parallelism.

Operands give exact sums in any order, so that results have the bits of one device.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard.jax import DotGeneral, einsum
from support.awkward import assert_bits_equal
from support.hlo import collectives

X, HEADS = (4, 32, 64), (4, 32, 4, 32)
# Equation, shapes of x and w, shardings of w and x, and the sharding of y where neither determines it.
CASES = {
    "query": ("BTD,NDH->BTNH", X, (4, 64, 32), P("tp", "fsdp"), P("fsdp"), None),
    "key, value": ("BSD,2KDH->2BSKH", X, (2, 2, 64, 64), P(None, "tp", "fsdp"), P("fsdp"), None),
    "key, value of tunix": ("BTD,CKDH->CBTKH", X, (2, 2, 64, 64), P(None, "tp", "fsdp"), P("fsdp"), None),
    "out": ("BTNH,NHD->BTD", HEADS, (4, 32, 64), P("tp", None, "fsdp"), P("fsdp", None, "tp"), P("fsdp")),
    "gating": ("...F,NHF->...NH", X, (2, 128, 64), P(None, "tp", "fsdp"), P("fsdp"), None),
    "gating, transposed": ("...F,NFH->...NH", X, (2, 64, 128), P(None, "fsdp", "tp"), P("fsdp"), None),
    "gating over both": ("BTF,NHF->BTNH", X, (2, 256, 64), P(None, ("tp", "fsdp")), P("fsdp"), None),
    "contracted": (
        "BTNH,NHD->BTD",
        (4, 32, 2, 64),
        (2, 64, 64),
        P(None, "tp", "fsdp"),
        P("fsdp", None, None, "tp"),
        P("fsdp"),
    ),
}
OFTEN = {"key, value", "gating", "contracted"}
RECIPES = ("CurrentScaling", "MXFP8")


def exact(shape, seed):
    """Return signed numbers of {4, 5, 6, 7}, which give every block the same scale."""
    random = np.random.default_rng(seed)
    return (random.choice([-1, 1], shape) * random.integers(4, 8, shape)).astype(np.float32)


def mesh_of(kind):
    return jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(kind,) * 2, devices=jax.devices()[:4])


def step(equation, recipe, x, w, dy, **options):
    y, vjp = jax.vjp(lambda x, w: einsum(equation, x, w, recipe, **options), x, w)
    return y, *vjp(dy)


def operands(case):
    equation, x_shape, w_shape, *_ = CASES[case]
    x, w = exact(x_shape, 0), exact(w_shape, 1)
    dy = exact(jax.eval_shape(functools.partial(jnp.einsum, equation), x, w).shape, 2)
    return x, w, dy


@functools.cache
def expected(case, recipe):
    """Return the step of one device."""
    made = jax.jit(functools.partial(step, CASES[case][0], recipe))(*operands(case))
    return jax.tree.map(np.asarray, made)


def cells(*modes):
    return [
        pytest.param(case, recipe, mode, marks=[] if case in OFTEN and recipe == "MXFP8" else pytest.mark.slow)
        for case in CASES
        for recipe in RECIPES
        for mode in modes
    ]


@pytest.mark.each_value
@pytest.mark.parametrize(("case", "recipe", "kind"), cells(AxisType.Auto, AxisType.Explicit))
def test_cuts_of_folded_axes(case, recipe, kind):
    equation, _, _, w_spec, x_spec, y_spec = CASES[case]
    x, w, dy = operands(case)
    options = {"weight_spec": w_spec, "gather_axis": "fsdp"}
    if kind is AxisType.Explicit and y_spec is not None:
        options["out_sharding"] = y_spec
    mesh = mesh_of(kind)
    with jax.set_mesh(mesh):
        x, w = jax.device_put(x, NamedSharding(mesh, x_spec)), jax.device_put(w, NamedSharding(mesh, w_spec))
        if kind is AxisType.Explicit:
            made = jax.eval_shape(lambda x, w: einsum(equation, x, w, recipe, **options), x, w)
            dy = jax.device_put(dy, NamedSharding(mesh, made.sharding.spec))
        program = jax.jit(functools.partial(step, equation, recipe, **options)).lower(x, w, dy).compile()
        got = program(x, w, dy)
    for name, made, want in zip(("y", "dx", "dw"), got, expected(case, recipe), strict=True):
        assert_bits_equal(np.asarray(made), want, name)
    assert got[2].sharding.is_equivalent_to(w.sharding, w.ndim)
    if kind is AxisType.Auto and (y_spec is not None or case == "gating over both"):
        return  # XLA gathers x if K is sharded, or N over all devices.
    gathered = [array for op, arrays in collectives(program) if op == "all-gather" for array in arrays]
    local = w.addressable_shards[0].data.size
    codes = [array for array in gathered if array.startswith(("u8[", "s8["))]
    assert any(size_of(array) == 2 * local for array in codes), gathered  # It is not gathered along tp.
    assert all(size_of(array) < 2 * local for array in gathered if array not in codes), gathered


def size_of(array):
    return int(np.prod([int(size) for size in array[array.index("[") + 1 : -1].split(",") if size]))


@pytest.mark.parametrize(("case", "recipe", "mode"), cells("shard_map"))
def test_cuts_of_folded_axes_in_shard_map(case, recipe, mode):
    equation, _, _, w_spec, x_spec, y_spec = CASES[case]
    x, w, dy = operands(case)
    options = {"weight_spec": w_spec, "gather_axis": "fsdp", "axis_name": "fsdp"}
    terms = equation.replace("...", "BT").replace("2", "C").replace("->", ",").split(",")
    cut = {label: "tp" for label, names in zip(terms[1], w_spec, strict=False) if names and "tp" in names}
    # Rows are sharded along fsdp; along tp, y is sharded as w is, unless the axis is contracted.
    of_y = P(*("fsdp" if label == "B" else cut.get(label) for label in terms[2]))

    def local(x, w, dy):
        def product(x, w):
            y = einsum(equation, x, w, recipe, **options)
            return y if y_spec is None else jax.lax.psum(y, "tp")

        y, vjp = jax.vjp(product, x, w)
        return y, *vjp(dy)

    mesh = mesh_of(AxisType.Auto)
    run = jax.shard_map(local, mesh=mesh, in_specs=(x_spec, w_spec, of_y), out_specs=(of_y, x_spec, w_spec))
    for name, made, want in zip(("y", "dx", "dw"), jax.jit(run)(x, w, dy), expected(case, recipe), strict=True):
        assert_bits_equal(np.asarray(made), want, name)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 2), (2, 1)], ids=str)
def test_mesh_axes_of_one_device_keep_their_place(sizes):
    """The sharding of y is that of `jnp.einsum`, and gradients have the shardings of their operands."""
    equation, y_spec = "BTD,CKDH->CBTKH", P(None, "fsdp", None, "tp")
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("fsdp", "tp"), axis_types=(AxisType.Explicit,) * 2, devices=devices)
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((2, 8, 64)), P("fsdp"))
        w = jax.device_put(jnp.ones((2, 2, 64, 64)), P(None, "tp", "fsdp"))

        def loss(x, w):
            y = einsum(equation, x, w, "CurrentScaling", gather_axis="fsdp", out_sharding=y_spec)
            assert jax.typeof(y) == jax.typeof(jnp.einsum(equation, x, w, out_sharding=y_spec))
            return y.sum()

        gradients = jax.eval_shape(jax.grad(loss, argnums=(0, 1)), x, w)
    assert [each.sharding.spec for each in gradients] == [jax.typeof(each).sharding.spec for each in (x, w)]


@pytest.mark.parametrize(
    ("shape", "spec", "recipe", "text"),
    [
        (
            (2, 64, 32),
            P(None, ("tp", "fsdp")),
            "MXFP8",
            r"axis 1 of w \(2, 64, 32\) is folded after axis 0, and its 4 shards",
        ),
        ((2, 66, 32), P(None, ("tp", "fsdp")), "CurrentScaling", r"axis 1 of w .* its 4 shards split"),
    ],
)
def test_cuts_of_blocks_are_refused(shape, spec, recipe, text):
    """The error's advice works: the sharded axis goes first in w."""
    x, w = exact((32, 32), 0), exact(shape, 1)
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        with pytest.raises(ValueError, match=text + ".*; shard it on block boundaries, or put it before axis 0 in w"):
            einsum("tf,nhf->tnh", x, w, recipe, weight_spec=spec)
        made = jax.jit(lambda x, w: einsum("tf,hnf->tnh", x, w, recipe, weight_spec=P(spec[1])))(x, w.swapaxes(0, 1))
    # Blocks along N differ then, but all have the same scale here.
    assert_bits_equal(np.asarray(made), np.asarray(einsum("tf,nhf->tnh", x, w, recipe)))


def test_contracted_axes_that_are_cut_in_two_ways_are_refused():
    mesh = mesh_of(AxisType.Explicit)
    with jax.set_mesh(mesh):
        x = jax.device_put(exact((32, 2, 32), 0), NamedSharding(mesh, P(None, None, ("tp", "fsdp"))))
        w = jax.device_put(exact((2, 32, 32), 1), NamedSharding(mesh, P(None, "tp")))
        with pytest.raises(
            ValueError, match=r"axis 2 of x \(32, 2, 32\) has 4 shards, but axis 1 of w \(2, 32, 32\), contracted"
        ):
            DotGeneral("CurrentScaling").einsum("tnh,nhd->td", x, w, out_sharding=P())


def test_operands_are_arrays_and_options_may_be_lists():
    with pytest.raises(TypeError, match=r"einsum: x \(\[\[1.0\]\]\) is not a JAX or NumPy array"):
        einsum("td,df->tf", [[1.0]], jnp.ones((1, 1)), "CurrentScaling")
    one, other = (DotGeneral("MXFP8", gather_axis=kind(["a", "b"])) for kind in (list, tuple))
    assert one == other
    assert hash(one) == hash(other)
