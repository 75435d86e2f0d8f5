"""`qshard convert --to`: folders of serving engines, what they hold, and the way back."""

from __future__ import annotations

import json

import ml_dtypes
import numpy as np
import pytest

from qshard import reference
from qshard._core.serialization import KEY, parse_metadata
from qshard.formats import FORMATS, Usage
from support.checkpoints import numbers, ok, read, refused, sharded, write

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")

BF16 = ml_dtypes.bfloat16
MODEL = {
    "model.layers.0.up.weight": numbers((256, 128), 0).astype(BF16),
    "model.layers.0.up.bias": np.ones(256, BF16),
    "model.layers.1.up.weight": numbers((128, 256), 1).astype(BF16),
    "model.norm.weight": np.ones(128, BF16),
    "lm_head.weight": numbers((64, 128), 2).astype(BF16),
}
WEIGHTS = [name for name in MODEL if ".up.weight" in name]
CASES = [
    ("deepseek", "FP8_128x128"),
    *(
        ("compressed-tensors", fmt)
        for fmt in ("FP8_E4M3", "FP8_128x128", "MXFP8_E4M3", "MXFP4", "NVFP4", "NVFP4_16x16")
    ),
    *(("modelopt", fmt) for fmt in ("FP8_E4M3", "FP8_128x128", "MXFP8_32x32", "NVFP4")),
]


def folder_of(path, arrays=MODEL):
    """A model's folder of two shards, with a tokenizer."""
    names = list(arrays)
    folder = sharded(path, [{name: arrays[name] for name in names[i::2]} for i in range(2)])
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer.json").write_text("{}")
    return folder


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= read(path)[0]
    return found


@pytest.mark.parametrize(("engine", "fmt"), CASES)
def test_there_and_back(engine, fmt, tmp_path):
    """The codes of an engine's folder are those of the format, and come back bit for bit; what is kept is unchanged."""
    source, out, back = folder_of(tmp_path / "in"), tmp_path / "out", tmp_path / "back.safetensors"
    text = ok("convert", source, out, "--format", fmt, "--to", engine, "--keep", "lm_head*")
    assert f"2 tensors in {fmt}, 3 unchanged" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"]
    found = tensors_of(out)
    for name in MODEL.keys() - {*WEIGHTS}:
        assert found[name].tobytes() == MODEL[name].tobytes()
    config = json.loads((out / "config.json").read_text())
    assert config["model_type"] == "llama"
    entry = config["quantization_config"]
    assert entry["quant_method"] == {"deepseek": "fp8"}.get(engine, engine)
    assert "lm_head" in entry.get("ignore", entry.get("modules_to_not_convert"))
    assert (out / "tokenizer.json").is_file()
    assert (out / "hf_quant_config.json").is_file() == (engine == "modelopt")

    ok("convert", out, back, "--format", fmt, "--keep", "lm_head*")
    arrays, metadata = read(back)
    for name, what in parse_metadata(metadata[KEY]).items():
        assert name in WEIGHTS
        plane = what.take(arrays, name)[what.planes[0]]
        expected = reference.quantize(MODEL[name], FORMATS[fmt]).rowwise
        for one, other in zip(plane, (expected.data, expected.scale_inv, expected.global_scale_inv), strict=True):
            assert one is other is None or one.tobytes() == other.tobytes()


@pytest.mark.parametrize(("engine", "fmt"), CASES)
def test_what_an_engine_has_already_is_copied(engine, fmt, tmp_path):
    """A folder of the engine, written again for the same engine, has the same tensors and the same config."""
    source, out, again = folder_of(tmp_path / "in"), tmp_path / "out", tmp_path / "again"
    ok("convert", source, out, "--format", fmt, "--to", engine)
    ok("convert", out, again, "--to", engine)
    assert {path.name for path in again.iterdir()} == {path.name for path in out.iterdir()}
    for path in out.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name


