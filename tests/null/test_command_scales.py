"""Already quantized checkpoints: the command applies the scales of formats that it knows, and refuses the others."""

import contextlib
import io
import itertools
import json

import ml_dtypes
import numpy as np
import pytest

from qshard import formats, reference
from qshard._core.serialization import KEY, parse_metadata
from support.checkpoints import numbers, read, sharded, write

for _name in ("click", "rich", "safetensors"):
    pytest.importorskip(_name)
pytest.importorskip("qshard._ffi")

FMT = formats.MXFP8_E4M3
N, K = 256, 512
RNG = np.random.default_rng(0)


def fp8(shape=(N, K)):
    return (RNG.standard_normal(shape) * 50).astype(ml_dtypes.float8_e4m3fn)


def scale(*shape):
    return RNG.uniform(1e-4, 1e-3, shape).astype(np.float32)


def codes(*shape, dtype=np.uint8):
    return RNG.integers(0, 127, shape).astype(dtype)


BF16 = ml_dtypes.bfloat16
E4M3 = ml_dtypes.float8_e4m3fn
E8M0 = ml_dtypes.float8_e8m0fnu
LAYOUTS = {
    "DeepSeek": {"l.weight": fp8(), "l.weight_scale_inv": scale(N // 128, K // 128)},
    "DeepSeek, edges": {"l.weight": fp8((200, 352)), "l.weight_scale_inv": scale(2, 3)},
    "DeepSeek, E8M0": {"l.weight": fp8(), "l.scale": scale(N // 128, K // 128).astype(E8M0)},
    "a tensor": {"l.weight": fp8(), "l.weight_scale": scale(), "l.input_scale": scale()},
    "a tensor, one axis": {"l.weight": fp8(), "l.weight_scale": scale(1), "l.k_scale": scale(1), "l.v_scale": scale(1)},
    "E5M2": {"l.weight": fp8().astype(ml_dtypes.float8_e5m2), "l.weight_scale": scale()},
    "fbgemm": {"l.weight": fp8(), "l.weight_scale": scale(N, 1), "l.input_scale_ub": scale(1)},
    "compressed-tensors FP8": {"l.weight": fp8(), "l.weight_scale": scale(N, 1).astype(BF16)},
    "compressed-tensors NVFP4": {
        "l.weight_packed": codes(N, K // 2),
        "l.weight_scale": fp8((N, K // 16)),
        "l.weight_global_scale": scale(1),
        "l.input_global_scale": scale(1),
    },
    "compressed-tensors MXFP4": {"l.weight_packed": codes(N, K // 2), "l.weight_scale": codes(N, K // 32)},
    "compressed-tensors int4": {
        "l.weight_packed": codes(N, K // 8, dtype=np.int32),
        "l.weight_scale": scale(N, K // 128).astype(BF16),
        "l.weight_shape": np.array([N, K]),
    },
    "ModelOpt NVFP4": {
        "l.weight": codes(N, K // 2),
        "l.weight_scale": fp8((N, K // 16)),
        "l.weight_scale_2": scale(),
        "l.input_scale": scale(),
    },
    "gpt-oss MXFP4": {
        "e.gate_up_proj_blocks": codes(4, 64, 2, 16),
        "e.gate_up_proj_scales": codes(4, 64, 2),
        "e.gate_up_proj_bias": numbers((4, 64)).astype(BF16),
    },
    "MXFP8": {"l.weight": fp8(), "l.weight_scale": scale(N, K // 32).astype(E8M0)},
    "experts of Llama 4": {"e.gate_up_proj": fp8((4, 64, 64)), "e.gate_up_proj_scale": scale(4, 1, 64)},
    "ComfyUI": {"l.weight": fp8(), "l.scale_weight": scale(), "scaled_fp8": fp8((2,))},
    "int8": {"l.weight": codes(N, K, dtype=np.int8), "l.weight_scale": scale(N, 1)},
    "GPTQ": {
        "l.qweight": codes(K // 8, N, dtype=np.int32),
        "l.scales": scale(K // 128, N).astype(np.float16),
        "l.qzeros": codes(K // 128, N // 8, dtype=np.int32),
        "l.g_idx": codes(K, dtype=np.int32),
    },
    "MLX": {
        "l.weight": codes(N, K // 8, dtype=np.uint32),
        "l.scales": scale(N, K // 64).astype(BF16),
        "l.biases": scale(N, K // 64).astype(BF16),
    },
    "bitsandbytes": {"l.weight": codes(N * K // 2, 1), "l.weight.absmax": scale(N * K // 64)},
    "quanto": {"l.weight._data": codes(N, K, dtype=np.int8), "l.weight._scale": scale(N, 1)},
    "slashes": {"p/l/kernel": fp8(), "p/l/kernel_scale": scale(1, 1)},
    "qshard, its metadata lost": {"w.rowwise.data": codes(N, K), "w.rowwise.scale_inv": scale(N, K // 128)},
    "FP8 that was cast": {"l.weight": fp8().astype(BF16), "l.weight_scale_inv": scale(N // 128, K // 128)},
}
"""In each case the first tensor has the codes, and the second their scale."""
UNKNOWN = ["compressed-tensors int4", "experts of Llama 4", "ComfyUI", "int8", "GPTQ", "MLX", "bitsandbytes", "quanto"]
UNKNOWN += ["qshard, its metadata lost", "FP8 that was cast"]
KNOWN = [name for name in LAYOUTS if name not in UNKNOWN]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
PLAIN = {"other.weight": numbers((64, 128)).astype(BF16), "norm.weight": np.ones(64, np.float32)}
QUANTIZED = {"quantization_config": {"quant_method": "fp8"}}


def command(*arguments):
    """Run the command in this process; return status, standard output and standard error."""
    from qshard._cli.app import run

    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = run([*map(str, arguments)])
    return status, out.getvalue(), err.getvalue()


def same(a, b):
    return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


def converted(source, *options):
    """Status, output and the tensors that were written. Of those that were quantized: the description."""
    out = source.parent / "out.safetensors"
    out.unlink(missing_ok=True)
    there = sorted(source.parent.iterdir())
    status, text, error = command("convert", source, out, "--format", FMT, *options)
    if status:
        assert sorted(source.parent.iterdir()) == there
        assert (text, error.count("\n"), error.startswith("qshard: ")) == ("", 1, True)
        return status, error, {}, {}
    arrays, metadata = read(out)
    return status, text, arrays, parse_metadata(metadata[KEY])


def is_quantized_value(arrays, name, what, value):
    """Return whether codes and scales are the quantized `value`."""
    expected = reference.quantize(value.astype(np.float32), FMT).rowwise
    stored = what.take(arrays, name)[what.planes[0]]
    return all(
        a.tobytes() == b.tobytes() for a, b in ((stored.data, expected.data), (stored.scale_inv, expected.scale_inv))
    )


def value_of(arrays):
    """Return name and values of a quantized weight, from names, dtypes and shapes, by the formula of its library."""
    codes_of_it, scale_of_it, *_ = arrays
    codes, scale = arrays[codes_of_it], arrays[scale_of_it]
    if codes.dtype == np.uint8:
        codes = E2M1[np.stack([codes & 15, codes >> 4], -1)].reshape(*scale.shape[:-1], -1)
    codes = codes.astype(np.float32)
    if scale.dtype == np.uint8:
        scale = np.ldexp(np.float32(1), scale.astype(np.int32) - 127)
    scale = scale.astype(np.float32)
    if "l.weight_scale_2" in arrays:
        scale = scale * arrays["l.weight_scale_2"]
    if "l.weight_global_scale" in arrays:
        scale = scale * (np.float32(1) / arrays["l.weight_global_scale"])
    if scale.size > 1:
        for axis in (-2, -1):
            size = codes.shape[axis]
            block = 128 if -(-size // 128) == scale.shape[axis] and scale.shape[axis] > 1 else size // scale.shape[axis]
            scale = np.take(scale.repeat(block, axis), range(size), axis)
    name = codes_of_it.removesuffix("_packed").removesuffix("_blocks")
    return name, codes * scale.reshape(scale.shape if scale.size > 1 else ())


@pytest.mark.parametrize("name", KNOWN)
def test_scales_of_known_formats_are_applied(name, tmp_path):
    weight, value = value_of(LAYOUTS[name])
    source = write(tmp_path / "in.safetensors", LAYOUTS[name] | PLAIN)
    status, text, made, quantized = converted(source)
    assert status == 0, text
    assert "1 weight already quantized, read with their scales" in text
    # The console wraps where the path of a temporary folder is long.
    assert ("quantized again from the values of these codes" in " ".join(text.split())) == (name != "MXFP8")
    assert {weight, "other.weight"} <= quantized.keys()
    if name == "MXFP8":  # its own format: bit for bit
        stored = quantized[weight].take(made, weight)[quantized[weight].planes[0]]
        assert stored.data.tobytes() == LAYOUTS[name]["l.weight"].tobytes()
        assert stored.scale_inv.tobytes() == LAYOUTS[name]["l.weight_scale"].tobytes()
    else:
        assert is_quantized_value(made, weight, quantized[weight], value)
    others = LAYOUTS[name].keys() - {*list(LAYOUTS[name])[:2], "l.weight_scale_2", "l.weight_global_scale"}
    assert all(same(made[each], LAYOUTS[name][each]) for each in others - quantized.keys())
    status, out, _ = command("report", source, "--json", "--layers", weight)
    assert (status, [layer["shape"] for layer in json.loads(out)["layers"]]) == (0, [list(value.shape)])


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_checkpoint_that_is_quantized_is_refused(name, tmp_path):
    arrays = LAYOUTS[name] | PLAIN
    weight, its_scale = list(arrays)[:2]
    source = write(tmp_path / "in.safetensors", arrays)
    for arguments in (
        ("convert", source, tmp_path / "out.safetensors", "--format", "NVFP4"),
        ("report", source, "--json"),
    ):
        status, out, error = command(*arguments)
        assert (status, out, error.count("\n")) == (2, "", 1)
        assert " is already quantized (1 of " in error
        assert f": {weight} (" in error
        assert f" its scale in {its_scale}, which qshard does not apply; dequantize it first, or " in error
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_kept_of_it_stays_with_its_scales(name, tmp_path):
    arrays = LAYOUTS[name] | PLAIN
    weight, its_scale = list(arrays)[:2]
    source = write(tmp_path / "in.safetensors", arrays)
    if name in UNKNOWN:
        assert converted(source, "--keep", its_scale)[0] == 2  # Of no use: it is the codes that would be misread.
    else:
        assert value_of(LAYOUTS[name])[0] in converted(source, "--keep", its_scale)[3]
    status, text, made, quantized = converted(source, "--keep", weight)
    assert status == 0, text
    assert quantized.keys() - {"e.gate_up_proj_bias"} == {"other.weight"}
    for each in arrays.keys() - quantized.keys():
        assert same(made[each], arrays[each])
    status, out, _ = command("report", source, "--json", "--layers", "other.*")
    assert (status, [layer["name"] for layer in json.loads(out)["layers"]]) == (0, ["other.weight"])


def test_scales_are_no_layers_whatever_they_are_beside(tmp_path):
    names = ["x_scale", "x_scale_inv", "x_scale_2", "x.weight_scale_hp", "x_blocks", "x_scales", "x.weight_packed"]
    names += ["x.weight_global_scale", "x.input_scale", "x.k_scale", "x.v_scale", "x.scale", "norm/scale"]
    arrays = {name: numbers((64, 64), i) for i, name in enumerate(names)} | {"upscale": numbers(), "scale.w": numbers()}
    source = write(tmp_path / "in.safetensors", arrays)
    status, text, made, quantized = converted(source)
    assert (status, quantized.keys()) == (0, {"upscale", "scale.w"})
    assert "kept (a scale, by its name): 11: x_scale, x_scale_inv, x_scale_2, ..." in text
    assert all(same(made[name], arrays[name]) for name in names)
    status, out, _ = command("report", source, "--json")
    assert {layer["name"] for layer in json.loads(out)["layers"]} == {"upscale", "scale.w"}
    assert command("report", source, "--layers", "x_scale")[0] == 2


def test_a_scale_that_may_be_a_parameter_is_named(tmp_path):
    """For high-precision tensors the name alone is ambiguous, so it is a note; FP8 with these names is rejected."""
    arrays = {"q": numbers(), "q_scale": np.ones(64, np.float32)}
    source = write(tmp_path / "in.safetensors", arrays)
    remark = "q may have its scale in q_scale, which qshard does not apply"
    status, text, made, quantized = converted(source)
    assert (status, quantized.keys()) == (0, {"q"})
    assert remark in text
    assert is_quantized_value(made, "q", quantized["q"], arrays["q"])
    assert json.loads(command("report", source, "--json")[1])["layers"][0]["remarks"] == [remark]


def test_fp8_without_scales_is_plain_numbers_and_says_so(tmp_path):
    arrays = {f"l{i}.weight": fp8((32, 64)) for i in range(5)} | {"norm.scale": np.ones(64, np.float32)}
    source = write(tmp_path / "in.safetensors", arrays)
    note = "FP8 without scales, treated as plain numbers: l0.weight, l1.weight, l2.weight and 2 more"
    status, text, made, quantized = converted(source)
    assert status == 0
    assert note in " ".join(text.split())  # A terminal wraps it.
    for name, what in quantized.items():
        assert is_quantized_value(made, name, what, arrays[name])
    assert json.loads(command("report", source, "--json")[1])["notes"] == [note]
    (tmp_path / "config.json").write_text('{"quantization_config": null, "dtype": "float8_e4m3fn"}')
    assert converted(source)[0] == 0


@pytest.mark.parametrize("where", ["config", "text model", "ModelOpt", "metadata", "shard", "other tensors"])
def test_fp8_without_scales_in_a_checkpoint_that_is_quantized(where, tmp_path):
    """FP8 tensors in a quantized checkpoint are rejected if their scales are missing or in another file."""
    arrays, metadata, file = {"l.weight": fp8(), **PLAIN}, None, "in.safetensors"
    said = "config.json beside it says that the checkpoint is quantized"
    if where == "config":
        (tmp_path / "config.json").write_text(json.dumps(QUANTIZED))
    elif where == "text model":
        (tmp_path / "config.json").write_text(json.dumps({"layers": [{}] * 2000, "text_config": QUANTIZED}))
    elif where == "ModelOpt":
        (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
        said = f"hf_quant_{said}"
    elif where == "metadata":
        metadata, said = {"_quantization_metadata": "{}"}, "the metadata of the file has _quantization_metadata"
    elif where == "shard":
        file, said = "in-00001-of-00002.safetensors", "the file is one shard of several, and others may have it"
    else:
        arrays |= {"m.weight": fp8(), "m.weight_scale": scale()}
        said = "m.weight has one"
    source = write(tmp_path / file, arrays, metadata)
    options = ("--keep", "m.weight") if where == "other tensors" else ()
    status, error, _, _ = converted(source, *options)
    assert status == 2
    assert f": l.weight (F8_E4M3) has no scale, but {said}; dequantize it first" in error
    assert converted(source, *options, "--keep", "l.weight")[0] == 0


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 5000, b'{"quantization_config": {}}', b"null"])
def test_a_config_that_says_nothing(content, tmp_path):
    (tmp_path / "config.json").write_bytes(content)
    assert converted(write(tmp_path / "in.safetensors", {"l.weight": fp8()}))[0] == 0


def test_scales_in_other_shards(tmp_path):
    arrays = LAYOUTS["DeepSeek"]
    weight, its_scale = arrays
    folder = sharded(tmp_path / "model", [{weight: arrays[weight]}, {its_scale: arrays[its_scale]}])
    first = folder / "model-00001-of-00002.safetensors"
    text = "l.weight (F8_E4M3) has its scale in l.weight_scale_inv, which qshard does not apply"
    assert command("report", folder)[0] == 0
    assert "1 weight already quantized, read with their scales" in converted(folder)[1]
    (tmp_path / "out.safetensors").unlink()
    for source in (first,):
        for name in ("convert", "report"):
            options = (tmp_path / "out.safetensors", "--format", FMT) if name == "convert" else ()
            status, _, error = command(name, source, *options)
            assert (status, text in error) == (2, True)
    index = folder / "model.safetensors.index.json"
    written = json.loads(index.read_text())
    write(first, arrays)  # The scale is in the file, but not in the index.
    index.write_text(json.dumps(written | {"weight_map": {weight: first.name}}))
    status, _, error = command("report", folder)
    assert (status, text in error) == (2, True)


STATES = {
    "present": lambda module, last: f"{module}.{last}",
    "misnamed": lambda module, last: f"{module}.s",
    "misspelt": lambda module, last: f"{module}.wieghtScale",
    "upper": lambda module, last: f"{module}.{last.upper()}",
}
SHAPES = {"right": None, "one": (1,), "a grid of nothing": (3, 7), "three axes": (2, 2, 2), "empty": (0,)}
KEPT = [(), ("*scale*",), ("*.s",), ("l.weight",), ("l.*",)]
FILES = ["one", "shards", "a shard"]
CASES = [*itertools.product(STATES, SHAPES, KEPT, FILES, (False, True))]
CASES += [("present", "missing", *rest) for rest in itertools.product(KEPT, FILES, (False, True))]


@pytest.mark.parametrize("count", [60, pytest.param(len(CASES), marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["DeepSeek", "a tensor, one axis", "fbgemm", "MXFP8", "ModelOpt NVFP4"])
def test_no_number_is_wrong_in_silence(layout, count, tmp_path):
    """The product of files, names and shapes of scales, and what is kept: each quantized tensor is its value.

    The value has its scale applied. Where nothing that is left in the file tells of a scale, the tensor is named.
    """
    ends = {"refused": 0, "said": 0, "kept": 0, "applied": 0}
    weight, its_scale = list(LAYOUTS[layout])[:2]
    for i in np.random.default_rng(0).permutation(len(CASES))[:count]:
        state, shape, kept, files, has_config = CASES[i]
        arrays = {weight: LAYOUTS[layout][weight]}
        if shape != "missing":
            right = LAYOUTS[layout][its_scale]
            sizes = SHAPES[shape] or right.shape
            name = STATES[state](*its_scale.split("."))
            arrays[name] = np.resize(right.reshape(-1), sizes) if shape != "empty" else right.reshape(-1)[:0]
        source = written(tmp_path / str(i), arrays, weight, files, has_config)
        status, text, made, quantized = converted(source, *(word for glob in kept for word in ("--keep", glob)))
        if status:
            ends["refused"] += " is already quantized" in text
            continue
        for name in quantized.keys() - {weight}:
            assert is_quantized_value(made, name, quantized[name], (arrays | PLAIN)[name])
        if "already quantized, read with their scales" in text and weight in quantized:
            ends["applied"] += 1
            used = {name: array for name, array in arrays.items() if name != "l.bias"}
            if layout == "MXFP8" and shape == "right":  # its own format
                assert same(made[f"{weight}.rowwise.data"].view(E4M3), arrays[weight])
            else:
                assert is_quantized_value(made, weight, quantized[weight], value_of(used)[1])
        elif weight in quantized:
            ends["said"] += 1
            assert "FP8 without scales, treated as plain numbers: l.weight" in text
            assert not has_config
            assert shape in ("missing", "empty") or (state == "misnamed" and shape not in ("right", "one")), CASES[i]
            assert is_quantized_value(made, weight, quantized[weight], arrays[weight])
        else:
            ends["kept"] += 1
            assert same(made[weight], arrays[weight])
    assert ends["refused"] > 0
    assert ends["kept"] > 0
    assert (ends["said"] > 0) == (layout != "ModelOpt NVFP4")  # Its codes are integers.


def written(where, arrays, weight, files, has_config):
    """A checkpoint, as one file or with the scales in another shard, of which the command gets the index or a part."""
    where.mkdir()
    first = {weight: arrays[weight], "l.bias": np.ones(N, np.float32)}
    second = {name: array for name, array in (arrays | PLAIN).items() if name != weight}
    if files == "one":
        source = write(where / "in.safetensors", first | second)
    else:
        source = sharded(where / "model", [first, second])
    if has_config:
        ((source if files != "one" else where) / "config.json").write_text(json.dumps(QUANTIZED))
    return source / "model-00001-of-00002.safetensors" if files == "a shard" else source
