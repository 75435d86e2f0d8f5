"""One primitive in every mode of JAX: the bits of the reference, typed results, and no needless communication.

Eight host devices (conftest.py). Collectives are read from the compiled HLO.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import FP8_E4M3, Usage
from qshard.jax import Plane, QuantizedArray, linear, ops, quantize
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.hlo import collectives

SHAPE = (64, 1024)  # 8 shards of a row are whole runs of 128.
X = awkward_values(SHAPE, seed=1, kinds=TAME)
WHOLE = reference.quantize(X, FP8_E4M3, Usage.BOTH)
AMAX_REDUCE = ("all-reduce", ("s32[]",))  # XLA makes one for each sharded array axis.
# Rows, columns, both, rows over both axes, columns over both, replicated.
SPECS = [P("a"), P(None, "b"), P("a", "b"), P("b", "a"), P(("a", "b")), P(None, ("b", "a")), P()]


def mesh(kind, **sizes):
    sizes = sizes or {"a": 4, "b": 2}
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def both(x):
    return quantize(x, FP8_E4M3, usage=Usage.BOTH)


def assert_whole(q, whole=WHOLE):
    for name in ("rowwise", "columnwise"):
        assert_bits_equal(getattr(q, name).data, getattr(whole, name).data, name)
        assert_bits_equal(getattr(q, name).scale_inv, getattr(whole, name).scale_inv, name)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_auto_mesh(spec):
    """Shardings follow the input; 4 bytes are reduced; the cast with given scales needs no collective."""
    x = jax.device_put(X, NamedSharding(mesh(AxisType.Auto), spec))
    compiled = jax.jit(both).lower(x).compile()
    q = compiled(x)
    assert_whole(q)
    assert collectives(compiled) == [AMAX_REDUCE] * sum(entry is not None for entry in spec)
    rows, cols = (*spec, None, None)[:2]
    assert q.rowwise.data.sharding.is_equivalent_to(x.sharding, 2)
    assert q.columnwise.data.sharding.is_equivalent_to(NamedSharding(x.sharding.mesh, P(cols, rows)), 2)
    assert q.rowwise.scale_inv.sharding.is_fully_replicated
    decode = jax.jit(QuantizedArray.dequantize).lower(q).compile()
    assert collectives(decode) == []
    assert_bits_equal(decode(q), WHOLE.dequantize())


@pytest.mark.each_value
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("entered", [True, False], ids=["set_mesh", "no set_mesh"])
def test_explicit_mesh(spec, entered):
    """The types of results have the shardings."""
    m = mesh(AxisType.Explicit)
    x = jax.device_put(X, NamedSharding(m, spec))
    with jax.set_mesh(m) if entered else contextlib.nullcontext():
        compiled = jax.jit(both).lower(x).compile()
        q = compiled(x)
        assert_whole(q)
        assert collectives(compiled) == [AMAX_REDUCE] * sum(entry is not None for entry in spec)
        rows, cols = (*spec, None, None)[:2]
        assert jax.typeof(q.rowwise.data).sharding.spec == P(rows, cols)
        assert jax.typeof(q.columnwise.data).sharding.spec == P(cols, rows)
        assert jax.typeof(q.rowwise.scale_inv).sharding.spec == P()
        assert_whole(both(x))


def test_explicit_mesh_cuts_anywhere():
    """The type gives the length of a shard's rows, so any length works."""
    x = awkward_values((8, 4 * 33), kinds=TAME)
    m = mesh(AxisType.Explicit)
    compiled = jax.jit(both).lower(sharded := jax.device_put(x, NamedSharding(m, P("b", "a")))).compile()
    assert_whole(compiled(sharded), reference.quantize(x, FP8_E4M3, Usage.BOTH))
    assert collectives(compiled) == [AMAX_REDUCE] * 2


