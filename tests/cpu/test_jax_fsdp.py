"""FSDP: fp32 shards, quantized before the gather; codes gathered; gradients cut as the weights are.

On a CPU, XLA makes a reduce-scatter an all-reduce and a slice, and may merge the gathers of forward and backward;
test_jax_h100.py has the collectives of a GPU.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import FP8_E4M3, Usage
from qshard.jax import compute_scales, gather, linear, quantize
from qshard.recipes import CurrentScaling
from support.awkward import BFLOAT16, TAME, assert_bits_equal, awkward_values
from support.hlo import collectives

RECIPE = CurrentScaling()
N, K = 64, 128
W = awkward_values((N, K), seed=1, kinds=TAME)
WHOLE = reference.quantize(W, FP8_E4M3, Usage.BOTH)
KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=lambda kind: kind.name)


def mesh_of(kind, **sizes):
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def step(x, w, dy, **options):
    """y and the gradients of sum(y * dy): dy is given, since rounding makes jumps of what differs in the last bit."""
    y, vjp = jax.vjp(lambda x, w: linear(x, w, RECIPE, **options), x, w)
    return y, *vjp(dy)


X, DY = values(32, K), values(32, N, seed=2)
EXPECTED = jax.tree.map(np.asarray, jax.jit(step)(X, W, DY))


def assert_step(actual, w_sharding=None, x_sharding=None):
    """The step on one device: its operands to the bit, so its products up to the order of fp32 sums."""
    for got, want in zip(actual, EXPECTED, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    if w_sharding is not None:
        assert actual[2].sharding.is_equivalent_to(w_sharding, 2)
        assert actual[1].sharding.is_equivalent_to(x_sharding, X.ndim)


@KINDS
@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("spec", [P("fsdp"), P(None, "fsdp")], ids=["rows", "columns"])
def test_law(kind, shards, spec):
    """gather(quantize(shards)) == quantize(whole): codes of both planes and scales; bytes travel and nothing else."""
    w = awkward_values((N, 8 * K), seed=1, kinds=TAME)
    mesh = mesh_of(kind, fsdp=shards)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(w, NamedSharding(mesh, spec))
        program = jax.jit(lambda w: gather(quantize(w, FP8_E4M3, usage=Usage.BOTH), "fsdp", spec=spec))
        compiled = program.lower(sharded).compile()
        q = compiled(sharded)
    whole = reference.quantize(w, FP8_E4M3, Usage.BOTH)
    for plane, oracle in ((q.rowwise, whole.rowwise), (q.columnwise, whole.columnwise)):
        assert plane.data.sharding.is_fully_replicated
        assert_bits_equal(plane.data, oracle.data)
        assert_bits_equal(plane.scale_inv, oracle.scale_inv)
    if shards > 1:
        kinds = [kind for kind, _ in collectives(compiled)]
        gathered = [result for kind, results in collectives(compiled) if kind == "all-gather" for result in results]
        assert kinds == sorted(["all-reduce", *["all-gather"] * (len(kinds) - 1)])
        assert len(gathered) == 2
        assert all(result.startswith("u8[") for result in gathered)


@pytest.mark.parametrize("shards", [3, 5])
def test_law_on_any_number_of_devices(shards):
    """With shard_map, the rows of a shard are what they are."""
    mesh = jax.make_mesh((shards,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:shards])
    w = awkward_values((7 * shards, 33), seed=2, dtype=BFLOAT16, kinds=TAME)

    def local(w):
        q = gather(quantize(w, FP8_E4M3, usage=Usage.BOTH, axis_name="fsdp"), "fsdp")
        return q.rowwise.data[None], q.columnwise.data[None], q.dequantize()[None]

    gathered = jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"))(w)
    # XLA takes an element of an axis that is cut by summing over devices, which would make +0 of -0.
    rowwise, columnwise, decoded = map(np.asarray, gathered)
    whole = reference.quantize(w, FP8_E4M3, Usage.BOTH)
    for device in range(shards):
        assert_bits_equal(rowwise[device], whole.rowwise.data)
        assert_bits_equal(columnwise[device], whole.columnwise.data)
        assert_bits_equal(decoded[device], whole.dequantize())


@KINDS
@pytest.mark.parametrize("given", [False, True], ids=["own scales", "compute_scales"])
def test_step(kind, given):
    """Forward and backward as on one device. Only codes are gathered, and the gradient comes back cut."""
    mesh = mesh_of(kind, fsdp=8)
    rows = NamedSharding(mesh, P("fsdp"))

    def program(x, w, dy):
        scales = compute_scales([w], RECIPE)[0] if given else None
        return step(x, w, dy, weight_spec=P("fsdp", None), gather_axis="fsdp", weight_scales=scales)

    with jax.set_mesh(mesh):
        args = jax.device_put((X, W, DY), (rows, rows, rows))
        compiled = jax.jit(program).lower(*args).compile()
        assert_step(compiled(*args), rows, rows)
    assert {kind for kind, _ in collectives(compiled)} == {"all-gather", "all-reduce"}
    gathers = [results for kind, results in collectives(compiled) if kind == "all-gather"]
    assert gathers == [(f"u8[{N},{K}]",)] * 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_step_in_shard_map(check_vma):
    mesh = mesh_of(AxisType.Auto, fsdp=8)
    rows = NamedSharding(mesh, P("fsdp"))

    def local(x, w, dy):
        scales = compute_scales([w], RECIPE, axis_name="fsdp")[0]
        return step(x, w, dy, gather_axis="fsdp", weight_scales=scales, axis_name="fsdp")

    program = jax.shard_map(local, mesh=mesh, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=check_vma)
    program = jax.jit(program)
    compiled = program.lower(X, W, DY).compile()
    assert_step(compiled(X, W, DY), rows, rows)
    moved = collectives(compiled)
    assert ("reduce-scatter", (f"f32[{N // 8},{K}]",)) in moved
    assert {results for kind, results in moved if kind == "all-gather"} == {(f"u8[{N},{K}]",)}


@KINDS
@pytest.mark.parametrize(
    "options", [{"gather_axis": "fsdp", "reshard_after_forward": False}, {}], ids=["kept", "by XLA"]
)
def test_step_with_other_gathers(kind, options):
    """Gathered codes kept until backward; and no gather asked for, so that XLA multiplies as it likes."""
    mesh = mesh_of(kind, fsdp=8)
    rows = NamedSharding(mesh, P("fsdp"))
    batch, out = (rows, rows) if options else (NamedSharding(mesh, P()), NamedSharding(mesh, P(None, "fsdp")))
    with jax.set_mesh(mesh):
        args = jax.device_put((X, W, DY), (batch, rows, out))
        program = jax.jit(functools.partial(step, weight_spec=P("fsdp", None), **options))
        assert_step(program(*args), rows, batch)


@KINDS
def test_contracted_axis_is_cut(kind):
    """Tensor parallelism by columns of w: a partial sum on each device."""
    mesh = mesh_of(kind, tp=4)
    columns = NamedSharding(mesh, P(None, "tp"))
    with jax.set_mesh(mesh):
        args = jax.device_put((X, W, DY), (columns, columns, NamedSharding(mesh, P())))
        out = P(None, None) if kind is AxisType.Explicit else None
        program = jax.jit(functools.partial(step, weight_spec=P(None, "tp"), out_sharding=out))
        assert_step(program(*args), columns, columns)


@KINDS
def test_hybrid_sharding(kind):
    """Weights cut along one mesh axis and copied along the other; the batch cut along both."""
    mesh = mesh_of(kind, replica=2, fsdp=4)
    x_cut, w_cut = NamedSharding(mesh, P(("replica", "fsdp"))), NamedSharding(mesh, P("fsdp"))
    with jax.set_mesh(mesh):
        args = jax.device_put((X, W, DY), (x_cut, w_cut, x_cut))
        program = jax.jit(functools.partial(step, weight_spec=P("fsdp", None), gather_axis="fsdp"))
        assert_step(program(*args), w_cut, x_cut)


def test_hybrid_sharding_in_shard_map():
    mesh = mesh_of(AxisType.Auto, replica=2, fsdp=4)
    batch = ("replica", "fsdp")
    local = functools.partial(step, gather_axis="fsdp", axis_name=batch)
    program = jax.shard_map(
        local, mesh=mesh, in_specs=(P(batch), P("fsdp"), P(batch)), out_specs=(P(batch), P(batch), P("fsdp"))
    )
    assert_step(jax.jit(program)(X, W, DY))


@KINDS
def test_backward_keeps_no_whole_weight(kind):
    """What stays from forward to backward of a weight is its shard's codes."""
    mesh = mesh_of(kind, fsdp=8)
    rows = NamedSharding(mesh, P("fsdp"))
    with jax.set_mesh(mesh):
        x, w = jax.device_put((X, W), (rows, rows))
        _, vjp = jax.vjp(lambda w: linear(x, w, RECIPE, weight_spec=P("fsdp"), gather_axis="fsdp"), w)
        kept = [leaf for leaf in jax.tree.leaves(vjp) if leaf.size == W.size]
    assert [leaf.dtype.name for leaf in kept] == ["float8_e4m3fn"]
    assert kept[0].sharding.is_equivalent_to(rows, 2)


