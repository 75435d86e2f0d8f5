"""`stream_weights` of both front ends has the tensors that `qshard convert --to` writes for the same model."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)

import ml_dtypes  # noqa: E402

import qshard.jax as qj  # noqa: E402
import qshard.torch_bridge as qt  # noqa: E402
from support.checkpoints import numbers, ok, read, write  # noqa: E402

CASES = [
    ("deepseek", "FP8_128x128"),
    *(
        ("compressed-tensors", fmt)
        for fmt in ("FP8_E4M3", "FP8_128x128", "MXFP8_E4M3", "MXFP8_32x32", "MXFP4", "NVFP4", "NVFP4_16x16")
    ),
    *(("modelopt", fmt) for fmt in ("FP8_E4M3", "FP8_128x128", "MXFP8_E4M3", "NVFP4")),
]
WEIGHTS = {"up.weight": numbers((256, 128), 0), "down.weight": numbers((128, 256), 1)}
MODEL = {name: x.astype(ml_dtypes.bfloat16) for name, x in (WEIGHTS | {"norm": numbers((128,), 2)}).items()}


def torch_stream(engine, fmt):
    model = torch.nn.ModuleDict(
        {"up": torch.nn.Linear(128, 256, bias=False), "down": torch.nn.Linear(256, 128, bias=False)}
    ).bfloat16()
    model.register_buffer("norm", torch.empty(128, dtype=torch.bfloat16))
    model.load_state_dict({name: torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) for name, x in MODEL.items()})
    for name, tensor in qt.stream_weights(model, engine, weight_format=fmt):
        raw = tensor.detach().contiguous()
        data = raw.reshape(-1).view(torch.uint8).numpy().tobytes()
        yield name, str(raw.dtype).removeprefix("torch."), tuple(raw.shape), data


def jax_stream(engine, fmt):
    arrays = {name: jax.numpy.asarray(x) for name, x in MODEL.items()}
    for name, array in qj.stream_weights(arrays, engine, weight_format=fmt):
        yield name, str(array.dtype), array.shape, np.asarray(array).tobytes()


@pytest.mark.parametrize(("engine", "fmt"), CASES)
def test_the_bytes_of_a_stream_are_those_of_a_file(engine, fmt, tmp_path):
    path = write(tmp_path / "model.safetensors", MODEL)
    ok("convert", path, tmp_path / "out", "--format", fmt, "--to", engine)
    files = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        files |= {name: (str(x.dtype), x.shape, x.tobytes()) for name, x in read(file)[0].items()}
    assert len(files) >= 5
    for stream in (torch_stream, jax_stream):
        assert {name: tuple(what) for name, *what in stream(engine, fmt)} == files