@pytest.mark.parametrize("shape", [(13, 512), (64, 96), (8, 8 * 12)], ids=str)
def test_auto_mesh_cut_unevenly(shape):
    """XLA pads shards, or gathers where runs are split: the bits are the same."""
    x = awkward_values(shape, seed=2, kinds=TAME)
    m = mesh(AxisType.Auto, a=8)
    whole = reference.quantize(x, FP8_E4M3, Usage.BOTH)
    for cut in (NamedSharding(m, P("a")), NamedSharding(m, P(None, "a"))):
        constrained = jax.jit(lambda x, cut=cut: both(jax.lax.with_sharding_constraint(x, cut)))
        assert_whole(constrained(x), whole)


@pytest.mark.parametrize("spec", [P("a", "b"), P(("a", "b")), P("a")], ids=str)
def test_shard_map(spec):
    """Types are sound: a scale is replicated if and only if it was reduced."""
    m = mesh(AxisType.Auto)
    rows, cols = (*spec, None)[:2]
    axes = tuple(np.ravel([axis for axis in spec if axis is not None]))

    def specs(scale):
        q = jax.eval_shape(both, X)
        return dataclasses.replace(q, rowwise=Plane(spec, scale), columnwise=Plane(P(cols, rows), scale))

    def local(x, reduced):
        return quantize(x, FP8_E4M3, usage=Usage.BOTH, axis_name=axes if reduced else None)

    whole = jax.jit(jax.shard_map(lambda x: local(x, True), mesh=m, in_specs=spec, out_specs=specs(P())))
    compiled = whole.lower(X).compile()
    assert collectives(compiled) == [AMAX_REDUCE]
    assert_whole(compiled(X))
    with pytest.raises(ValueError, match="out_specs"):
        jax.shard_map(lambda x: local(x, False), mesh=m, in_specs=spec, out_specs=specs(P()))(X)


def test_shard_map_with_own_scales():
    """Without axis_name, each shard is quantized as a separate tensor."""
    m = mesh(AxisType.Auto, a=8)
    local = jax.shard_map(lambda x: both(x).dequantize(), mesh=m, in_specs=P("a"), out_specs=P("a"))
    parts = [reference.quantize(part, FP8_E4M3).dequantize() for part in np.split(X, 8)]
    assert_bits_equal(local(X), np.concatenate(parts))


def test_shard_map_partly_manual():
    """One mesh axis is manual, the other left to XLA."""
    m = mesh(AxisType.Auto)
    spec = P("a", "b")
    out = dataclasses.replace(jax.eval_shape(both, X), rowwise=Plane(P("a"), P()), columnwise=None)
    local = jax.jit(
        jax.shard_map(
            lambda x: quantize(x, FP8_E4M3, axis_name="a"), mesh=m, in_specs=P("a"), out_specs=out, axis_names={"a"}
        )
    )
    q = local(jax.device_put(X, NamedSharding(m, spec)))
    assert_bits_equal(q.rowwise.data, WHOLE.rowwise.data)
    assert_bits_equal(q.rowwise.scale_inv, WHOLE.rowwise.scale_inv)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_vmap(axis):
    """Each slice has its own scale, along any axis."""
    x = awkward_values((3, 32, 64), seed=4, kinds=TAME)
    q = jax.vmap(both, in_axes=axis)(x)
    assert q.shape == np.moveaxis(x, axis, 0).shape
    assert q.rowwise.scale_inv.shape == (x.shape[axis],)
    for i, part in enumerate(np.moveaxis(x, axis, 0)):
        whole = reference.quantize(np.ascontiguousarray(part), FP8_E4M3, Usage.BOTH)
        assert_whole(jax.tree.map(lambda leaf, i=i: leaf[i], q), whole)
        assert_bits_equal(q.dequantize()[i], whole.dequantize())


def test_vmap_of_vmap_with_one_scale():
    x = awkward_values((2, 3, 4, 64), kinds=TAME)
    scales = (np.float32(3.0), np.float32(1 / 3.0))
    q = jax.vmap(jax.vmap(lambda part: quantize(part, FP8_E4M3, usage=Usage.BOTH, scales=scales)))(x)
    want = reference.quantize(x[1, 2], FP8_E4M3, Usage.BOTH, scale=scales[0])
    assert_bits_equal(q.rowwise.data[1, 2], want.rowwise.data)
    assert_bits_equal(q.columnwise.data[1, 2], want.columnwise.data)