def test_one_reduction_for_all_weights():
    """Also of weights with different shapes and cuts."""
    mesh = mesh_of(AxisType.Auto, fsdp=8)
    weights = {"a": values(64, 128), "b": values(128, 1024), "c": values(8)}
    specs = {"a": P("fsdp"), "b": P(None, "fsdp"), "c": P()}
    sharded = {k: jax.device_put(w, NamedSharding(mesh, specs[k])) for k, w in weights.items()}
    compiled = jax.jit(lambda w: compute_scales(w, RECIPE)).lower(sharded).compile()
    assert len(collectives(compiled)) == 1
    for name, scales in compiled(sharded).items():
        assert scales.scale_inv == reference.quantize(weights[name], FP8_E4M3).rowwise.scale_inv


def test_spec_may_name_the_mesh():
    """A NamedSharding says what an array without a mesh does not."""
    mesh = mesh_of(AxisType.Auto, fsdp=8)
    cut = NamedSharding(mesh, P("fsdp"))
    w = jax.jit(lambda w: gather(quantize(w, FP8_E4M3), "fsdp", spec=cut))(W)
    assert_bits_equal(w.rowwise.data, WHOLE.rowwise.data)
    result = jax.jit(functools.partial(step, weight_spec=cut, gather_axis="fsdp"))(X, W, DY)
    assert_step(result)
    assert result[2].sharding.is_equivalent_to(cut, 2)


