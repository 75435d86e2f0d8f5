"""`linear` with `gather_rows` and `scatter_rows`: tensor and sequence parallelism in `shard_map`.

x `[B, S, K]` is sharded along S for `gather_rows`, along K for `scatter_rows`. Devices compute the codes of one device,
overlapped or not. They send codes, and products where sums span devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qshard import formats, recipes
from qshard.jax import init_delayed, linear, quantize
from support.awkward import assert_bits_equal, awkward_values
from support.hlo import collectives
from support.pairs import pairs

RECIPES = {
    **recipes.NAMED,
    "squares": recipes.BlockScaling(activation=formats.FP8_128x128, gradient=formats.FP8_128x128),
}
SIDES = ["gather_rows", "scatter_rows"]
# Device counts take turns; blocks of 128 have at most 4, because each device has a block of each matrix.
TURNS = [
    (name, side, (2, 4, 4 if name in ("BlockScaling", "squares") else 8)[(i + j) % 3])
    for i, name in enumerate(RECIPES)
    for j, side in enumerate(SIDES)
]
OFTEN = ("CurrentScaling", "NVFP4")
CUT = P(None, "tp")
SPECS = {"gather_rows": (CUT, P("tp"), P(None, None, "tp")), "scatter_rows": (P(None, None, "tp"), CUT, CUT)}


def unit_of(recipe):
    return max(16, *(max(fmt.block or (1,)) for fmt in (recipe.weight, recipe.activation, recipe.gradient)))


def mesh_of(**sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes), devices=devices)


def operands(recipe, devices, exact=False, batch=2, seed=0):
    """Return x, w and dy with one block a device along the sharded axis.

    With `exact`, fp32 sums of products of codes are exact in any order: codes have 8 bits and exponents near one
    another, so sums of 2048 terms are not rounded.
    """
    size = devices * unit_of(recipe)
    shapes = (batch, size, size), (size, size), (batch, size, size)
    if not exact:
        return tuple(awkward_values(shape, seed + i, kinds=["normal", "zeros"]) for i, shape in enumerate(shapes))
    rng = np.random.default_rng(seed)
    return tuple((rng.uniform(0.25, 1, shape) * rng.choice([-1, 1], shape)).astype(np.float32) for shape in shapes)


def step(x, w, dy, recipe, **options):
    """Return y, dx, dw and the amaxes of a state."""
    states = init_delayed(recipe) if recipe.stateful else None
    y, vjp = jax.vjp(lambda x, w, s: linear(x, w, recipe, seed=5, state=s, **options), x, w, states)
    return y, *vjp(dy)


def in_parts(recipe, side, devices, *, check_vma=True, **options):
    x, w, y = SPECS[side]
    if not check_vma:
        options["axis_name"] = "tp"
    local = functools.partial(step, recipe=recipe, **{side: "tp"}, **options)
    mesh = mesh_of(tp=devices)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(x, w, y), out_specs=(y, x, w, P()), check_vma=check_vma))


def assert_close(made, want):
    for got, expect in zip(made[:3], want[:3], strict=True):  # fp32 sums in another order.
        np.testing.assert_allclose(got, expect, rtol=1e-5, atol=1e-5 * np.abs(expect).max())


def assert_same(made, want):
    for got, expect in zip(jax.tree.leaves(made), jax.tree.leaves(want), strict=True):
        assert_bits_equal(got, expect)


@pytest.mark.parametrize(
    ("name", "side", "devices"),
    [pytest.param(*turn, marks=[] if i % 4 in (0, 3) else pytest.mark.slow) for i, turn in enumerate(TURNS)],
)
def test_bits_of_one_device(name, side, devices):
    """With exact sums, results have the bits of one device, so codes are the same.

    NVFP4 values have too many bits for it.
    """
    recipe = RECIPES[name]
    given = operands(recipe, devices, exact=True)
    want = jax.jit(functools.partial(step, recipe=recipe))(*given)
    for overlap in (False, True):
        made = in_parts(recipe, side, devices, overlap=overlap)(*given)
        (assert_close if name == "NVFP4" else assert_same)(made, want)


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("name", "side", "devices"),
    [pytest.param(*turn, marks=[] if turn[0] in OFTEN else pytest.mark.slow) for turn in TURNS],
)
def test_overlap_changes_no_bit(name, side, devices):
    recipe = RECIPES[name]
    given = operands(recipe, devices)
    plain, overlapped = (in_parts(recipe, side, devices, overlap=overlap) for overlap in (False, True))
    made = overlapped(*given)
    assert_same(made, plain(*given))
    want = jax.jit(functools.partial(step, recipe=recipe))(*given)
    assert_close(made, want)
    assert_same(made[3], want[3])


@pytest.mark.parametrize("side", SIDES)
def test_sums_are_defined(side):
    """Sums of y or dx add the parts of preceding devices, nearest first, then the local part, in fp32."""
    devices, recipe = 4, RECIPES["CurrentScaling"]
    x, w, dy = operands(recipe, devices)
    y, dx, _, _ = in_parts(recipe, side, devices, overlap=True)(x, w, dy)
    made, a, b = (y, x, w) if side == "scatter_rows" else (dx, dy, w.T)
    role = recipe.activation if side == "scatter_rows" else recipe.gradient
    qa, qb = (quantize(each, fmt).rowwise for each, fmt in ((a, role), (b, recipe.weight)))
    parts = np.stack([
        jax.lax.dot_general(i, j, (((2,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        for i, j in zip(np.split(qa.data, devices, -1), np.split(qb.data, devices, -1), strict=True)
    ])  # fmt: skip
    rows = a.shape[1] // devices
    for rank in range(devices):
        chunk = slice(rank * rows, (rank + 1) * rows)
        total = sum(parts[(rank - step) % devices][:, chunk] for step in range(1, devices + 1))
        assert_bits_equal(made[:, chunk], total * np.float32(qa.scale_inv * qb.scale_inv))


# --- collectives ---


def arrays_of(compiled, kind):
    return sorted(array for each, arrays in collectives(compiled) for array in arrays if each == kind)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_what_travels(name, side):
    """Only products are sent in high precision; overlapped, 3 chunks of codes and 3 of products in both passes.

    Amaxes are 4 bytes.
    """
    devices, recipe = 4, RECIPES[name]
    given = operands(recipe, devices)
    size = given[0].shape[1]
    rows, scales = size // devices, size // 32
    codes, sums = f"u8[2,{rows},{size}]", f"f32[2,{rows},{size}]"
    scaled = name == "MXFP8"
    compiled = {
        overlap: in_parts(recipe, side, devices, overlap=overlap).lower(*given).compile() for overlap in (False, True)
    }
    for overlap, program in compiled.items():
        gathered = arrays_of(program, "all-gather")
        assert all(array.startswith("u8[") for array in gathered)
        assert len(gathered) == (1 if overlap else 2) * (2 if scaled else 1)
        reduced = [array for kind, arrays in collectives(program) for array in arrays if kind == "all-reduce"]
        assert reduced == ([] if scaled else ["s32[]"] * 3)
    travels = [codes, sums] + ([f"u8[2,{rows},{scales}]"] if scaled else [])
    assert arrays_of(compiled[True], "collective-permute") == sorted(travels * (devices - 1))
    assert arrays_of(compiled[True], "all-to-all") == arrays_of(compiled[False], "collective-permute") == []


def test_one_device_on_the_axis():
    """A single device has all rows: there are no collectives, and blocks need not be whole."""
    recipe = recipes.NVFP4()
    given = tuple(a[:, :40] if a.ndim == 3 else a for a in operands(recipe, 2))
    for side in SIDES:
        program = in_parts(recipe, side, 1, overlap=True)
        assert_same(program(*given), jax.jit(functools.partial(step, recipe=recipe))(*given))
        assert {kind for kind, _ in collectives(program.lower(*given).compile())} <= {"all-reduce"}


# --- with other features ---


@pytest.mark.each_value
@pairs(name=["CurrentScaling", "DelayedScaling", "MXFP8", "NVFP4"], layout=["NK", "KN"], side=SIDES)
def test_with_fsdp(name, layout, side):
    """x `[B, S, K]` is sharded along B by FSDP, which shards the rows of w too."""
    recipe, mesh = RECIPES[name], mesh_of(fsdp=2, tp=2)
    x, w, dy = operands(recipe, 4, exact=True)
    w = w if layout == "NK" else w.T
    at = layout.index("N" if side == "gather_rows" else "K")
    cut_w = P(("tp", "fsdp")) if at == 0 else P("fsdp", "tp")
    cut_x, cut_y = P("fsdp", "tp"), P("fsdp", None, "tp")
    cut_x, cut_y = (cut_x, cut_y) if side == "gather_rows" else (cut_y, cut_x)
    want = jax.jit(functools.partial(step, recipe=recipe, weight_layout=layout))(x, w, dy)
    for axis_name in ("fsdp", P("fsdp", "tp")):
        options = {side: "tp", "gather_axis": "fsdp", "axis_name": axis_name, "weight_layout": layout}
        local = functools.partial(step, recipe=recipe, overlap=True, **options)
        specs = (cut_x, cut_w, cut_y)
        made = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(cut_y, cut_x, cut_w, P())))(x, w, dy)
        (assert_close if name == "NVFP4" else assert_same)(made, want)


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("lead", [(64,), (64, 3), (2, 3, 64)], ids=str)
def test_axis_that_is_cut(lead, side):
    """The axis before K is sharded, unless a spec names another: rows first, as in Megatron, or behind two axes."""
    recipe, at = recipes.MXFP8(), lead.index(64)
    rng = np.random.default_rng(1)
    x, w, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((*lead, 64), (64, 64), (*lead, 64)))
    rows, columns = P(*[None] * at, "tp"), P(*[None] * len(lead), "tp")
    specs = (rows, P("tp"), columns) if side == "gather_rows" else (columns, P(None, "tp"), rows)
    local = functools.partial(step, recipe=recipe, axis_name=rows, overlap=True, **{side: "tp"})
    outs = (specs[2], specs[0], specs[1], P())
    made = jax.jit(jax.shard_map(local, mesh=mesh_of(tp=2), in_specs=specs, out_specs=outs))(x, w, dy)
    assert_close(made, jax.jit(functools.partial(step, recipe=recipe))(x, w, dy))


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["CurrentScaling", "DelayedScaling", "NVFP4"])
@pytest.mark.parametrize("side", SIDES)
def test_without_types(name, side):
    recipe = RECIPES[name]
    given = operands(recipe, 2)
    made = in_parts(recipe, side, 2, overlap=True, check_vma=False)(*given)
    assert_same(made, in_parts(recipe, side, 2)(*given))


def test_not_finite():
    """An infinity gives NaN in the rows where one device has NaN; a device with zeros alone changes nothing."""
    recipe = recipes.MXFP8()
    x, w, dy = (a.copy() for a in operands(recipe, 4))
    x[1, 70, 3] = np.inf
    dy[:, 32:64] = 0
    w[:, 32:64] = 0
    want = jax.jit(functools.partial(step, recipe=recipe))(x, w, dy)
    for side in SIDES:
        made = in_parts(recipe, side, 4, overlap=True)(x, w, dy)
        for got, expect in zip(made[:3], want[:3], strict=True):
            np.testing.assert_array_equal(np.isnan(got), np.isnan(expect))
            assert np.isnan(expect).any() or expect is want[1]


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8"])
def test_parts_of_sums_beyond_float16(name):
    recipe = RECIPES[name]
    x, w, dy = (np.ones_like(a, np.float16) for a in operands(recipe, 2))
    x *= np.float16(64)
    w[:, : w.shape[1] // 2] = 256
    w[:, w.shape[1] // 2 :] = -256
    y = in_parts(recipe, "scatter_rows", 2)(x, w, dy)[0]
    np.testing.assert_array_equal(y, np.zeros_like(y))


def test_refusals():
    """Errors on a mesh of two axes; test_error_catalogue_jax.py has those of one axis."""

    def call(local):
        mesh, x = mesh_of(fsdp=2, tp=2), np.ones((64, 64), np.float32)
        jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("tp"), P("tp")), out_specs=P(None, "tp")))(x, x)

    with pytest.raises(ValueError, match=r"axis_name \(P\(\('tp', 'fsdp'\),\)\) has 'fsdp' after gather_rows \('tp'\)"):
        call(lambda x, w: linear(x, w, "MXFP8", gather_rows="tp", axis_name=P(("tp", "fsdp"))))
    states = init_delayed("DelayedScaling")

    def with_own_state(x, w):
        own = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, "tp", to="varying"), states)
        return linear(x, w, "DelayedScaling", gather_rows="tp", state=own)

    with pytest.raises(ValueError, match=r"state varies over gather_rows \('tp'\), whose devices share one layer"):
        call(with_own_state)


def test_codes_with_scales_of_their_own():
    """Frozen codes with one scale per shard of w: products are scaled before they are summed."""
    recipe = recipes.CurrentScaling()
    x, w, _ = operands(recipe, 2)
    w = w * np.repeat(np.float32([1, 64]), w.shape[1] // 2)
    for check_vma in (True, False):

        def local(x, w):
            q = quantize(w, recipe.weight)
            return linear(x, q, recipe, scatter_rows="tp", overlap=True, axis_name=())

        specs = SPECS["scatter_rows"]
        mapped = jax.shard_map(local, mesh=mesh_of(tp=2), in_specs=specs[:2], out_specs=CUT, check_vma=check_vma)
        halves = [quantize(half, recipe.weight).dequantize() for half in np.split(w, 2, axis=1)]
        want = quantize(x, recipe.activation).dequantize() @ jnp.concatenate(halves, axis=1).T
        np.testing.assert_allclose(jax.jit(mapped)(x, w), want, rtol=1e-4, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("side", SIDES)
def test_remat_and_vmap(side):
    recipe = recipes.CurrentScaling()
    given = operands(recipe, 2)
    x, w, y = SPECS[side]
    options = {"recipe": recipe, side: "tp", "overlap": True}
    plain = functools.partial(step, **options)

    def remat(x, w, dy):
        y, vjp = jax.vjp(jax.checkpoint(lambda x, w: linear(x, w, **options)), x, w)
        return y, *vjp(dy)

    def sharded(local, specs):
        outs = (specs[2], specs[0], specs[1])
        return jax.jit(jax.shard_map(local, mesh=mesh_of(tp=2), in_specs=specs, out_specs=outs))(*arguments)

    arguments = given
    want = sharded(lambda *given: plain(*given)[:3], (x, w, y))
    assert_same(sharded(remat, (x, w, y)), want)
    arguments = tuple(np.stack([a, a[::-1]]) for a in given)
    made = sharded(jax.vmap(lambda *given: plain(*given)[:3]), tuple(P(None, *each) for each in (x, w, y)))
    assert_same([each[0] for each in made], want)