def test_gpt_oss_to_compressed_tensors(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "e.gate_up_proj_blocks": rng.integers(0, 256, (4, 64, 2, 16)).astype(np.uint8),
        "e.gate_up_proj_scales": rng.integers(100, 130, (4, 64, 2)).astype(np.uint8),
        "e.gate_up_proj_bias": np.ones((4, 64), BF16),
    }
    source = write(tmp_path / "in.safetensors", arrays)
    ok("convert", source, tmp_path / "out", "--to", "compressed-tensors")
    found = tensors_of(tmp_path / "out")
    assert found["e.gate_up_proj_packed"].shape == (4, 64, 32)
    assert found["e.gate_up_proj_packed"].tobytes() == arrays["e.gate_up_proj_blocks"].tobytes()
    assert found["e.gate_up_proj_scale"].tobytes() == arrays["e.gate_up_proj_scales"].tobytes()
    assert found["e.gate_up_proj_bias"].tobytes() == arrays["e.gate_up_proj_bias"].tobytes()


def test_several_shards_with_an_index(tmp_path):
    from qshard._cli.conversion import plan_conversion
    from qshard._cli.engine_output import write_engine
    from qshard._cli.plan import Plan
    from qshard._files.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(folder_of(tmp_path / "in"))
    done = plan_conversion(checkpoint, Plan({}, FORMATS["FP8_128x128"]), Usage.ROWWISE, (), for_engine=True)
    write_engine(tmp_path / "out", checkpoint, "deepseek", done, 0, most_bytes=40_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == [f"model-{i + 1:05}-of-00003.safetensors" for i in range(3)]
    found = {name: path.name for path in (tmp_path / "out").glob("*.safetensors") for name in read(path)[0]}
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors_of(tmp_path / "out").values())
    ok("convert", tmp_path / "out", tmp_path / "back.safetensors")


def test_arguments(tmp_path):
    source = folder_of(tmp_path / "in")
    out = tmp_path / "out"
    assert "NVFP4) has no form in deepseek; write compressed-tensors" in refused(
        "convert", source, out, "--format", "NVFP4", "--to", "deepseek"
    )
    assert "--to modelopt has the rowwise plane alone; leave --usage out" in refused(
        "convert", source, out, "--format", "NVFP4", "--to", "modelopt", "--usage", "both"
    )
    assert "already exists; name a new folder" in refused(
        "convert", source, source, "--format", "FP8_E4M3", "--to", "modelopt", "--force"
    )
    text = refused("convert", source, tmp_path / "o.safetensors")
    assert "has nothing to quantize: model.layers.0.up.weight: no format was given for it; give one by" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in"]


