"""`linear` with batch and sequence sharded: x `[B, S, K]` under `P("data", "seq")`, with shardings of K and N.

Results equal those of one device. Devices multiply local rows, as in bfloat16: x and dy are not sent, only the amaxes
of blocks that shards share. test_jax_h100.py checks the same for GPUs.
"""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import formats, recipes, reference
from qshard.formats import Usage
from qshard.jax import init_delayed, linear, quantize
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.hlo import collectives

RECIPES = {
    **{name: recipe for name, recipe in recipes.NAMED.items() if name != "MXFP6"},  # Same blocks as MXFP8.
    "squares": recipes.BlockScaling(activation=formats.FP8_128x128, gradient=formats.FP8_128x128),
}
# Recipes alternate between two kinds of mesh; test_jax_h100.py has both.
TURNS = {name: (recipe, (AxisType.Auto, AxisType.Explicit)[i % 2]) for i, (name, recipe) in enumerate(RECIPES.items())}
B, S, K, N = 4, 512, 128, 384
ROWS = P("data", "seq")


def mesh_of(kind, *sizes):
    devices = jax.devices()[: np.prod(sizes)]
    return jax.make_mesh(
        sizes, ("data", "seq", "model")[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices
    )


@functools.cache
def operands(batch=B, seq=S, k=K, n=N):
    rng = np.random.default_rng(0)
    return tuple(rng.standard_normal(shape).astype(np.float32) for shape in ((batch, seq, k), (n, k), (batch, seq, n)))


def step(x, w, dy, recipe, **options):
    """Return y, dx, dw and the amaxes of a state."""
    states = init_delayed(recipe) if recipe.stateful else None
    y, vjp = jax.vjp(lambda x, w, s: linear(x, w, recipe, seed=5, state=s, **options), x, w, states)
    return y, *vjp(dy)


@functools.cache
def expected(recipe, *sizes):
    return jax.tree.map(np.asarray, jax.jit(functools.partial(step, recipe=recipe))(*operands(*sizes)))


def assert_step(made, recipe, *sizes):
    for got, want in zip(made[:3], expected(recipe, *sizes)[:3], strict=True):  # fp32 sums in another order.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    for got, want in zip(*(jax.tree.leaves(each[3]) for each in (made, expected(recipe, *sizes))), strict=True):
        assert_bits_equal(got, want)


def compiled_step(mesh, recipe, specs, sizes=(), **options):
    """Return the compiled step, whose results are sharded like the operands, and its arguments."""
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    args = [jax.device_put(a, sharding) for a, sharding in zip(operands(*sizes), shardings, strict=True)]

    def program(*args):
        made = step(*args, recipe, **options)
        if mesh.explicit_axes:
            return made
        y, dx, dw = map(jax.lax.with_sharding_constraint, made[:3], (shardings[2], shardings[0], shardings[1]))
        return y, dx, dw, made[3]

    return jax.jit(program).lower(*args).compile(), args


def moved(compiled):
    """Return the results of collectives, except tensor amaxes and summed gradients."""
    arrays = [array for _, each in collectives(compiled) for array in each]
    return sorted(array for array in arrays if array != "s32[]" and array != f"f32[{N},{K}]")


@pytest.mark.parametrize(("recipe", "kind"), TURNS.values(), ids=TURNS)
def test_batch_and_sequence(recipe, kind):
    """Each device multiplies its 256 rows in three products; y and dx are sharded as x, and neither is sent."""
    mesh = mesh_of(kind, 2, 4)
    with jax.set_mesh(mesh):
        compiled, args = compiled_step(mesh, recipe, (ROWS, P(), ROWS))
        made = compiled(*args)
        assert_step(made, recipe)
    assert moved(compiled) == []
    products = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    assert sorted(sorted(map(int, each.split(","))) for each in products) == [[K, 256], [K, N], [256, N]]
    for got in made[:2]:
        assert got.sharding.is_equivalent_to(NamedSharding(mesh, ROWS), 3)


# Sizes, shardings of x, w and dy on a mesh of data, seq and model, out_sharding, and the gathered block amaxes.
CUT_BLOCKS = {
    # N / 2 = 192 is not a multiple of 128, like an FFN of 11008 over 4 or 8. Amaxes of partial blocks of dy and w.
    "columns": (
        (4, 256, 128, 384),
        (P("data"), P("model"), P("data", None, "model")),
        None,
        ["s32[2,256,6]", "s32[6,1]"],
    ),
    "columns and sequence": (
        (4, 256, 128, 384),
        (ROWS, P("model"), P(*ROWS, "model")),
        None,
        ["s32[2,128,6]", "s32[6,1]"],
    ),
    "rows and sequence": (
        (4, 256, 384, 128),
        (P(*ROWS, "model"), P(None, "model"), ROWS),
        ROWS,
        ["s32[1,6]", "s32[2,128,6]"],
    ),
    # 64 local rows are half a block of dw; with 40 rows, blocks continue from one sequence to the next.
    "sequence": ((4, 128, 128, 256), (ROWS, P(), ROWS), None, ["s32[128,2,2]", "s32[256,2,2]"]),
    "short sequence": ((8, 80, 128, 256), (ROWS, P(), ROWS), None, None),
}


@pytest.mark.parametrize("name", CUT_BLOCKS)
def test_blocks_that_an_explicit_mesh_cuts(name):
    """Blocks are those of the whole. Only amaxes of partial blocks are gathered, along the axis that splits them."""
    sizes, specs, out, gathered = CUT_BLOCKS[name]
    recipe, mesh = recipes.BlockScaling(), mesh_of(AxisType.Explicit, 2, 2, 2)
    with jax.set_mesh(mesh):
        compiled, args = compiled_step(mesh, recipe, specs, sizes, out_sharding=out)
        assert_step(compiled(*args), recipe, *sizes)
    arrays = [array for kind, each in collectives(compiled) for array in each if kind == "all-gather"]
    assert all(array.startswith("s32[") for array in arrays)
    if gathered is not None:
        assert sorted(arrays) == gathered


def test_short_sequence_in_blocks_of_32():
    """With 80 rows in a sequence, blocks of 32 rows in the order of x span two sequences."""
    sizes, mesh = (8, 80, 64, 96), mesh_of(AxisType.Explicit, 2, 2)
    with jax.set_mesh(mesh):
        compiled, args = compiled_step(mesh, recipes.MXFP8(), (ROWS, P(), ROWS), sizes)
        assert_step(compiled(*args), recipes.MXFP8(), *sizes)
    assert {each[0][:3] for kind, each in collectives(compiled) if kind == "all-gather"} == {"s32"}


@pytest.mark.parametrize("kind", ["Auto", "vmap"])
def test_four_axes(kind):
    """x may have four axes, or one more from `vmap`."""
    mesh, recipe = mesh_of(AxisType.Auto, 2, 4), recipes.NVFP4()
    x, w, dy = operands()
    if kind == "vmap":
        x, dy, cut = np.stack([x, x]), np.stack([dy, dy]), P(None, "data", "seq")
        one = jax.vmap(functools.partial(step, recipe=recipe), in_axes=(0, None, 0))
        want = [np.stack([each, each]) for each in expected(recipe)[:3]]
    else:
        x, dy = (a.reshape(2, 2, S, a.shape[-1]) for a in (x, dy))
        cut = P(None, "data", "seq")
        one = functools.partial(step, recipe=recipe)
        want = [
            each.reshape(shape) for each, shape in zip(expected(recipe)[:3], (dy.shape, x.shape, w.shape), strict=True)
        ]
    sharded = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, cut), (w, P()), (dy, cut))]
    compiled = jax.jit(one).lower(*sharded).compile()
    for got, expect in zip(compiled(*sharded)[:3], want, strict=True):  # fp32 sums in another order.
        np.testing.assert_allclose(got, expect, rtol=1e-5, atol=1e-5 * np.abs(expect).max())
    assert "all-gather" not in {kind for kind, _ in collectives(compiled)}