def test_vmaps_over_different_axes_of_one_x():
    """`linear` quantizes x once for calls that do it alike; calls with other batch axes do it otherwise."""
    x = jax.random.normal(jax.random.key(0), (4, 4, 32)) * jnp.arange(1, 5)[:, None, None]
    calls = [lambda x: linear(x, jnp.eye(32), "CurrentScaling")]
    calls += [jax.vmap(calls[0], axis) for axis in (0, 1)]
    together = jax.jit(lambda x: [call(x) for call in (*calls, *calls)])(x)
    for y, call in zip(together, (*calls, *calls), strict=True):
        np.testing.assert_array_equal(y, jax.jit(call)(x))


def test_vmap_of_sharded():
    """Stacked weights sharded by rows need one reduction for all their scales."""
    x = awkward_values((3, 64, 128), seed=4, kinds=TAME)
    sharded = jax.device_put(x, NamedSharding(mesh(AxisType.Auto, a=8), P(None, "a")))
    compiled = jax.jit(jax.vmap(both)).lower(sharded).compile()
    assert collectives(compiled) == [("all-reduce", ("s32[3]",))]
    q = compiled(sharded)
    for i in range(3):
        assert_whole(jax.tree.map(lambda leaf, i=i: leaf[i], q), reference.quantize(x[i], FP8_E4M3, Usage.BOTH))


def test_scan_and_remat():
    """Codes have the same bits in a scan, and when recomputed for a gradient in which they are constants."""
    x = awkward_values((3, 32, 64), seed=4, kinds=TAME)
    _, q = jax.lax.scan(lambda carry, part: (carry, both(part)), None, x)
    assert_whole(jax.tree.map(lambda leaf: leaf[2], q), reference.quantize(x[2], FP8_E4M3, Usage.BOTH))

    @jax.checkpoint
    def product(x, s):
        return jnp.sum(quantize(jax.lax.stop_gradient(x), FP8_E4M3).dequantize() * s * x)

    want = reference.quantize(x[0], FP8_E4M3).dequantize()
    assert_bits_equal(jax.jit(jax.grad(product))(x[0], np.float32(2)), 2 * want)


@pytest.mark.parametrize("name", ["cast_transpose", "transpose"])
def test_square_transpose(name):
    """A transposed result of the operand's shape is still transposed."""
    x = awkward_values((32, 32), kinds=TAME)
    q = reference.quantize(x, FP8_E4M3, Usage.BOTH)
    codes = np.asarray(q.rowwise.data)
    if name == "transpose":
        assert_bits_equal(ops.transpose(codes, batch=0), codes.T)
        stack = np.stack([codes, codes.T])
        assert_bits_equal(ops.transpose(stack, batch=1), stack.swapaxes(1, 2))
    else:
        scale = np.float32(1.5)
        data, data_t = ops.cast_transpose(x, scale, batch=0, element=FP8_E4M3.element.name)
        assert_bits_equal(data_t, np.asarray(data).T)


def test_contract_with_xla():
    """Undocumented by XLA: without either of these two, XLA gathers arrays that it could shard."""
    runs = jax.ShapeDtypeStruct((64, 4, 128), jnp.float32)
    scale = jax.ShapeDtypeStruct((64, 4), jnp.float32)
    cast = jax.jit(lambda x, s: ops.cast_transpose(x, s, batch=0, element=FP8_E4M3.element.name))
    text = cast.lower(runs, scale).as_text()
    assert 'num_batch_dims = "2"' in text
    assert "#sdy.op_sharding_rule<([i, j, k], [i, j])->([i, j, k], [i, j, k]) {i=64, j=4, k=128}, custom>" in text
