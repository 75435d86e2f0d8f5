"""Weight sync from JAX: the bytes that an engine gets from eight devices are those of `quantize` of the whole."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import qshard.jax as qj
from qshard import reference
from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description, flat, key_of
from qshard._core.validation import as_format
from qshard._files.engine_formats import engine_tensors
from qshard.formats import Usage
from support.pairs import turns

SHAPE = (512, 384)
CASES = [
    ("deepseek", "FP8_128x128"),
    ("compressed-tensors", "FP8_E4M3"),
    ("compressed-tensors", "MXFP8_32x32"),
    ("modelopt", "NVFP4_16x16"),
    ("qshard", "MXFP4"),
]
SPECS = [("fsdp",), (None, "fsdp"), ("fsdp", "tp"), ("tp", "fsdp"), ()]


def weights():
    rng = np.random.default_rng(0)
    made = {f"{name}.weight": rng.standard_t(4, SHAPE) * np.exp(rng.standard_normal((SHAPE[0], 1))) for name in "ab"}
    made |= {"embed": rng.standard_normal((30, 16)), "norm": rng.standard_normal(SHAPE[1])}
    return {name: x.astype(np.float32) for name, x in made.items()}


def expected(engine, name, x, fmt):
    """Dtype, shape and bytes by name, by NumPy."""
    fmt = as_format(fmt, "test")
    whole = reference.quantize(x, fmt).rowwise
    arrays = (None if x is None else np.asarray(x) for x in (whole.data, whole.scale_inv, whole.global_scale_inv))
    parts = Plane(*(x.view(np.uint8) if x is not None and x.dtype.itemsize == 1 else x for x in arrays))
    if engine == "qshard":
        arrays = {key_of(name, key): x for key, x in flat({Usage.ROWWISE: parts}).items()}
        return {key: (x.shape, x.tobytes()) for key, x in arrays.items()}
    what = Description(format=fmt, shape=x.shape, dtype="float32", planes=(Usage.ROWWISE,))
    tensors = ((each, each.encode(getattr(parts, each.part), np)) for each in engine_tensors(engine, name, what))
    return {each.name: (each.shape, np.ascontiguousarray(x).tobytes()) for each, x in tensors}


def got(stream):
    return {name: (x.shape, np.asarray(x).tobytes()) for name, x in stream}


@pytest.mark.parametrize("value", [0.0, 1e-40])
def test_the_inverse_of_a_tiny_scale_is_finite(value):
    """NumPy warns of none, and warnings are errors here."""
    what = Description(format=as_format("NVFP4", "test"), shape=SHAPE, dtype="float32", planes=(Usage.ROWWISE,))
    (inverse,) = (each for each in engine_tensors("compressed-tensors", "w", what) if each.reciprocal)
    array = np.full(inverse.part_shape, value, np.float32)
    assert inverse.encode(array, np) == np.finfo(np.float32).max
    inverse.decode(np.full(inverse.shape, value, np.float32))


@turns(2, case={" ".join(case): case for case in CASES}, spec={str(spec): spec for spec in SPECS})
def test_sharded_weights(case, spec):
    """Shards split blocks; arrays are sharded by rows, columns or both; buckets change nothing."""
    engine, fmt = case
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    plain = weights()
    wanted = {}
    for name in sorted(plain):
        is_weight = name.endswith(".weight")
        wanted |= expected(engine, name, plain[name], fmt) if is_weight else got([(name, plain[name])])
    rules = {"*embed*": None, "*": fmt}
    params = {
        name: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec if x.shape == SHAPE else ())))
        for name, x in plain.items()
    }
    made = list(qj.stream_weights(params, engine, weight_format=rules))
    assert got(made) == wanted
    assert all(x.sharding.is_fully_replicated for _, x in made)
    assert got(qj.stream_weights(params, engine, weight_format=rules, bucket_bytes=1)) == wanted


@pytest.mark.parametrize("spec", SPECS[1:4], ids=str)
def test_weights_that_engines_merge_share_a_global_scale(spec):
    """Rows of the merged weight from shards that split blocks, one of which has the amax; also as flax has them."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    one = weights()["a.weight"]
    plain = {"gate_proj.weight": one[:256], "up_proj.weight": 3 * one[256:]}
    merged = expected("qshard", "w", np.concatenate([*plain.values()]), "NVFP4_16x16")
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    for layout in ("NK", "KN"):
        params = {name: jax.device_put(x if layout == "NK" else x.T, sharding) for name, x in plain.items()}
        stream = qj.stream_weights(
            params, "modelopt", weight_format="NVFP4_16x16", weight_layout=layout, bucket_bytes=1
        )
        found = got(stream)
        assert b"".join(found[name][1] for name in plain) == merged["w.rowwise.data"][1]
        assert {found[f"{name}_scale_2"][1] for name in plain} == {merged["w.rowwise.global_scale_inv"][1]}


