"""`load_quantized` into sharded models: each rank gets its part of the values of the file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from qshard._core.serialization import Description
from qshard._files.engine_formats import engine_tensors
from qshard._files.reader import CheckpointReader
from qshard.formats import FORMATS, Usage
from qshard.reference import quantize
from qshard.torch_bridge import Adam, QuantizedTensor, ZeroOptimizer, convert, load_quantized, stream_weights
from support.checkpoints import write
from support.torch_parallel import mesh_of
from support.torch_ranks import on_ranks

SIZES = (128, 192, 64)


def model_of():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(SIZES[0], SIZES[1]), nn.GELU(), nn.Linear(SIZES[1], SIZES[2]))


def file_of(path, engine, fmt):
    """Write the file of an engine. Every rank writes the same bytes to a path of its own."""
    rng, arrays = np.random.default_rng(0), {}
    for name, rows, cols in (("0", SIZES[1], SIZES[0]), ("2", SIZES[2], SIZES[1])):
        x = rng.standard_normal((rows, cols)).astype(np.float32)
        q = quantize(x, FORMATS[fmt])
        what = Description(format=FORMATS[fmt], shape=x.shape, dtype="bfloat16", planes=(Usage.ROWWISE,))
        for each in engine_tensors(engine, f"{name}.weight", what):
            array = np.ascontiguousarray(each.encode(getattr(q.rowwise, each.part), np))
            arrays[each.name] = array.view(ml_dtypes.float8_e4m3fn) if each.dtype == "F8_E4M3" else array
        arrays[f"{name}.bias"] = rng.standard_normal(rows).astype(np.float32)
    return write(path, arrays)


CASES = pytest.mark.parametrize(
    ("recipe", "engine", "fmt"),
    [
        ("BlockScaling", "deepseek", "FP8_128x128"),
        ("NVFP4", "compressed-tensors", "NVFP4"),
        ("MXFP8", "modelopt", "MXFP8_E4M3"),
    ],
)


def assert_has_values(model, path):
    reader = CheckpointReader(path, "test")
    for name, parameter in model.named_parameters():
        whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        values = reader.read_values(name) if name in reader.weights else reader.read(name)
        whole = getattr(whole, "shard", whole)
        assert torch.equal(whole.detach(), torch.from_numpy(values)), name


@pytest.mark.each_value
@CASES
@on_ranks(2, 3)
def test_fsdp2(recipe, engine, fmt):
    with tempfile.TemporaryDirectory() as folder:
        path = file_of(Path(folder) / "model.safetensors", engine, fmt)
        model = convert(model_of(), recipe)
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        load_quantized(model, path)
        assert_has_values(model, path)
        assert not any(isinstance(each, QuantizedTensor) for each in model.parameters())


@on_ranks((2, 2))
@pytest.mark.parametrize("recipe", ["BlockScaling", "NVFP4"])
def test_hsdp(recipe):
    """Replicas of shards: the values of the file, and a stream that quantizes them as one device does."""
    engine, fmt = ("deepseek", "FP8_128x128") if recipe == "BlockScaling" else ("compressed-tensors", "NVFP4")
    with tempfile.TemporaryDirectory() as folder:
        path = file_of(Path(folder) / "model.safetensors", engine, fmt)
        model, whole = convert(model_of(), recipe), load_quantized(model_of(), path)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=mesh)
        load_quantized(model, path)
        assert_has_values(model, path)
        expected = dict(stream_weights(whole, engine, weight_format=model[0].recipe.weight))
        found = dict(stream_weights(model, engine))
        assert [*found] == [*expected]
        for name, tensor in expected.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


@on_ranks(2)
def test_models_that_others_shard():
    """One error before any work: FSDP1 has flat parameters, and a `ZeroOptimizer` writes its masters to the weights."""
    for way in ("wrapped", "zero", "zero with shards"):
        model = model_of() if way == "wrapped" else convert(model_of(), "BlockScaling")
        if way == "wrapped":
            model = nn.Sequential(FullyShardedDataParallel(model, device_id=torch.device("cpu")))
            with pytest.raises(ValueError, match=r"is sharded by FullyShardedDataParallel.*; shard it with"):
                stream_weights(model, weight_format="FP8_128x128")
            owner = "FullyShardedDataParallel"
        else:
            optimizer = ZeroOptimizer(model, lr=1e-2, shard_weights="shards" in way)
            owner = "ZeroOptimizer"
        with pytest.raises(ValueError, match=rf"belong to {owner}; load before convert, .* call convert and {owner}"):
            load_quantized(model, "nothing.safetensors")
    del optimizer


@CASES
@on_ranks(2)
def test_primary_weights(recipe, engine, fmt):
    """Before and after the first gather, which moves the values into masters."""
    with tempfile.TemporaryDirectory() as folder:
        path = file_of(Path(folder) / "model.safetensors", engine, fmt)
        model = convert(model_of(), recipe, primary=True)
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        optimizer = Adam(model.parameters())
        for _ in range(2):
            load_quantized(model, path)
            state = model.state_dict()
            reader = CheckpointReader(path, "test")
            for name in ("0.weight", "2.weight"):
                assert torch.equal(state[name].full_tensor(), torch.from_numpy(reader.read_values(name)))
            del state
            model(torch.ones(64, SIZES[0])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()


@on_ranks(2)
def test_tensor_parallel():
    with tempfile.TemporaryDirectory() as folder:
        path = file_of(Path(folder) / "model.safetensors", "compressed-tensors", "MXFP8_E4M3")
        model = convert(model_of(), "MXFP8")
        parallelize_module(model, mesh_of("tp"), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        load_quantized(model, path)
        assert_has_values(model, path)
