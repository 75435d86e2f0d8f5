"""`ragged_dot` by grouped ops, run on the CPU in place of a GPU with a new enough cuBLASLt.

Exact operands give the bits of a loop of `linear` over experts. Ops are counted in the compiled text.
"""

import collections
import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qshard._core.operands import OperandSpec
from qshard.formats import Usage
from qshard.gemm_dispatch import Gpu
from qshard.jax import CodedWeight, PrimaryWeight, init_delayed, quantize, ragged_dot, value_and_grad
from qshard.jax._experts.tiles import quantize_tiles, tiles_of
from qshard.jax._gemm.target_gpu import Target, trace_for
from qshard.jax._ops.bind import disabled_checks
from qshard.recipes import Recipe, Role
from support.awkward import assert_bits_equal
from support.formats import RECIPES
from support.jax_experts import DY, ENDS, SIZES, E, K, M, N, W, X, exact, looped, mesh_of, step

NEW, OLD = Gpu((9, 0), 130800, 130800), Gpu((9, 0), 130100)
BLACKWELL = Gpu((10, 0), 130800, 130800)
CODES = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
ALL = {**{name: RECIPES[name] for name in ("CurrentScaling", "DelayedScaling", "BlockScaling")}, "E4M3": CODES}


@pytest.fixture(autouse=True, scope="module")
def grouped_ops_of_the_cpu():
    with trace_for(Target(NEW, "cpu")):
        yield


@pytest.fixture
def runs_on():
    """Trace programs for another GPU until the test ends."""
    with contextlib.ExitStack() as stack:
        yield lambda gpu: stack.enter_context(trace_for(Target(gpu, "cpu")))


def calls(function, *arguments):
    """Count the ops of a compiled program."""
    text = function.lower(*arguments).compile().as_text()
    return dict(collections.Counter(re.findall(r'custom_call_target="qshard_(\w+)"', text)))


def state_of(recipe):
    return init_delayed(recipe, (E,)) if recipe.stateful else None


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("name", ALL)
def test_a_loop_over_experts(name, layout):
    """Forward and both gradients equal the loop, with empty experts and rows beyond the last group."""
    recipe, states = ALL[name], state_of(ALL[name])
    want = looped(X, W, DY, recipe, states)
    w = W if layout == "NK" else W.swapaxes(1, 2)
    got = step(X, w, DY, SIZES, recipe, states, weight_layout=layout)
    dw = np.asarray(got[2]) if layout == "NK" else np.asarray(got[2]).swapaxes(1, 2)
    for made, expected in zip((*got[:2], dw), want[:3], strict=True):
        assert_bits_equal(np.asarray(made), expected)
    assert not np.asarray(got[0])[ENDS[-1] :].any()
    for expert, seen in want[3].items():
        mine = jax.tree.map(lambda leaf, e=expert: leaf[e], got[3])
        jax.tree.map(lambda a, b: assert_bits_equal(np.asarray(a), np.asarray(b)), mine, seen)


@pytest.mark.parametrize("name", ALL)
def test_ops_of_a_step(name):
    """A step quantizes each operand once, both planes together, and multiplies codes."""
    recipe = ALL[name]
    x, w, dy = exact(M, 256), exact(E, 128, 256), exact(M, 128)
    found = calls(step, x, w, dy, SIZES, recipe, state_of(recipe))
    if name == "BlockScaling":
        want = {"quantize_block_both_t_rows": 2, "quantize_square_both": 1, "gemm_grouped_block": 2}
        want |= {"gemm_grouped_block_k": 1}
    else:
        want = {"amax_grouped": 2, "cast_transpose_grouped": 2, "cast_transpose": 1, "gemm_grouped": 2}
        want |= {"gemm_grouped_k": 1, "amax_tensor": 1}
    others = {
        op: n for op, n in found.items() if op not in want and not op.startswith(("group_rows", "scale_", "delayed"))
    }
    assert ({op: found.get(op) for op in want}, others) == (want, {})