@pytest.mark.parametrize("engine", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("fmt", ["NVFP4", "NVFP4_16x16"])
def test_merged_weights_share_a_global_scale(engine, fmt, tmp_path):
    """vLLM takes one global scale for q, k and v, and one for gate and up: their codes are the rows of the whole."""
    at = "model.layers.0."
    groups = {
        at + "self_attn": ("q_proj", "k_proj", "v_proj"),
        at + "mlp": ("gate_proj", "up_proj"),
        at + "e.0": ("w1",),
    }
    arrays = {
        f"{prefix}.{name}.weight": (numbers((64 + 32 * i, 128), i) * 3**i).astype(BF16)
        for prefix, names in groups.items()
        for i, name in enumerate(names)
    }
    ok("convert", write(tmp_path / "in.safetensors", arrays), tmp_path / "out", "--format", fmt, "--to", engine)
    ok("convert", tmp_path / "out", tmp_path / "back.safetensors", "--format", fmt)
    found, metadata = read(tmp_path / "back.safetensors")
    weights = parse_metadata(metadata[KEY])
    for prefix, names in groups.items():
        whole = reference.quantize(np.concatenate([arrays[f"{prefix}.{name}.weight"] for name in names]), FORMATS[fmt])
        planes = [weights[f"{prefix}.{name}.weight"].take(found, f"{prefix}.{name}.weight") for name in names]
        planes = [plane[Usage.ROWWISE] for plane in planes]
        assert b"".join(plane.data.tobytes() for plane in planes) == whole.rowwise.data.tobytes()
        assert b"".join(plane.scale_inv.tobytes() for plane in planes) == whole.rowwise.scale_inv.tobytes()
        inverse = np.float32(1) / whole.rowwise.global_scale_inv
        stored = {whole.rowwise.global_scale_inv.item(), (np.float32(1) / inverse).item()}
        assert {plane.global_scale_inv.item() for plane in planes} <= stored


def test_codes_of_merged_weights_are_copied(tmp_path):
    """Weights with codes keep their own global scales, and a weight that is merged with them gets its own."""
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    arrays = {name: (numbers((64, 128), i) * 3**i).astype(BF16) for i, name in enumerate(names)}
    alone = write(tmp_path / "one.safetensors", {names[0]: arrays[names[0]]})
    ok("convert", alone, tmp_path / "one", "--format", "NVFP4", "--to", "modelopt")
    codes = tensors_of(tmp_path / "one")
    both = write(tmp_path / "both.safetensors", codes | {names[1]: arrays[names[1]]})
    text = ok("convert", both, tmp_path / "out", "--format", "NVFP4", "--to", "modelopt")
    assert "mlp.gate_proj.weight, mlp.up_proj.weight have codes with global scales of their own" in text
    found = tensors_of(tmp_path / "out")
    assert all(found[name].tobytes() == array.tobytes() for name, array in codes.items())
    own = reference.quantize(arrays[names[1]], FORMATS["NVFP4"]).rowwise
    assert found[names[1] + "_scale_2"].tobytes() == own.global_scale_inv.tobytes()


def test_merged_weights_with_codes_of_one_global_scale_need_no_remark(tmp_path):
    """Two copies of codes with different scales do: vLLM would take one of the scales."""
    names = ("mlp.gate_proj.weight", "mlp.up_proj.weight")
    arrays = {name: (numbers((64, 128), i) * 3**i).astype(BF16) for i, name in enumerate(names)}
    ok("convert", write(tmp_path / "in.safetensors", arrays), tmp_path / "a", "--format", "NVFP4", "--to", "modelopt")
    shared = tensors_of(tmp_path / "a")
    text = ok("convert", tmp_path / "a", tmp_path / "b", "--format", "NVFP4", "--to", "modelopt")
    assert "global scales of their own" not in text
    assert all(array.tobytes() == shared[name].tobytes() for name, array in tensors_of(tmp_path / "b").items())
    shared[names[0] + "_scale_2"] = shared[names[0] + "_scale_2"] * np.float32(2)
    text = ok(
        "convert", write(tmp_path / "c.safetensors", shared), tmp_path / "d", "--format", "NVFP4", "--to", "modelopt"
    )
    assert "have codes with global scales of their own, but vLLM takes one for all" in text


def test_embeddings_and_heads_stay_values(tmp_path):
    """Engines do not load their codes. A --format that names one in full quantizes it, and a plan does not."""
    kept = ["model.embed_tokens.weight", "transformer.wte.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"]
    arrays = {name: numbers((64, 128), i).astype(BF16) for i, name in enumerate([*kept, "up.weight"])}
    source = write(tmp_path / "in.safetensors", arrays)
    text = ok("convert", source, tmp_path / "out", "--format", "NVFP4", "--to", "modelopt")
    assert "1 tensor in NVFP4, 4 unchanged" in text
    assert "an embedding, router or output layer, which engines read as values" in text
    found = tensors_of(tmp_path / "out")
    assert all(found[name].tobytes() == arrays[name].tobytes() for name in kept)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"version": 1, "usage": "rowwise", "formats": dict.fromkeys(arrays, "NVFP4")}))
    ok("convert", source, tmp_path / "planned", "--plan", plan, "--to", "modelopt")
    assert {*tensors_of(tmp_path / "planned")} == {*found}
    named = ["--format", "lm_head.weight=NVFP4", "--format", "NVFP4"]
    ok("convert", source, tmp_path / "named", *named, "--to", "modelopt")
    assert "lm_head.weight_scale" in tensors_of(tmp_path / "named")
    ok("convert", source, tmp_path / "own.safetensors", "--format", "NVFP4")
    assert "lm_head.weight.rowwise.data" in read(tmp_path / "own.safetensors")[0]
