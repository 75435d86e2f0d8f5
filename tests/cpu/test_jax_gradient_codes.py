"""`linear(grad_dtype="MXFP8_E4M3")`: the reduce-scatter of FSDP sends codes and adds in the order of devices."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from qshard import reference
from qshard.formats import MXFP8_E4M3, MXFP8_E5M2, NVFP4, Usage
from qshard.jax import linear
from support.hlo import collectives

BLOCK = 32


def mesh_of(kind=AxisType.Auto, **sizes):
    devices = jax.devices()[: np.prod(list(sizes.values()))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def values(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def gradient(mesh, w, x, dy, recipe, spec, **options):
    """Return the gradient of sum(y * dy): rows of x and dy are sharded along all mesh axes."""
    rows = P(mesh.axis_names)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, rows, rows), out_specs=spec)
    def of_shards(w, x, dy):
        return jax.grad(lambda w: (linear(x, w, recipe, weight_spec=spec, **options) * dy).sum())(w)

    return of_shards, of_shards(w, x, dy)


def sent(part, fmt):
    """Return what arrives of a part of a gradient: blocks of 32 consecutive elements, padded with zeros."""
    flat = np.zeros(-(-part.size // BLOCK) * BLOCK, np.float32)
    flat[: part.size] = part.reshape(-1)
    q = reference.quantize(flat.reshape(-1, BLOCK), fmt, Usage.ROWWISE)
    return q.dequantize().reshape(-1)[: part.size].reshape(part.shape)


CASES = {
    "rows": ((64, 128), P("fsdp"), 0),
    "columns": ((64, 128), P(None, "fsdp"), 1),
    "partial blocks": ((24, 40), P("fsdp"), 0),
}


@pytest.mark.parametrize("fmt", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_sums_of_codes_are_in_the_order_of_devices(case, fmt):
    shape, spec, axis = CASES[case]
    w, x, dy = values(*shape), values(256, shape[1], seed=1), values(256, shape[0], seed=2)
    mesh = mesh_of(fsdp=8)
    options = {"gather_axis": "fsdp", "grad_dtype": fmt}
    _, made = gradient(mesh, w, x, dy, "CurrentScaling", spec, **options)
    total = None
    one = jax.jit(jax.grad(lambda w, x, dy: (linear(x, w, "CurrentScaling") * dy).sum()))
    for x_i, dy_i in zip(np.split(x, 8), np.split(dy, 8), strict=True):
        parts = [sent(part, fmt) for part in np.split(np.asarray(one(w, x_i, dy_i)), 8, axis)]
        arrived = np.concatenate(parts, axis)
        total = arrived if total is None else total + arrived
    np.testing.assert_array_equal(made, total)


@pytest.mark.each_value
@pytest.mark.parametrize("recipe", ["CurrentScaling", "MXFP8", "NVFP4"])
@pytest.mark.parametrize(
    ("sizes", "spec", "axes"),
    [
        ({"data": 2, "fsdp": 4}, P("fsdp"), "fsdp"),
        ({"a": 2, "b": 4}, P(("a", "b")), ("a", "b")),
        ({"a": 2, "b": 2}, P("a", "b"), ("a", "b")),
        ({"fsdp": 1}, P("fsdp"), "fsdp"),
    ],
    ids=["replicas", "two axes of rows", "rows and columns", "one device"],
)
def test_error_is_bounded(sizes, spec, axes, recipe):
    """Each device's gradient is off by at most 1/16 where one axis scatters it, twice that where two do."""
    w, x, dy = values(128, 128), values(1024, 128, seed=1), values(1024, 128, seed=2)
    options = {"gather_axis": axes} | ({"seed": 1} if recipe == "NVFP4" else {})
    mesh = mesh_of(**sizes)
    _, plain = gradient(mesh, w, x, dy, recipe, spec, **options)
    program, made = gradient(mesh, w, x, dy, recipe, spec, **options, grad_dtype="MXFP8_E4M3")
    own = functools.partial(gradient, mesh_of(fsdp=1), w, recipe=recipe, spec=P(), **options | {"gather_axis": None})
    terms = zip(*(np.split(array, mesh.size) for array in (x, dy)), strict=True)
    absolute = sum(np.abs(own(x=x_i, dy=dy_i)[1]) for x_i, dy_i in terms)
    times = sum(entry is not None for entry in spec)
    small = 2 * mesh.size * absolute.max() / 229376  # For small elements, and for fp32 sums in another order.
    assert (np.abs(made - plain) <= absolute * ((1 + 1 / 16) ** times - 1) + small).all()
    assert not np.array_equal(made, plain)
    if mesh.size > 1:
        found = collectives(program.lower(w, x, dy).compile())
        assert sum(kind == "all-to-all" for kind, _ in found) == 2 * times


def test_infinities_and_nan_arrive():
    w, x, dy = values(64, 64), values(64, 64, seed=1), np.zeros((64, 64), np.float32)
    x[9] = 0
    x[9, 3] = 1
    dy[9, 5], dy[9, 40] = np.inf, np.nan
    _, made = gradient(mesh_of(fsdp=8), w, x, dy, "MXFP8", P("fsdp"), gather_axis="fsdp", grad_dtype="MXFP8_E4M3")
    assert not np.isfinite(np.asarray(made)[40, :BLOCK]).any()
    assert not np.isfinite(np.asarray(made)[5, 3])


def test_mistakes():
    w, x = values(64, 64), values(64, 64)
    for options in ({}, {"weight_spec": P("fsdp"), "gather_axis": "fsdp"}):
        with (
            jax.set_mesh(mesh_of(fsdp=8)),
            pytest.raises(ValueError, match=r"grad_dtype \(MXFP8_E4M3\) needs a shard of w in shard_map"),
        ):
            linear(x, w, "MXFP8", grad_dtype="MXFP8_E4M3", **options)
    with pytest.raises(ValueError, match=r"grad_dtype \(NVFP4\) is not a format of gradients; pass MXFP8_E4M3"):
        linear(x, w, "MXFP8", grad_dtype=NVFP4)