@pytest.mark.each_value
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("tokens", [0, 5, 200])
def test_codes_are_those_of_each_expert(name, tokens):
    """Codes and scales in padded rows are those of `quantize` on the rows of one expert alone."""
    fmt = ALL[name].format(Role.ACTIVATION)
    sizes = SIZES if tokens == 200 else np.array([3, 0, 0, 1, 0, 1]) if tokens else np.zeros(E, np.int32)
    x = np.random.default_rng(0).standard_normal((tokens, K)).astype(np.float32) ** 5
    tiles = tiles_of(ALL[name], tokens, sizes)
    spec = OperandSpec(fmt, Usage.BOTH, Role.ACTIVATION)
    q, _ = quantize_tiles(jnp.asarray(x), spec, tiles, axes=(), seeds=None, scales=None)
    stops, ends = np.asarray(tiles.stops), np.cumsum(sizes)
    for expert, size in enumerate(sizes):
        if not size:
            continue
        start, unit = 0 if expert == 0 else stops[expert - 1], fmt.block_shape()[1] if fmt.block else 1
        alone = quantize(x[ends[expert] - size : ends[expert]], fmt, usage=Usage.BOTH)
        assert_bits_equal(np.asarray(q.rowwise.data[start : start + size]), np.asarray(alone.rowwise.data))
        assert_bits_equal(np.asarray(q.columnwise.data[:, start : start + size]), np.asarray(alone.columnwise.data))
        if fmt.block is None:
            assert_bits_equal(np.asarray(q.rowwise.scale_inv[expert]), np.asarray(alone.rowwise.scale_inv))
        else:
            assert_bits_equal(
                np.asarray(q.rowwise.scale_inv[start : start + size]), np.asarray(alone.rowwise.scale_inv)
            )
            columns = slice(start // unit, start // unit + -(-size // unit))
            assert_bits_equal(np.asarray(q.columnwise.scale_inv[:, columns]), np.asarray(alone.columnwise.scale_inv))
    assert not np.asarray(q.rowwise.data.astype(jnp.float32))[stops[-1] :].any()


@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling"])
def test_weights_as_codes(name):
    """Both planes of codes are multiplied as they are. A rowwise plane alone is transposed once, in backward."""
    recipe = ALL[name]
    want = step(X, W, DY, SIZES, recipe)

    @jax.jit
    def run(x, codes, sink):
        given = functools.partial(ragged_dot, group_sizes=SIZES, recipe=recipe, weight_layout="NK")
        y, pull = jax.vjp(lambda x, w: given(x, CodedWeight(codes, w, None)), x, sink)
        return (y, *pull(DY))

    for usage, transposes in ((Usage.BOTH, 0), (Usage.ROWWISE, 1)):
        codes = jax.jit(jax.vmap(lambda w, usage=usage: quantize(w, recipe.weight, usage=usage)))(W)
        for made, expected in zip(run(X, codes, W), want, strict=False):
            assert_bits_equal(np.asarray(made), np.asarray(expected))
        found = calls(run, X, codes, W)
        assert found.get("transpose", 0) == transposes
        assert not [op for op in found if op.startswith(("cast_tensor", "quantize_square", "dequantize"))]
    loss = jax.jit(value_and_grad(lambda w: jnp.sum(ragged_dot(X, w, SIZES, recipe, weight_layout="NK") * DY)))
    assert_bits_equal(np.asarray(loss(PrimaryWeight.of(codes))[1]), np.asarray(want[2]))


def test_without_an_op_of_codes(runs_on):
    """A library that multiplies values, and no codes with one scale, multiplies the codes as bfloat16."""
    want = step(X, W, DY, SIZES, CODES)
    runs_on(NEW._replace(grouped_cublaslt=130400))
    for made, expected in zip(step(X, W, DY, SIZES, CODES), want, strict=True):
        if expected is not None:
            assert_bits_equal(np.asarray(made), np.asarray(expected))
    found = calls(step, X, W, DY, SIZES, CODES)
    assert {"gemm_grouped_values_nt", "gemm_grouped_values_nn", "gemm_grouped_values_tn"} <= set(found)
    runs_on(OLD)
    assert not [op for op in calls(step, X, W, DY, SIZES, CODES) if op.startswith("gemm")]


@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_formats_without_a_product_of_codes(name):
    """Dequantized values are multiplied by the ops of values."""
    want = looped(X, W, DY, RECIPES[name])
    got = step(X, W, DY, SIZES, RECIPES[name])
    for made, expected in zip(got[:2], want[:2], strict=True):
        assert_bits_equal(np.asarray(made), expected)
    assert "gemm_grouped_values_tn" in calls(step, X, W, DY, SIZES, RECIPES[name])


@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("name", ["MXFP8", "NVFP4"])
def test_codes_on_blackwell(name, layout, runs_on):
    """Codes of MXFP8 and NVFP4 are multiplied, all three products, and each operand is quantized once."""
    want = looped(X, W, DY, RECIPES[name])
    runs_on(BLACKWELL)
    w = W if layout == "NK" else W.swapaxes(1, 2)
    y, dx, dw, _ = step(X, w, DY, SIZES, RECIPES[name], weight_layout=layout)
    dw = np.asarray(dw) if layout == "NK" else np.asarray(dw).swapaxes(1, 2)
    for made, expected in zip((np.asarray(y), np.asarray(dx), dw), want[:3], strict=True):
        if name == "MXFP8":
            assert_bits_equal(made, expected)
        else:  # The loop rounds values to bfloat16, by 2^-8.
            np.testing.assert_allclose(made, expected, rtol=0, atol=2**-8 * np.abs(expected).max())
    found = calls(step, X, w, DY, SIZES, RECIPES[name], None, layout)
    products = {"MXFP8": {"gemm_grouped_block": 2, "gemm_grouped_mxfp8_tn": 1}}
    products["NVFP4"] = {"gemm_grouped_nvfp4": 2, "gemm_grouped_nvfp4_k": 1}
    assert {op: n for op, n in found.items() if op.startswith("gemm")} == products[name]
    assert not [op for op in found if op.startswith(("dequantize", "transpose"))]
    assert tiles_of(RECIPES[name], M, SIZES).tile_rows == 32
    runs_on(NEW)
    assert tiles_of(RECIPES[name], M, SIZES).tile_rows == (32 if name == "MXFP8" else 16)


def test_a_weight_in_blocks_along_one_axis_on_blackwell(runs_on):
    """Backward has no plane of codes whose last axis it contracts, and multiplies values."""
    runs_on(BLACKWELL)
    recipe = Recipe(weight="MXFP8_E4M3", activation="MXFP8_E4M3", gradient="MXFP8_E4M3")
    found = calls(step, X, W, DY, SIZES, recipe)
    assert (found.get("gemm_grouped_block"), found.get("gemm_grouped_mxfp8_tn")) == (1, 1)
    for made, expected in zip(step(X, W, DY, SIZES, recipe)[:3], looped(X, W, DY, RECIPES["MXFP8"])[:3], strict=True):
        assert_bits_equal(np.asarray(made), expected)


def test_float16(runs_on):
    """Without the op, products of codes are scaled before float16 rounds them: they exceed its range."""
    runs_on(None)
    x, w, dy = (each.astype(np.float16) for each in (X, W, DY))
    found = step(x, w, dy, SIZES, ALL["CurrentScaling"], None)
    wide = step(*(each.astype(np.float32) for each in (x, w, dy)), SIZES, ALL["CurrentScaling"], None)
    for a, b in zip(found[:3], wide[:3], strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=2**-10, atol=2**-14 * np.abs(b).max())


def test_sizes_that_do_not_fit():
    """Widths that are not multiples of 16 multiply values."""
    x, w, dy = exact(M, 40), exact(E, 24, 40, seed=1), exact(M, 24, seed=2)
    want = looped(x, w, dy, CODES)
    for made, expected in zip(step(x, w, dy, SIZES, CODES)[:3], want[:3], strict=True):
        assert_bits_equal(np.asarray(made), expected)


# --- without a recipe ---


def plain(x, w, sizes, layout):
    """`jax.lax.ragged_dot` in float64 with numpy."""
    y, ends = np.zeros((len(x), w.shape[1 if layout == "NK" else 2])), np.cumsum(sizes)
    for expert, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        own = w[expert].T if layout == "NK" else w[expert]
        y[end - size : end] = x[end - size : end] @ own
    return y


def values_step(x, w, dy, sizes=SIZES, layout="NK", recipe=None, **options):
    call = functools.partial(ragged_dot, group_sizes=sizes, recipe=recipe, weight_layout=layout, **options)
    y, pull = jax.vjp(lambda x, w: call(x, w), x, w)
    return (y, *pull(dy))


def values(dtype, layout="NK", exactly=True):
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.integers(-3, 4, shape) if exactly else rng.standard_normal(shape)).astype(np.float32)  # noqa: E731
    x, dy, w = draw(M, K), draw(M, N), draw(E, *((N, K) if layout == "NK" else (K, N)))
    return tuple(jnp.asarray(t, dtype) for t in (x, w, dy))


