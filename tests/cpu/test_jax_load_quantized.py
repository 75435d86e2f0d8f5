"""`qshard.jax.load_quantized`: codes and values of files, whole and sharded, with the bits of the file."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)

import jax.numpy as jnp  # noqa: E402
from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import qshard.jax as qj  # noqa: E402
from qshard import reference  # noqa: E402
from qshard._files.reader import values_of  # noqa: E402
from qshard.formats import FORMATS  # noqa: E402
from qshard.recipes import NAMED  # noqa: E402
from support.checkpoints import numbers, ok, write  # noqa: E402
from support.observe import calls_of  # noqa: E402

W = {"0.weight": numbers((256, 128), 0), "2.weight": numbers((128, 256), 1)}
ALL = W | {"0.bias": np.arange(256, dtype=np.float32), "step": np.array(3, np.int64)}
CASES = [
    ("qshard", "MXFP8_32x32", "MXFP8"),
    ("deepseek", "FP8_128x128", "BlockScaling"),
    ("compressed-tensors", "FP8_E4M3", "CurrentScaling"),
    ("compressed-tensors", "NVFP4_16x16", None),
    ("modelopt", "MXFP8_32x32", "MXFP8"),
]


def file_of(tmp_path, engine, fmt):
    out = tmp_path / ("codes.safetensors" if engine == "qshard" else "codes")
    ok("convert", write(tmp_path / "model.safetensors", ALL), out, "--format", fmt, "--to", engine)
    return out


@pytest.fixture
def mesh():
    return jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:8])


SPECS = [P("a"), P(("a", "b")), P("a", "b"), P(None, "b")]
SHARDED = [(*case, spec) for case in CASES[1:4:2] for spec in SPECS]


@pytest.mark.each_value
@pytest.mark.parametrize(("engine", "fmt", "recipe", "spec"), [*((*case, None) for case in CASES), *SHARDED], ids=str)
def test_codes_are_those_of_the_file(engine, fmt, recipe, spec, mesh, tmp_path):
    path = file_of(tmp_path, engine, fmt)
    shardings = None if spec is None else {name: NamedSharding(mesh, spec) for name in W}
    found = qj.load_quantized(path, fmt, shardings=shardings)
    assert found.keys() == ALL.keys()
    np.testing.assert_array_equal(found["0.bias"], ALL["0.bias"])
    assert int(found["step"]) == 3
    for name, w in W.items():
        expected = reference.quantize(w, FORMATS[fmt]).rowwise
        plane = found[name].rowwise
        assert np.asarray(plane.data).tobytes() == expected.data.tobytes()
        assert np.asarray(plane.scale_inv).tobytes() == expected.scale_inv.tobytes()
        if spec is not None:
            assert plane.data.sharding == NamedSharding(mesh, spec)
        values = found[name].dequantize(jnp.float32)
        np.testing.assert_array_equal(values, reference.quantize(w, FORMATS[fmt]).dequantize())
    values = qj.load_quantized(path, shardings=shardings, values=True)
    for name in W:
        np.testing.assert_array_equal(values[name], found[name].dequantize(jnp.float32))
        if spec is not None:
            assert values[name].sharding == NamedSharding(mesh, spec)
    if recipe is not None and spec is None:
        x = jnp.asarray(numbers((32, 128), 5))
        y = qj.linear(x, found["0.weight"], recipe)
        np.testing.assert_array_equal(y, qj.linear(x, jnp.asarray(W["0.weight"]), recipe))


@pytest.mark.parametrize(
    ("engine", "fmt", "recipe"), [("modelopt", "MXFP8_E4M3", "MXFP8"), ("modelopt", "NVFP4", "NVFP4")]
)
def test_blocks_along_k_alone(engine, fmt, recipe, tmp_path):
    """As engines write them: y multiplies the codes, and the gradient of x the values."""
    path = file_of(tmp_path, engine, fmt)
    w = qj.load_quantized(path)["0.weight"]
    assert w.format.name == fmt
    x, dy = jnp.asarray(numbers((32, 128), 5)), jnp.asarray(numbers((32, 256), 6))
    role, seed = NAMED[recipe], {"seed": 1} if NAMED[recipe].stochastic else {}
    y, back = jax.vjp(lambda x: qj.linear(x, w, recipe, **seed), x)
    values = w.dequantize(jnp.bfloat16).astype(jnp.float32)
    xq = qj.quantize(x, role.activation).dequantize(jnp.bfloat16).astype(jnp.float32)
    np.testing.assert_allclose(y, xq @ values.T, rtol=1e-4, atol=1e-3)
    (dx,) = back(dy)
    if not role.stochastic:
        dyq = qj.quantize(dy, role.gradient).dequantize(jnp.bfloat16).astype(jnp.float32)
        np.testing.assert_allclose(dx, dyq @ values, rtol=1e-4, atol=1e-3)
    assert np.isfinite(dx).all()
    with pytest.raises(ValueError, match=r"w \(.*\) is not in the weight format of the recipe"):
        qj.linear(jnp.ones((32, 256)), w, recipe, weight_layout="KN", **seed)


def test_a_part_of_a_tensor_reads_that_part(tmp_path, mesh):
    """Of values: no slice that is read is larger than a shard."""
    path = file_of(tmp_path, "deepseek", "FP8_128x128")
    with calls_of(values_of) as calls:
        qj.load_quantized(
            path, shardings=lambda name, shape: NamedSharding(mesh, P("a")) if name in W else None, values=True
        )
    assert {call.result.size for call in calls} == {256 * 128 // 4}


def test_other_tensors_of_64_bits(tmp_path):
    """Matrices of float64 are no codes, and integers that JAX cannot hold raise."""
    path = write(tmp_path / "model.safetensors", W | {"table": np.full((3, 5), 1 / 3), "step": np.array(2**40)})
    ok("convert", path, tmp_path / "codes.safetensors", "--format", "MXFP8_32x32")
    with pytest.raises(ValueError, match=r"step \(int64\) has numbers that int32 cannot hold; set jax_enable_x64"):
        qj.load_quantized(tmp_path / "codes.safetensors")
    with jax.enable_x64(True):
        found = qj.load_quantized(tmp_path / "codes.safetensors")
    assert int(found["step"]) == 2**40
    np.testing.assert_array_equal(found["table"], np.full((3, 5), 1 / 3))


def test_errors(tmp_path):
    path = file_of(tmp_path, "qshard", "NVFP4")
    with pytest.raises(ValueError, match=r"0.weight \(NVFP4\) does not have one scale for each block of NVFP4_16x16"):
        qj.load_quantized(path, "NVFP4_16x16")
    with pytest.raises(TypeError, match=r"shardings \(3\) is not a dict or a function"):
        qj.load_quantized(path, shardings=3)
    with pytest.raises(TypeError, match=r"shardings of 0.weight \(P\('fsdp',\)\) is not a Sharding; pass"):
        qj.load_quantized(path, shardings=lambda name, shape: P("fsdp"))
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        qj.load_quantized(tmp_path / "nothing")