def test_layouts_codes_and_primary_weights():
    """Flax's axis order; weights that are codes already, whole or sharded, keep them."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    plain = weights()["a.weight"]
    wanted = expected("deepseek", "a.weight", plain, "FP8_128x128")
    rows = NamedSharding(mesh, PartitionSpec("fsdp"))
    kernel = {"a": {"weight": jax.device_put(plain.T, rows)}}
    assert got(qj.stream_weights(kernel, "deepseek", weight_format="FP8_128x128", weight_layout="KN")) == wanted
    codes = qj.quantize(jnp.asarray(plain), "FP8_128x128")
    assert got(qj.stream_weights({"a.weight": codes}, "deepseek")) == wanted
    sharded = jax.tree.map(lambda x: jax.device_put(x, rows) if x.shape == SHAPE else x, codes)
    assert got(qj.stream_weights({"a.weight": sharded}, "deepseek")) == wanted
    primary = qj.PrimaryWeight.of(codes)
    assert got(qj.stream_weights({"a.weight": primary}, "deepseek")) == wanted


def test_slices_of_blocks_select_formats():
    params = {f"layers.{i}.w": jnp.ones((32, 32)) for i in range(8)} | {"head": jnp.ones((32, 32))}
    rules = {"layers[-15%:].*": None, "layers[:1].*": "MXFP8_E4M3", "*": "MXFP4"}
    names = [name for name, _ in qj.stream_weights(params, "qshard", weight_format=rules)]
    values = [name for name in names if not name.endswith((".data", ".scale_inv"))]
    assert values == ["layers.6.w", "layers.7.w"]


def test_mistakes():
    params = {"w": jnp.ones((128, 96))}
    for given, text in (
        ({"format": "deepsek"}, "format ('deepsek') is unknown; did you mean 'deepseek'"),
        ({"bucket_bytes": 0}, "bucket_bytes (0) is not a positive integer"),
        ({}, "params have no weight to quantize; pass weight_format="),
        ({"weight_format": "MXFP6_E2M3"}, "w (MXFP6_E2M3) has no form in compressed-tensors"),
        ({"weight_format": "NVFP4", "format": "deepseek"}, "w (NVFP4) has no form in deepseek"),
        ({"weight_format": "NVFP4[rounding=stochastic]"}, "rounds stochastically"),
        ({"weight_format": {"v": None, "*": "NVFP4"}}, "pattern 'v' matches no array; the closest are 'w'"),
        ({"weight_layout": "NN", "weight_format": "NVFP4"}, "weight_layout ('NN') is not a layout"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            qj.stream_weights(params, **given)
    with pytest.raises(ValueError, match=r"params have two arrays with the name 'a\.w'; rename one of them"):
        qj.stream_weights({"a": params, "a.w": params["w"]}, weight_format="FP8_E4M3")
    with pytest.raises(TypeError, match=r"w .*is not an array"):
        qj.stream_weights({"w": "text"}, weight_format="NVFP4")
