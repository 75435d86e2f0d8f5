"""vLLM loads what `qshard convert --to` and `stream_weights` write: its parameters are the bits of `quantize`.

Two ranks of vLLM's tensor parallelism, on CPUs, each with its half of q, k and v in one parameter, and of gate and up.
Skipped without vLLM; `make vllm` installs it and runs this file.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("click")

from safetensors.torch import load_file  # noqa: E402

from qshard import reference  # noqa: E402
from qshard.formats import FORMATS  # noqa: E402
from support.checkpoints import ok, write  # noqa: E402

TESTS = Path(__file__).parents[1]
VLLM = TESTS.parent / "build" / "vllm"
pytestmark = pytest.mark.skipif(not (VLLM / "vllm").is_dir(), reason="vLLM is not installed; make vllm")

RANKS = 2
HIDDEN, MLP, Q, KV = 256, 512, 512, 256
LAYER = "model.layers.0."
PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}
SPLIT_COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
SHAPES = {
    "self_attn.q_proj": (Q, HIDDEN),
    "self_attn.k_proj": (KV, HIDDEN),
    "self_attn.v_proj": (KV, HIDDEN),
    "self_attn.o_proj": (HIDDEN, Q),
    "mlp.gate_proj": (MLP, HIDDEN),
    "mlp.up_proj": (MLP, HIDDEN),
    "mlp.down_proj": (HIDDEN, MLP),
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
}
VOCABULARY = 128
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
    "hidden_act": "silu",
}
SCHEMES = {
    ("deepseek", "FP8_128x128"): ("Fp8Config", "Fp8LinearMethod"),
    ("compressed-tensors", "FP8_E4M3"): ("CompressedTensorsConfig", "CompressedTensorsW8A8Fp8"),
    ("compressed-tensors", "FP8_128x128"): ("CompressedTensorsConfig", "CompressedTensorsW8A8Fp8"),
    ("compressed-tensors", "MXFP8_E4M3"): ("CompressedTensorsConfig", "CompressedTensorsW8A8Mxfp8"),
    ("compressed-tensors", "MXFP8_32x32"): ("CompressedTensorsConfig", "CompressedTensorsW8A8Mxfp8"),
    ("compressed-tensors", "MXFP4"): ("CompressedTensorsConfig", "CompressedTensorsW4A4Mxfp4"),
    ("compressed-tensors", "NVFP4"): ("CompressedTensorsConfig", "CompressedTensorsW4A4Fp4"),
    ("modelopt", "FP8_E4M3"): ("ModelOptFp8Config", "ModelOptLinearMethod"),
    ("modelopt", "FP8_128x128"): ("ModelOptFp8Config", "ModelOptLinearMethod"),
    ("modelopt", "MXFP8_E4M3"): ("ModelOptMxFp8Config", "ModelOptLinearMethod"),
    ("modelopt", "NVFP4"): ("ModelOptNvFp4Config", "ModelOptLinearMethod"),
    ("modelopt", "NVFP4_16x16"): ("ModelOptNvFp4Config", "ModelOptLinearMethod"),
}
FILES = {
    # The names of the parameters for codes, scales, and global scales.
    "deepseek": ("weight", "weight_scale_inv"),
    "compressed-tensors": ("weight", "weight_scale", "weight_global_scale"),
    "modelopt": ("weight", "weight_scale", "weight_scale_2"),
}
AFTER = {"weight_packed": "weight", "weight_scale_2": "weight_global_scale"}  # names after loading
REPEATS = {"MXFP8_32x32": 32, "NVFP4_16x16": 16}
MIXED = {"self_attn": "FP8_E4M3", "mlp": "NVFP4"}


def is_tied(engine):
    """Whether the output layer of the model of a case is its embedding. Otherwise it has weights, which stay values."""
    return engine == "modelopt"


def weights(tied=True):
    """The values of a model. Those of each layer and of each row have other magnitudes, so that all scales differ."""
    rng = np.random.default_rng(0)
    shapes = {LAYER + name + ".weight": shape for name, shape in SHAPES.items()}
    shapes |= {"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}
    if not tied:
        shapes["lm_head.weight"] = (VOCABULARY, HIDDEN)
    found = {}
    for i, (name, shape) in enumerate(shapes.items()):
        rows = np.exp(rng.normal(0, 1, (shape[0], *(1 for _ in shape[1:]))))
        found[name] = (rng.normal(0, 0.01 * (i + 1), shape) * rows).astype(ml_dtypes.bfloat16)
    return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What the ranks report for each case, and the folder with their parameters."""
    folder = tmp_path_factory.mktemp("vllm")
    for tied in (False, True):
        (folder / f"tied={tied}").mkdir()
        write(folder / f"tied={tied}" / "model.safetensors", weights(tied))
        (folder / f"tied={tied}" / "config.json").write_text(json.dumps(CONFIG | {"tie_word_embeddings": tied}))
    jobs = []
    cases = {case: {"*": case[1]} for case in SCHEMES}
    cases |= {(engine, "mixed"): {f"*{part}*": fmt for part, fmt in MIXED.items()} for engine in [*FILES][1:]}
    for (engine, fmt), formats in cases.items():
        model, out = folder / f"tied={is_tied(engine)}", folder / f"{engine}-{fmt}"
        options = [word for pair in formats.items() for word in ("--format", "=".join(pair))]
        ok("convert", model, out, *options, "--to", engine)
        stream = formats if is_tied(engine) else {"lm_head": None, **formats}
        jobs.append({"engine": engine, "formats": stream, "folder": str(out), "values": str(model)})
    list_of_jobs = folder / "jobs.json"
    list_of_jobs.write_text(json.dumps(jobs))
    command = [sys.executable, "-P", TESTS / "support" / "vllm_engine.py", list_of_jobs]
    path = os.pathsep.join(filter(None, (str(VLLM), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    logs = [folder / f"log.{rank}" for rank in range(RANKS)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as file:
            each = subprocess.Popen([*command, str(rank), str(RANKS)], env=environment, stdout=file, stderr=file)
        ranks.append(each)
    with contextlib.suppress(subprocess.TimeoutExpired):
        for each in ranks:
            each.wait(timeout=250)
    for each in ranks:
        each.kill()
    assert [each.wait() for each in ranks] == [0] * RANKS, "".join(log.read_text()[-3000:] for log in logs)
    return [json.loads((folder / f"jobs.json.{rank}").read_text()) for rank in range(RANKS)], folder


def planes(fmt, layer):
    """Yield codes, scales and global scale of each weight of a layer."""
    parts = [weights()[f"{LAYER}{part}.weight"] for part in PARTS[layer]]
    together = "NVFP4" in fmt  # Merged weights have one global scale.
    for whole in [np.concatenate(parts)] if together else parts:
        q = reference.quantize(whole, FORMATS[fmt]).rowwise
        scale = np.atleast_1d(q.scale_inv)
        if fmt in REPEATS:
            scale = np.repeat(scale, REPEATS[fmt], 0)
        if fmt == "FP8_E4M3":
            scale = np.repeat(scale, len(whole))
        stops = np.cumsum([len(part) for part in parts])[:-1] if together else []
        for codes, scales in zip(np.split(q.data, stops), np.split(scale, stops), strict=True):
            yield codes, scales, q.global_scale_inv


def expected(engine, fmt, layer, rank):
    """The parameters of a layer of a rank, from whole weights: names, dtypes and bytes."""
    names = list(FILES[engine])
    if engine == "compressed-tensors" and "FP4" in fmt:
        names[0] = "weight_packed"
    axis = 1 if layer in SPLIT_COLUMNS else 0
    parts = []
    for codes, scale, whole in planes(fmt, layer):
        if scale.ndim == 2 or axis == 0:
            scale = np.split(scale, RANKS, axis)[rank]
        arrays = [np.split(codes, RANKS, axis)[rank], scale]
        if whole is not None:
            arrays.append(np.atleast_1d(1 / whole if engine == "compressed-tensors" else whole).astype(np.float32))
        parts.append(arrays)
    dtypes = [
        torch.uint8 if "FP4" in fmt else torch.float8_e4m3fn,
        torch.uint8 if "MX" in fmt else torch.float8_e4m3fn if "NV" in fmt else torch.float32,
        torch.float32,
    ]
    return {
        name: (dtype, np.concatenate(arrays).tobytes())
        for name, dtype, arrays in zip(names, dtypes, zip(*parts, strict=True), strict=False)
    }


def bytes_of(tensor):
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def parameters(loaded, engine, fmt, source, rank):
    results, folder = loaded
    assert "error" not in results[rank][f"{engine}-{fmt}"], results[rank][f"{engine}-{fmt}"]["error"]
    return load_file(folder / f"{engine}-{fmt}.{source}.{rank}.safetensors")


def assert_layer(found, engine, fmt, layer, rank):
    prefix = f"{LAYER}{layer}."
    own = {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
    want = expected(engine, fmt, layer, rank)
    if engine == "modelopt" and "NVFP4" in fmt:
        del own["input_scale"]  # for files of older versions; vLLM deletes it after loading
    assert own.keys() == want.keys()
    for name, (dtype, data) in want.items():
        assert own[name].dtype == dtype, name
        assert bytes_of(own[name]) == data, name


@pytest.mark.parametrize("source", ["file", "stream"])
@pytest.mark.parametrize(("engine", "fmt"), SCHEMES)
def test_parameters_are_the_bits_of_quantize(loaded, engine, fmt, source):
    for rank in range(RANKS):
        found = parameters(loaded, engine, fmt, source, rank)
        for layer in PARTS:
            assert_layer(found, engine, fmt, layer, rank)


@pytest.mark.parametrize(("engine", "fmt"), SCHEMES)
def test_config_selects_the_scheme(loaded, engine, fmt):
    for result in loaded[0]:
        result = result[f"{engine}-{fmt}"]
        assert (result["config"], {*result["schemes"].values()}) == (SCHEMES[engine, fmt][0], {SCHEMES[engine, fmt][1]})


@pytest.mark.parametrize("source", ["file", "stream"])
@pytest.mark.parametrize(("engine", "fmt"), SCHEMES)
def test_codes_and_scales_stay_after_loading(loaded, engine, fmt, source):
    """vLLM does not quantize merged weights again. Kernels, which may change the layout of weights, are left out."""
    for rank in range(RANKS):
        found = parameters(loaded, engine, fmt, f"{source}.after", rank)
        for layer in PARTS:
            want = expected(engine, fmt, layer, rank)
            for name, (dtype, data) in want.items():
                own = found[f"{LAYER}{layer}.{AFTER.get(name, name)}"]
                assert own.dtype == dtype
                if name in FILES[engine][2:]:  # vLLM keeps one, which decodes
                    scales = np.frombuffer(data, np.float32)
                    assert {*(1 / scales if engine == "compressed-tensors" else scales)} == {own.item()}
                else:
                    assert data in (bytes_of(own), bytes_of(own.t()))


@pytest.mark.parametrize("source", ["file", "stream"])
@pytest.mark.parametrize("engine", [*FILES][1:])
def test_layers_in_two_formats(loaded, engine, source):
    for rank in range(RANKS):
        found = parameters(loaded, engine, "mixed", source, rank)
        for layer in PARTS:
            assert_layer(found, engine, MIXED[layer.partition(".")[0]], layer, rank)


@pytest.mark.parametrize("source", ["file", "stream"])
def test_other_parameters_are_values(loaded, source):
    values = weights(tied=False)
    for rank in range(RANKS):
        found = parameters(loaded, "deepseek", "FP8_128x128", source, rank)
        for name in (LAYER + "input_layernorm.weight", LAYER + "post_attention_layernorm.weight", "model.norm.weight"):
            assert bytes_of(found[name]) == values[name].tobytes()
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            assert bytes_of(found[name]) == np.split(values[name], RANKS)[rank].tobytes()
