"""SwiGLU and RMSNorm in JAX: sharded arrays are not sent, with the bits of one device; transforms; codes as results."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import qshard.jax as qj
from qshard.formats import FP8_E4M3, MXFP8_E4M3, NVFP4, Usage
from qshard.reference import _activation as activation
from support import hlo
from support import oracle_layers as oracle
from support.awkward import assert_bits_equal, awkward_values
from support.pairs import each_value

KINDS = ("normal", "ties", "wide", "max")
CUTS = {"rows": P(("a", "b"), None), "K": P(None, ("a", "b")), "both": P("a", "b")}


def drawn(shape, dtype="bfloat16", kinds=KINDS):
    return [awkward_values(shape, seed, dtype, kinds=kinds) for seed in range(3)]


def step(gate, up, grad):
    """Return h and both gradients."""
    h, back = jax.vjp(qj.swiglu, gate, up)
    return h, *back(grad)


def expected(gate, up, grad):
    with np.errstate(all="ignore"):
        return oracle.swiglu(gate, up, lead=0)[0], *oracle.swiglu_grad(gate, up, grad, lead=0)[:2]


def assert_step(actual, arrays):
    for mine, want in zip(actual, expected(*arrays), strict=True):
        assert_bits_equal(mine, want)


def mesh_of(kind):
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)


@pytest.mark.each_value
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("mode", ["Auto", "Explicit", "shard_map"])
def test_shards_stay_where_they_are(mode, cut):
    arrays = drawn((16, 1024))
    mesh = mesh_of(AxisType.Explicit if mode == "Explicit" else AxisType.Auto)
    run = jax.shard_map(step, mesh=mesh, in_specs=cut, out_specs=cut) if mode == "shard_map" else step
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, NamedSharding(mesh, cut)) for x in arrays]
        compiled = jax.jit(run).lower(*placed).compile()
        assert hlo.kinds(compiled) == []
        actual = compiled(*placed)
    assert all(x.sharding.is_equivalent_to(placed[0].sharding, 2) for x in actual)
    assert_step(actual, arrays)


def test_gradient_of_what_shards_share_is_summed():
    """In `shard_map`, `up` is replicated along an axis: its gradient is summed over it."""
    gate, up, grad = (x.astype(np.float32) for x in drawn((8, 16), "float16"))
    mesh = mesh_of(AxisType.Auto)

    def local(gate, up, grad):
        return jax.vjp(qj.swiglu, gate, up)[1](grad)[1]

    up = up[:2]
    summed = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=(P("a"), P(), P("a")), out_specs=P()))(gate, up, grad)
    parts = [oracle.swiglu_grad(g, up, d, lead=0)[1] for g, d in zip(np.split(gate, 4), np.split(grad, 4), strict=True)]
    np.testing.assert_allclose(summed, sum(parts), rtol=1e-5, atol=1e-5 * np.abs(parts).max())


def test_explicit_up_is_cut_as_gate():
    gate, up, grad = drawn((16, 1024))
    with jax.set_mesh(mesh := mesh_of(AxisType.Explicit)):
        cut = NamedSharding(mesh, P("a", "b"))
        placed = jax.device_put(gate, cut), jax.device_put(up, NamedSharding(mesh, P())), jax.device_put(grad, cut)
        assert_step(jax.jit(step)(*placed), (gate, up, grad))


@pytest.mark.parametrize("transform", [jax.vmap, jax.checkpoint])
def test_transforms(transform):
    arrays = drawn((4, 3, 256))
    assert_step(jax.jit(lambda *a: step_of(transform(qj.swiglu), *a))(*arrays), arrays)


def step_of(function, gate, up, grad):
    h, back = jax.vjp(function, gate, up)
    return h, *back(grad)


@pytest.mark.each_value
@pytest.mark.parametrize("fmt", [FP8_E4M3, MXFP8_E4M3, NVFP4], ids=str)
@pytest.mark.parametrize("mode", ["eager", "Auto", "Explicit", "shard_map", "vmap"])
def test_quantize_is_that_of_the_result(fmt, mode):
    gate, up, _ = drawn((64, 512), kinds=("normal", "outlier"))
    cut = P("a", "b") if fmt is FP8_E4M3 else P("a")
    quantized = functools.partial(qj.swiglu_quantize, fmt=fmt, usage=Usage.BOTH)
    want = oracle.swiglu(gate, up, lead=0)[0]
    if mode == "vmap":
        actual = jax.vmap(quantized)(gate.reshape(2, 32, 512)[:, None], up.reshape(2, 32, 512)[:, None])
        wants = [qj.quantize(part[None], fmt, usage=Usage.BOTH) for part in np.split(want, 2)]
        want_q = jax.tree.map(lambda *leaves: np.stack(leaves), *wants)
    else:
        want_q = qj.quantize(want, fmt, usage=Usage.BOTH)
        if mode == "eager":
            actual = quantized(gate, up)
        else:
            with jax.set_mesh(mesh := mesh_of(AxisType.Explicit if mode == "Explicit" else AxisType.Auto)):
                placed = [jax.device_put(x, NamedSharding(mesh, cut)) for x in (gate, up)]
                run = jax.jit(quantized)
                if mode == "shard_map":
                    names = ("a", "b") if fmt is FP8_E4M3 else "a"
                    whole = functools.partial(quantized, axis_name=names, spec=cut)
                    run = jax.jit(
                        jax.shard_map(lambda *a: whole(*a).dequantize(), mesh=mesh, in_specs=cut, out_specs=cut)
                    )
                    assert_bits_equal(run(*placed), want_q.dequantize())
                    return
                actual = run(*placed)
    for mine, other in zip(jax.tree.leaves(actual), jax.tree.leaves(want_q), strict=True):
        assert_bits_equal(mine, other)


def test_amax_is_of_the_pass_that_makes_it():
    text = jax.jit(lambda *a: qj.swiglu_quantize(*a, "FP8_E4M3")).lower(*drawn((8, 128))[:2]).as_text()
    assert "qshard_swiglu" in text
    assert "qshard_amax_tensor" not in text


def test_codes_have_no_derivative():
    with pytest.raises(TypeError, match="swiglu_quantize: quantization has no derivative; use"):
        jax.grad(lambda x: qj.swiglu_quantize(x, x, "FP8_E4M3").dequantize().sum())(jnp.ones((2, 4)))


# --- RMSNorm ---

EPS = 1e-5
ROW_CUTS = {"outer": P("a"), "inner": P(None, ("a", "b")), "both": P("a", "b")}


def norm_arrays(shape, dtype="bfloat16", weight_dtype="float32", kinds=KINDS):
    x, grad = (awkward_values(shape, seed, dtype, kinds=kinds) for seed in range(2))
    return x, awkward_values(shape[-1:], 2, weight_dtype, kinds=("normal",)), grad


def norm_step(x, weight, grad):
    """Return y and both gradients."""
    y, back = jax.vjp(functools.partial(qj.rms_norm, eps=EPS), x, weight)
    return y, *back(grad)


def assert_norm(actual, x, weight, grad):
    """Compare y and dx bit for bit; the gradient of the weight is a sum over devices, in another order."""
    rows = (-1, x.shape[-1]) if x.size else (0, x.shape[-1])
    with np.errstate(all="ignore"):
        y, rstd, _ = oracle.rms_norm(x, weight, eps=EPS, lead=0)
        given = (x.reshape(rows), weight, rstd.reshape(-1), grad.reshape(rows))
        dx, dweight, _ = oracle.rms_norm_grad(*given, lead=0, rows=activation.SUM_ROWS)
    for mine, want in zip(actual[:2], (y, dx.reshape(x.shape)), strict=True):
        assert_bits_equal(mine, want)
    scale = np.abs(dweight).max()
    np.testing.assert_allclose(np.asarray(actual[2], np.float32), dweight, rtol=1e-5, atol=1e-5 * scale)


@each_value(mode=["Auto", "Explicit", "shard_map"], cut=ROW_CUTS, weight_cut={"whole": P(), "cut": P("b")})
def test_norm_moves_no_rows(mode, cut, weight_cut):
    x, weight, grad = arrays = norm_arrays((8, 256, 512), "float32", kinds=("normal", "outlier"))
    if mode == "shard_map" and weight_cut != P():
        pytest.skip("a shard of the weight is not the weight")
    mesh = mesh_of(AxisType.Explicit if mode == "Explicit" else AxisType.Auto)
    specs = (cut, weight_cut, cut)
    run = (
        jax.shard_map(norm_step, mesh=mesh, in_specs=specs, out_specs=(cut, cut, P()))
        if mode == "shard_map"
        else norm_step
    )
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip(arrays, specs, strict=True)]
        compiled = jax.jit(run).lower(*placed).compile()
        moved = [(kind, shapes) for kind, shapes in hlo.collectives(compiled)]
        assert all(shapes == (f"f32[{weight.size}]",) for _, shapes in moved), moved
        assert [kind for kind, _ in moved].count("all-gather") == (weight_cut != P())
        actual = compiled(*placed)
    assert all(x.sharding.is_equivalent_to(placed[0].sharding, 3) for x in actual[:2])
    assert_norm(actual, x, weight, grad)


def test_norm_of_what_is_cut_along_k():
    """x sharded along K is gathered, with the same bits."""
    arrays = norm_arrays((64, 512), "float32", kinds=("normal",))
    for kind in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh := mesh_of(kind)):
            placed = [jax.device_put(a, NamedSharding(mesh, P("a", "b") if a.ndim > 1 else P("b"))) for a in arrays]
            actual = jax.jit(norm_step)(*placed)
        assert_norm(actual, *arrays)
        if kind is AxisType.Explicit:
            assert actual[1].sharding.spec == P("a", "b")
            assert actual[2].sharding.spec == P("b")


@pytest.mark.parametrize("transform", ["vmap", "vmap of both", "remat", "grad of a sum"])
def test_norm_under_transforms(transform):
    x, weight, grad = norm_arrays((4, 6, 64), "float32", kinds=("normal",))
    norm = functools.partial(qj.rms_norm, eps=EPS)
    want = np.asarray(jax.jit(norm)(x, weight))
    if transform == "vmap":
        assert_bits_equal(jax.jit(jax.vmap(norm, in_axes=(0, None)))(x, weight), want)
    elif transform == "vmap of both":
        assert_bits_equal(jax.jit(jax.vmap(norm))(x, np.stack([weight] * 4)), want)
    else:
        norm = jax.checkpoint(norm) if transform == "remat" else norm

        def plain(x, weight):
            return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + EPS) * weight

        def loss(of):
            return jax.jit(jax.grad(lambda x, weight: jnp.sum(of(x, weight) * grad), argnums=(0, 1)))(x, weight)

        for mine, other in zip(loss(norm), loss(plain), strict=True):  # Sums in another order.
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.each_value
@pytest.mark.parametrize("fmt", [FP8_E4M3, MXFP8_E4M3, NVFP4], ids=str)
@pytest.mark.parametrize("mode", ["eager", "Auto", "Explicit"])
def test_quantize_is_that_of_the_norm(fmt, mode):
    x, weight, _ = norm_arrays((64, 512), kinds=("normal", "outlier"))
    quantized = functools.partial(qj.rms_norm_quantize, eps=EPS, fmt=fmt, usage=Usage.BOTH)
    want = qj.quantize(oracle.rms_norm(x, weight, eps=EPS, lead=0)[0], fmt, usage=Usage.BOTH)
    if mode == "eager":
        actual = quantized(x, weight)
    else:
        with jax.set_mesh(mesh := mesh_of(getattr(AxisType, mode))):
            actual = jax.jit(quantized)(
                jax.device_put(x, NamedSharding(mesh, P("a"))), jax.device_put(weight, NamedSharding(mesh, P()))
            )
    for mine, other in zip(jax.tree.leaves(actual), jax.tree.leaves(want), strict=True):
        assert_bits_equal(mine, other)


def test_amax_of_the_norm_is_of_its_pass():
    x, weight, _ = norm_arrays((8, 128))
    text = jax.jit(lambda *a: qj.rms_norm_quantize(*a, EPS, "FP8_E4M3")).lower(x, weight).as_text()
    assert "qshard_rms_norm" in text
    assert "qshard_amax_tensor" not in text


def test_eps_that_is_traced():
    with pytest.raises(TypeError, match=r"rms_norm: eps .* is traced"):
        jax.jit(qj.rms_norm)(jnp.ones((2, 4)), jnp.ones(4), 1.0)