def expected_step(x, w, dy, sizes=SIZES, layout="NK"):
    x, w, dy = (np.asarray(t, np.float64) for t in (x, w, dy))
    y = plain(x, w, sizes, layout)
    dx = plain(dy, w.swapaxes(1, 2), sizes, layout)
    ends = np.cumsum(sizes)
    pairs = [(dy[end - n : end], x[end - n : end]) for n, end in zip(sizes, ends, strict=True)]
    dw = np.stack([a.T @ b if layout == "NK" else b.T @ a for a, b in pairs])
    return y, dx, dw


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["NK", "KN"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("gpu", [NEW, OLD, None], ids=["ops", "XLA", "no GPU"])
def test_values(dtype, layout, gpu, runs_on):
    """Sums of integers are exact in fp32, so results are the float64 products, rounded once."""
    runs_on(gpu)
    given = values(dtype, layout)
    run = jax.jit(functools.partial(values_step, layout=layout))
    for made, want in zip(run(*given), expected_step(*given, layout=layout), strict=True):
        assert made.dtype == dtype
        assert_bits_equal(np.asarray(made), np.asarray(jnp.asarray(want, dtype)))
    found = calls(run, *given)
    used = gpu is NEW and dtype != jnp.float32
    assert sum(found.values()) == (3 if used else 0)


def test_values_near_float64():
    """A product is rounded to bfloat16 once: sums in fp32 of K terms add at most K * 2^-24 of the absolute sum."""
    given = values(jnp.bfloat16, exactly=False)
    x, w, dy = (np.abs(np.asarray(t, np.float64)) for t in given)
    bounds = expected_step(x, w, dy)
    for made, want, terms in zip(jax.jit(values_step)(*given), expected_step(*given), bounds, strict=True):
        error = np.abs(np.asarray(made, np.float64) - want)
        assert (error <= 2.0**-8 * np.abs(want) + M * 2.0**-24 * terms).all()


def test_weights_in_another_dtype():
    """fp32 weights are cast to the dtype of x, and get fp32 gradients that were not rounded to it."""
    x, w, dy = values(jnp.bfloat16)
    y, dx, dw = jax.jit(values_step)(x, w.astype(jnp.float32), dy)
    assert (y.dtype, dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    np.testing.assert_array_equal(dw, expected_step(x, w, dy)[2])


@pytest.mark.parametrize("sizes", [[0] * E, [M, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 7]], ids=str)
def test_values_of_empty_experts(sizes):
    given, sizes = values(jnp.bfloat16), np.array(sizes, np.int32)
    run = jax.jit(functools.partial(values_step))
    for made, want in zip(run(*given, sizes), expected_step(*given, sizes), strict=True):
        assert_bits_equal(np.asarray(made), np.asarray(jnp.asarray(want, jnp.bfloat16)))


@pytest.mark.parametrize("more", [[0, 12, 0, 0, 0, 0], [0, -1, 0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_more_rows_than_there_are(dtype, more):
    """The result has NaN, and nothing outside of the operands is read or written."""
    x, w, dy = values(dtype)
    sizes = SIZES + np.array(more, np.int32)
    y, dx, _ = jax.jit(values_step)(x, w, dy, sizes)
    assert np.isnan(np.asarray(y, np.float32)[0, 0])
    assert np.isnan(np.asarray(dx, np.float32)[0, 0])
    y = jax.jit(lambda sizes: ragged_dot(X, W, sizes, "CurrentScaling", weight_layout="NK"))(sizes)
    assert np.isnan(y).all()


def test_transforms_of_values():
    """`vmap`, `jax.checkpoint` in a scan, and an export have the bits of plain calls."""
    x, w, dy = values(jnp.bfloat16)
    want = jax.jit(values_step)(x, w, dy)
    half = jnp.asarray(0.5, jnp.bfloat16)
    mapped = jax.jit(jax.vmap(values_step, in_axes=(0, None, 0)))(jnp.stack([x, x * half]), w, jnp.stack([dy, dy]))
    for made, expected in zip(mapped, want, strict=True):
        assert_bits_equal(np.asarray(made[0]), np.asarray(expected))
    assert_bits_equal(np.asarray(mapped[0][1] / half), np.asarray(want[0]))
    sizes = jnp.stack([jnp.asarray(SIZES), jnp.zeros(E, jnp.int32)])
    each = jax.jit(jax.vmap(values_step, in_axes=(None, 0, None, 0)))(x, jnp.stack([w, w]), dy, sizes)
    assert_bits_equal(np.asarray(each[2][0]), np.asarray(want[2]))
    assert not np.asarray(each[0][1], np.float32).any()

    def loss(w, x):
        def layer(h, _):
            y = ragged_dot(h, w, SIZES, None, weight_layout="NK")
            return jax.nn.silu(ragged_dot(y, w, SIZES, None, weight_layout="KN")), None

        return jnp.sum(jax.lax.scan(jax.checkpoint(layer), x, None, length=2)[0].astype(jnp.float32))

    grad = jax.jit(jax.grad(loss))
    small = w * jnp.asarray(2.0**-6, jnp.bfloat16)
    exported = jax.export.export(grad, disabled_checks=disabled_checks())(small, x)
    again = jax.export.deserialize(exported.serialize()).call(small, x)
    assert np.isfinite(np.asarray(again, np.float32)).all()
    assert_bits_equal(np.asarray(again), np.asarray(grad(small, x)))


CUTS = {
    "experts": P("expert"),
    "experts and N": P("expert", "fsdp"),
    "N": P(None, ("expert", "fsdp")),
    "K": P(None, None, "fsdp"),
    "whole": P(),
}


@pytest.mark.each_value
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("recipe", [None, CODES, RECIPES["BlockScaling"]], ids=["values", "E4M3", "blocks"])
def test_auto_meshes(recipe, cut):
    """Weights and tokens of any sharding give the results of one device, on eight."""
    mesh, sizes = mesh_of(expert=2, fsdp=4), SIZES
    given = values(jnp.bfloat16) if recipe is None else (X, W, DY)
    call = functools.partial(ragged_dot, group_sizes=sizes, recipe=recipe, weight_layout="NK", weight_spec=CUTS[cut])

    @jax.jit
    def run(x, w, dy):
        y, pull = jax.vjp(lambda x, w: call(x, w), x, w)
        return (y, *pull(dy))

    want = expected_step(*given) if recipe is None else looped(*given, recipe)
    with jax.set_mesh(mesh):
        shardings = (P(("expert", "fsdp")), CUTS[cut], P(("expert", "fsdp")))
        moved = [jax.device_put(t, NamedSharding(mesh, spec)) for t, spec in zip(given, shardings, strict=True)]
        got = run(*moved)
        found = calls(run, *moved)
    assert [op for op in found if op.startswith("gemm_grouped")]
    for made, expected in zip(got, want[:3], strict=True):
        assert_bits_equal(np.asarray(made), np.asarray(jnp.asarray(expected, made.dtype)))


@pytest.mark.parametrize("recipe", [None, CODES], ids=["values", "E4M3"])
def test_meshes_that_are_partly_manual(recipe):
    """In a `shard_map` over some mesh axes, XLA gathers what others shard."""
    mesh, cut = mesh_of(expert=2, fsdp=4), P(None, None, "expert")
    x, w, dy = values(jnp.float16)
    want = jax.jit(functools.partial(values_step, recipe=recipe))(x, w, dy)
    rows, own = P("fsdp"), functools.partial(values_step, recipe=recipe)
    run = jax.shard_map(own, mesh=mesh, in_specs=(rows, P(), rows), out_specs=(rows, rows, P()), axis_names={"fsdp"})
    with jax.set_mesh(mesh):
        y, dx, dw = jax.jit(run)(jnp.tile(x, (4, 1)), jax.device_put(w, NamedSharding(mesh, cut)), jnp.tile(dy, (4, 1)))
    for made, expected in ((y, want[0]), (dx, want[1])):
        assert_bits_equal(np.asarray(made), np.tile(np.asarray(expected), (4, 1)))
    np.testing.assert_array_equal(dw, 4 * want[2])


@pytest.mark.parametrize("kept", [True, False])
def test_values_in_shard_map(kept):
    """Weights are gathered in the dtype of x, and gradients are reduce-scattered in the dtype of w."""
    mesh, cut = mesh_of(fsdp=8), P(None, "fsdp")
    x, w, dy = values(jnp.bfloat16)
    w = w.astype(jnp.float32)
    options = {"weight_spec": cut, "gather_axis": "fsdp", "reshard_after_forward": not kept}
    own = functools.partial(values_step, **options)
    rows = P("fsdp")
    run = jax.jit(jax.shard_map(own, mesh=mesh, in_specs=(rows, cut, rows), out_specs=(rows, rows, cut)))
    got = run(jnp.tile(x, (8, 1)), w, jnp.tile(dy, (8, 1)))
    want = expected_step(x, w, dy)
    for made, expected in zip(got[:2], want, strict=False):
        for part in np.split(np.asarray(made), 8):
            assert_bits_equal(part, np.asarray(jnp.asarray(expected, jnp.bfloat16)))
    np.testing.assert_array_equal(got[2], 8 * want[2])
    text = run.lower(jnp.tile(x, (8, 1)), w, jnp.tile(dy, (8, 1))).compile().as_text()
    assert set(re.findall(r"(\w+)\[[\d,]*\]\S* all-gather\(", text)) == {"u16"}


@pytest.mark.parametrize(
    ("call", "kind", "text"),
    [
        (
            lambda: ragged_dot(X, jax.vmap(lambda w: quantize(w, CODES.weight))(W), SIZES, None, weight_layout="NK"),
            TypeError,
            r"ragged_dot: w \(.*\) has codes, but recipe is None; pass the recipe of its format",
        ),
        (
            lambda: ragged_dot(X, W, SIZES, None, weight_layout="NK", state=init_delayed("DelayedScaling", (E,))),
            ValueError,
            "ragged_dot: state has scales, but recipe is None; pass DelayedScaling, or leave state out",
        ),
        (
            lambda: ragged_dot(X, W[:, :, :8], SIZES, None, weight_layout="NK"),
            ValueError,
            r"does not fit x \(200, 96\)",
        ),
        (lambda: ragged_dot(X, W, SIZES[:2], None, weight_layout="NK"), ValueError, "not one integer for each of 6"),
        (lambda: ragged_dot(X, W, SIZES, None), ValueError, r"weight_layout \(None\) is not a layout"),
    ],
)
def test_errors_without_a_recipe(call, kind, text):
    with pytest.raises(kind, match=text):
        call()