# --- shard_map ---


def in_shard_map(recipe, names, *sizes, check_vma=True):
    def local(x, w, dy):
        return step(x, w, dy, recipe, axis_name=names)[:3]

    mesh, specs = mesh_of(AxisType.Auto, 2, 4), (ROWS, P(), ROWS)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(ROWS, ROWS, P()), check_vma=check_vma))


def test_shards_draw_what_the_whole_draws():
    """Rows of a shard are not adjacent in the whole: a spec gives their offsets to Philox, axis names alone do not."""
    recipe = recipes.NVFP4()
    made = in_shard_map(recipe, ROWS)(*operands())
    for got, want in zip(made, expected(recipe)[:3], strict=True):  # fp32 sums in another order.
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    y, dx, _ = in_shard_map(recipe, ("data", "seq"))(*operands())
    np.testing.assert_array_equal(y, made[0])  # One scale, and no random numbers.
    assert (np.asarray(dx) != np.asarray(made[1])).any()


def test_one_scale_for_all_shards():
    made = in_shard_map(RECIPES["CurrentScaling"], ("data", "seq"))(*operands())
    assert_step((*made, None), RECIPES["CurrentScaling"])


def test_refusals_of_shard_map():
    match = r"linear: the gradient of y \(2, 20, 384\) is a shard \(P\('data', 'seq', None\)\) whose"
    with pytest.raises(ValueError, match=match):
        in_shard_map(recipes.NVFP4(), ROWS)(*operands(4, 80))
    with pytest.raises(ValueError, match=r"linear: axis_name \(.*\) has more entries than the 2 axes"):
        in_shard_map(recipes.NVFP4(), P("data", None, "seq"))(*operands())
    with pytest.raises(
        ValueError, match=r"quantize: x \(2, 64, 128\) is a shard \(P\('data', 'seq', None\)\) whose rows are not"
    ):
        quantize_in_shard_map(formats.FP8_1x128, Usage.COLUMNWISE, np.ones((4, 256, 128), np.float32))


