"""The command with checkpoints of PyTorch and JAX, and its output files in both frameworks."""

import json

import jax
import numpy as np
import pytest
import torch

import qshard.jax
import qshard.torch_bridge
from qshard import Usage
from qshard.numerics import stats
from support import checkpoints
from support.checkpoints import refused

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def converted(path, *options):
    from safetensors.torch import load_file

    out = path.with_name("out.safetensors")
    done = checkpoints.qshard("convert", path, out, "--force", *options)
    assert (done.returncode, done.stderr) == (0, "")
    arrays, metadata = checkpoints.read(out)  # safetensors.numpy lacks the 8-bit dtypes of unconverted tensors.
    arrays = {name: jax.numpy.asarray(array) for name, array in arrays.items()}
    return qshard.torch_bridge.from_plain(load_file(out), metadata), qshard.jax.from_plain(arrays, metadata)


def bytes_of(tensor):
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("fmt", ["NVFP4_16x16", "NVFP4", "MXFP8_E4M3", "FP8_E4M3[nonfinite=nan]", "FP8_128x128"])
def test_what_is_written_is_what_both_quantize(fmt, tmp_path):
    """A converted PyTorch model has the bytes of `quantize` in both front ends."""
    from safetensors.torch import save_file

    model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.LayerNorm(64), torch.nn.Linear(64, 32))
    state = model.state_dict()
    save_file(state, tmp_path / "a.safetensors", {"format": "pt"})
    for usage in (Usage.ROWWISE, Usage.BOTH):
        here, there = converted(tmp_path / "a.safetensors", "--format", fmt, "--usage", usage.name.lower())
        assert here.keys() == there.keys() == state.keys()
        for name, tensor in state.items():
            if tensor.ndim < 2:
                assert torch.equal(here[name], tensor)
                assert np.array_equal(there[name], tensor.numpy())
                continue
            expected = qshard.torch_bridge.quantize(tensor, fmt, usage=usage)
            assert torch.equal(here[name].dequantize(), expected.dequantize())
            twin = qshard.jax.quantize(jax.numpy.asarray(tensor.numpy()), fmt, usage=usage)
            assert str(there[name].format) == str(here[name].format) == fmt
            for one in usage.planes:
                theirs = there[name].rowwise if one is Usage.ROWWISE else there[name].columnwise
                twins = twin.rowwise if one is Usage.ROWWISE else twin.columnwise
                parts = zip(here[name].parts(one), expected.parts(one), theirs, twins, strict=True)
                for mine, of_torch, read, of_jax in parts:
                    if mine is None:
                        assert of_torch is read is of_jax is None
                        continue
                    assert bytes_of(mine) == bytes_of(of_torch)
                    assert np.asarray(read).tobytes() == np.asarray(of_jax).tobytes()
                    assert np.asarray(of_jax).tobytes() == bytes_of(mine)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes_of_torch(dtype, tmp_path):
    from safetensors.torch import save_file

    x = torch.randn(64, 64).to(dtype)
    save_file({"w": x, "empty": torch.zeros(0, 3).to(dtype), "scalar": x[0, 0].clone()}, tmp_path / "a.safetensors")
    done = checkpoints.qshard("report", tmp_path / "a.safetensors", "--formats", "NVFP4", "--json")
    (layer,) = json.loads(done.stdout)["layers"]
    expected = stats(x if dtype.itemsize > 1 else x.float(), "NVFP4")
    assert layer["formats"][0]["sqnr_db"] == expected.sqnr_db
    here, there = converted(tmp_path / "a.safetensors", "--format", "NVFP4")
    assert here["w"].dtype == (
        torch.float32 if dtype.itemsize > 2 else dtype if dtype.itemsize == 2 else torch.bfloat16
    )
    assert np.array_equal(here["w"].dequantize().float().numpy(), np.asarray(there["w"].dequantize(), np.float32))


def test_a_model_of_flax(tmp_path):
    """Names have slashes, kernels are [in, out], and arrays have dtypes of ml_dtypes."""
    import flax.traverse_util
    from flax import linen
    from safetensors.flax import save_file

    module = linen.Sequential([linen.Dense(64, param_dtype="bfloat16"), linen.Dense(32)])
    tree = flax.traverse_util.flatten_dict(module.init(jax.random.key(0), jax.numpy.ones((1, 128))), sep="/")
    save_file(tree, tmp_path / "a.safetensors")
    done = checkpoints.qshard(
        "report", tmp_path / "a.safetensors", "--formats", "MXFP8_E4M3", "--usage", "columnwise", "--json"
    )
    found = {layer["name"]: layer["dtype"] for layer in json.loads(done.stdout)["layers"]}
    assert found == {"params/layers_0/kernel": "BF16", "params/layers_1/kernel": "F32"}
    here, there = converted(tmp_path / "a.safetensors", "--format", "MXFP8_32x32")
    assert here.keys() == there.keys() == tree.keys()
    for name in found:
        value = jax.numpy.asarray(there[name].dequantize(), jax.numpy.float32)
        assert np.allclose(value, jax.numpy.asarray(tree[name], jax.numpy.float32), rtol=0.1, atol=1e-2)  # 3 bits.


def test_other_files_of_torch(tmp_path):
    for zipped, name in ((True, "torch.save or numpy.savez"), (False, "an old torch.save")):
        torch.save({"w": torch.ones(4, 4)}, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
        said = refused("report", tmp_path / "pytorch_model.bin", status=1)
        assert f"looks like a file of {name}; save it with save_file of safetensors.torch" in said
    assert "has no .safetensors file" in refused("report", tmp_path)
