"""The libraries of serving engines read what `qshard convert --to` writes, and qshard reads what they write.

Skipped without them; `make engines` installs them and runs this file.
"""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("click")

from safetensors.torch import load_file, save_file  # noqa: E402

from qshard import reference  # noqa: E402
from qshard._files.reader import CheckpointReader  # noqa: E402
from qshard.formats import FORMATS, Usage  # noqa: E402
from support.checkpoints import numbers, ok, write  # noqa: E402

sys.path.append(str(Path(__file__).parents[2] / "build" / "engines"))
NAME = "model.layers.0.mlp.up_proj.weight"
W = numbers((256, 128), 0).astype(ml_dtypes.bfloat16)
COMPRESSED = ["FP8_E4M3", "FP8_128x128", "MXFP8_E4M3", "MXFP8_32x32", "MXFP4", "NVFP4", "NVFP4_16x16"]


def library(name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip(name, reason=f"{name} is not installed; make engines")


def written(tmp_path, engine, fmt):
    """Return the tensors of the folder of an engine, by the names without that of their module, and its config."""
    write(tmp_path / "in.safetensors", {NAME: W})
    ok("convert", tmp_path / "in.safetensors", tmp_path / "out", "--format", fmt, "--to", engine)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    return {name.rpartition(".")[2]: tensor for name, tensor in tensors.items()}, config


def expected(fmt):
    return torch.from_numpy(reference.quantize(W, FORMATS[fmt]).dequantize(np.float32))


def scheme_of(config):
    """Parse a config as the library does, and return the scheme of its only group."""
    parse = library("compressed_tensors.quantization").QuantizationConfig.model_validate
    found = parse(config)
    (scheme,) = found.config_groups.values()
    return found.format, scheme


@pytest.mark.parametrize("fmt", COMPRESSED)
def test_compressed_tensors_decompresses(fmt, tmp_path):
    library("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor

    state, config = written(tmp_path, "compressed-tensors", fmt)
    name, scheme = scheme_of(config)
    compressor = BaseCompressor.get_value_from_registry(name)
    assert compressor.can_compress(torch.nn.Linear, scheme)
    assert {*state} == {*compressor.compression_param_names(scheme)}
    value = compressor.decompress(state, scheme)["weight"].float()
    # The library computes in the dtype of its scales: bfloat16 for E8M0, which is exact, and two roundings for NVFP4.
    torch.testing.assert_close(value, expected(fmt), rtol=0 if "NV" not in fmt else 2**-7, atol=0)


@pytest.mark.parametrize("preset", ["FP8_DYNAMIC", "FP8_BLOCK", "MXFP8A16", "MXFP4A16", "NVFP4A16"])
def test_what_compressed_tensors_writes_is_read(preset, tmp_path):
    library("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import preset_name_to_scheme

    scheme = preset_name_to_scheme(preset, ["Linear"])
    fmt = {"FP8_BLOCK": "FP8_128x128", "MXFP8A16": "MXFP8_E4M3", "MXFP4A16": "MXFP4", "NVFP4A16": "NVFP4"}.get(preset)
    w = torch.from_numpy(W.astype(np.float32))
    if fmt is None:
        scale = w.abs().amax(1, keepdim=True) / 448
        state = {"weight": w, "weight_scale": scale}
    else:
        q = reference.quantize(W, FORMATS[fmt])
        scale = torch.from_numpy(q.block_scales(Usage.ROWWISE))
        state = {"weight": w, "weight_scale": scale}
        if fmt == "NVFP4":
            whole = torch.from_numpy(np.atleast_1d(np.float32(1) / q.global_scale_inv))
            stored = torch.from_numpy(q.rowwise.scale_inv).view(torch.float8_e4m3fn).float()
            state = {"weight": w, "weight_scale": stored, "weight_global_scale": whole}
    compressor = BaseCompressor.get_value_from_registry(infer_module_format(torch.nn.Linear, scheme).value)
    compressed = compressor.compress(state, scheme)
    value = compressor.decompress(compressed, scheme)["weight"].float()
    prefix = NAME.removesuffix("weight")
    save_file({prefix + key: each.contiguous() for key, each in compressed.items()}, tmp_path / "in.safetensors")
    reader = CheckpointReader(tmp_path / "in.safetensors", "test")
    assert [*reader.weights] == [NAME]
    rtol = 2**-7 if fmt == "NVFP4" else 0
    torch.testing.assert_close(torch.from_numpy(reader.read_values(NAME)), value, rtol=rtol, atol=0)


@pytest.mark.parametrize("fmt", ["FP8_128x128"])
def test_transformers_dequantizes(fmt, tmp_path):
    library("transformers")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize
    from transformers.utils.quantization_config import FineGrainedFP8Config

    state, config = written(tmp_path, "deepseek", fmt)
    parsed = FineGrainedFP8Config(**config)
    assert tuple(parsed.weight_block_size) == (128, 128)
    quantizer = types.SimpleNamespace(quantization_config=parsed)
    found = Fp8Dequantize(quantizer).convert({"weight": state["weight"], "weight_scale_inv": state["weight_scale_inv"]})
    assert torch.equal(found["weight"].float(), expected(fmt))


@pytest.mark.parametrize("fmt", ["MXFP8_E4M3", "NVFP4"])
def test_modelopt_dequantizes_and_its_files_are_read(fmt, tmp_path):
    library("modelopt.torch.quantization.qtensor")
    from modelopt.torch.quantization.qtensor import MXFP8QTensor, NVFP4QTensor

    state, config = written(tmp_path, "modelopt", fmt)
    assert config["quant_algo"] == {"MXFP8_E4M3": "MXFP8", "NVFP4": "W4A16_NVFP4"}[fmt]
    w = torch.from_numpy(W.astype(np.float32))
    prefix = NAME.removesuffix("weight")
    if fmt == "NVFP4":
        q = NVFP4QTensor(torch.Size(W.shape), torch.float32, state["weight"])
        scales = {"scale": state["weight_scale"], "double_scale": state["weight_scale_2"], "block_sizes": {-1: 16}}
        value = q.dequantize(torch.float32, **scales)
        theirs, scale, second = NVFP4QTensor.quantize(w.clone(), 16)
        stored = {"weight": theirs._quantized_data, "weight_scale": scale, "weight_scale_2": second}
        again = theirs.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
    else:
        q = MXFP8QTensor(torch.Size(W.shape), torch.float32, state["weight"])
        value = q.dequantize(torch.float32, scale=state["weight_scale"])
        scale = MXFP8QTensor.get_weights_scaling_factor(w)
        codes = MXFP8QTensor.quantize_with_scale(w, scale)
        stored = {"weight": codes, "weight_scale": scale}
        again = MXFP8QTensor(torch.Size(W.shape), torch.float32, codes).dequantize(torch.float32, scale=scale)
    assert torch.equal(value, expected(fmt))
    save_file({prefix + key: each.contiguous() for key, each in stored.items()}, tmp_path / "theirs.safetensors")
    reader = CheckpointReader(tmp_path / "theirs.safetensors", "test")
    assert torch.equal(torch.from_numpy(reader.read_values(NAME)), again)


def test_gpt_oss_is_read_as_transformers_reads_it(tmp_path):
    library("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 64, 2, 16)).astype(np.uint8)
    scales = rng.integers(120, 130, (2, 64, 2)).astype(np.uint8)
    path = write(tmp_path / "in.safetensors", {"e.down_proj_blocks": blocks, "e.down_proj_scales": scales})
    found = torch.from_numpy(CheckpointReader(path, "test").read_values("e.down_proj"))
    theirs = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    assert torch.equal(found.transpose(1, 2), theirs)  # the model has [experts, in, out]