# --- `quantize` of such tensors ---


def quantize_in_shard_map(fmt, usage, x):
    def local(x):
        return quantize(x, fmt, usage=usage, axis_name=("data", "seq"), spec=ROWS).dequantize()

    mesh = mesh_of(AxisType.Auto, 2, 4)
    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=ROWS, out_specs=ROWS))(x)


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)
@pytest.mark.parametrize("fmt", ["FP8_E4M3", "FP8_1x128", "MXFP8_E4M3", "MXFP8_32x32", "NVFP4_16x16"])
def test_quantize(fmt, kind):
    """Planes have the shapes of `layout.plane`, for blocks within one shard or across several."""
    usage = Usage.BOTH
    for shape in (4, 256, 64), (8, 80, 64):
        x = awkward_values(shape, seed=3, kinds=TAME)
        want = reference.quantize(x, formats.FORMATS[fmt], usage)
        mesh = mesh_of(kind, 2, 4)
        with jax.set_mesh(mesh):
            spec = ROWS if kind is AxisType.Auto else None
            q = quantize(jax.device_put(x, NamedSharding(mesh, ROWS)), fmt, usage=usage, spec=spec)
            values = q.dequantize()
        for each in usage.planes:
            name = each.name.lower()
            for field, got in getattr(q, name)._asdict().items():
                expect = getattr(getattr(want, name), field)
                assert (got is None) == (expect is None)
                if got is not None:
                    assert_bits_equal(got, expect, f"{name}.{field}")
        assert_bits_equal(values, want.dequantize())


def test_quantize_in_shard_map():
    """Shards of whole blocks, and one scale for the whole, give the values of the whole."""
    x = awkward_values((4, 256, 64), seed=3, kinds=TAME)
    for fmt, usage in (("FP8_E4M3", Usage.BOTH), ("MXFP8_E4M3", Usage.COLUMNWISE), ("NVFP4_16x16", Usage.ROWWISE)):
        want = reference.quantize(x, formats.FORMATS[fmt], usage).dequantize()
        assert_bits_equal(quantize_in_shard_map(formats.FORMATS[fmt], usage, x), want)