def test_errors():
    mesh = mesh_of(AxisType.Auto, fsdp=8, tp=1)
    q = quantize(jax.device_put(W, NamedSharding(mesh, P("fsdp"))), FP8_E4M3)
    with pytest.raises(ValueError, match=r"axis_name \('data'\) is not an axis of the mesh \('fsdp', 'tp'\)"):
        gather(q, "data")
    with pytest.raises(ValueError, match=r"spec \(P.*'tp'.*\) does not have axis_name \('fsdp'\)"):
        gather(q, "fsdp", spec=P("tp"))
    with pytest.raises(ValueError, match=r"gather: axis_name \('fsdp'\) is not an axis of the mesh \(\)"):
        gather(quantize(W, FP8_E4M3), "fsdp")
    with pytest.raises(ValueError, match=r"holds nothing to gather"):
        gather(dataclasses.replace(q, rowwise=None), "fsdp")
    stack = quantize(values(2, 16, 32), FP8_E4M3, usage=Usage.COLUMNWISE)
    with pytest.raises(ValueError, match=r"pieces of a transposed plane do not follow one another"):
        gather(stack, "fsdp", spec=NamedSharding(mesh, P(None, "fsdp")))
    with pytest.raises(ValueError, match=r"scale_inv \(varying over 'fsdp'\) is not one scale for the whole tensor"):
        jax.shard_map(
            lambda w: gather(quantize(w, FP8_E4M3), "fsdp").dequantize(),
            mesh=mesh,
            in_specs=P("fsdp"),
            out_specs=P("fsdp"),
        )(W)
