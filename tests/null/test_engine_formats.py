"""Weights in the tensors of serving engines: their values by the engines' own formulas, and the way back."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from qshard._core.serialization import Description
from qshard._files.engine_configs import engine_configs
from qshard._files.engine_formats import ENGINE_FORMATS, engine_tensors
from qshard.formats import (
    FORMATS,
    FP8_E4M3,
    MXFP4,
    MXFP8_E4M3,
    NVFP4,
    FP8_1x128,
    FP8_128x128,
    MXFP4_32x32,
    MXFP8_32x32,
    NVFP4_16x16,
    Usage,
)
from qshard.reference import quantize

E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
BYTES = {"F8_E4M3": np.uint8, "U8": np.uint8, "F32": np.float32}
FP8_CHANNEL = FP8_1x128.with_options(block=(1, 96), pow2=False)
HELD = {
    "deepseek": (FP8_128x128,),
    "compressed-tensors": (
        FP8_E4M3,
        FP8_CHANNEL,
        FP8_128x128,
        MXFP8_E4M3,
        MXFP8_32x32,
        MXFP4,
        MXFP4_32x32,
        NVFP4,
        NVFP4_16x16,
    ),
    "modelopt": (FP8_E4M3, FP8_CHANNEL, FP8_128x128, MXFP8_E4M3, MXFP8_32x32, NVFP4, NVFP4_16x16),
}
CASES = [(engine, fmt) for engine, formats in HELD.items() for fmt in formats]


def weight(seed):
    """Draw values of many magnitudes, with signed zeros and a block of zeros."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((64, 96)) * 2.0 ** rng.integers(-30, 30, (64, 96))).astype(np.float32)
    x[:32, :32] = 0
    x[3] *= -0.0
    return x


def files_of(engine, fmt, x):
    """Quantize `x`. Return its description, its planes, its tensors in the engine's format, and their contents."""
    q = quantize(x, fmt)
    what = Description(format=fmt, shape=x.shape, dtype="float32", planes=(Usage.ROWWISE,))
    tensors = engine_tensors(engine, "up.weight", what)
    return q, what, tensors, {each.name: each.encode(getattr(q.rowwise, each.part), np) for each in tensors}


def values_by_the_engine(stored, dtypes, cols):
    """Dequantize by the formula of the engine's own loader, from names and dtypes alone."""
    packed = "up.weight_packed" in stored or dtypes["up.weight"] == "U8"
    codes = stored["up.weight_packed" if "up.weight_packed" in stored else "up.weight"]
    if packed:  # compressed-tensors `unpack_fp4_from_uint8`, modelopt `NVFP4QTensor.dequantize`: low nibble first
        q = E2M1_VALUES[np.stack([codes & 15, codes >> 4], -1)].reshape(len(codes), cols)
    else:
        q = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    if "up.weight_scale_inv" in stored:  # deepseek `weight_dequant`: x * s of the 128 x 128 block
        scale = stored["up.weight_scale_inv"]
        return q * scale.repeat(128, 0).repeat(128, 1)[: q.shape[0], : q.shape[1]]
    name = "up.weight_scale"
    scale = stored[name]
    if dtypes[name] == "U8":  # compressed-tensors `decompress_mx_scale`, modelopt `MXFP8QTensor`: 2 ** (byte - 127)
        scale = np.exp2(scale.astype(np.float32) - 127)
    if dtypes[name] == "F8_E4M3":
        scale = scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        if "up.weight_global_scale" in stored:  # vLLM multiplies by 1 / global_scale
            scale = scale * (np.float32(1) / stored["up.weight_global_scale"])
        else:  # modelopt `double_scale`
            scale = scale * stored["up.weight_scale_2"]
    if scale.ndim == 4:  # modelopt FP8_PB_WO
        scale = scale[:, 0, :, 0]
    if scale.size > 1:
        scale = scale.reshape(len(scale), -1)
        block = 128 if scale.shape == tuple(-(-size // 128) for size in q.shape) else 1
        scale = scale.repeat(block, 0).repeat(128 if block > 1 else cols // scale.shape[1], 1)
    return q * scale[: q.shape[0], : q.shape[1]] if scale.ndim == 2 else q * scale


@pytest.mark.parametrize(("engine", "fmt"), CASES, ids=str)
def test_engines_compute_the_same_values(engine, fmt):
    x = weight(1)
    q, _, tensors, stored = files_of(engine, fmt, x)
    for each in tensors:
        assert stored[each.name].dtype == BYTES[each.dtype]
        assert stored[each.name].shape == each.shape
    values = values_by_the_engine(stored, {each.name: each.dtype for each in tensors}, x.shape[1])
    np.testing.assert_array_equal(values.view(np.uint32), q.dequantize(np.float32).view(np.uint32))


@pytest.mark.parametrize(("engine", "fmt"), CASES, ids=str)
def test_planes_come_back(engine, fmt):
    q, _, tensors, stored = files_of(engine, fmt, weight(2))
    for each in tensors:
        array, again = getattr(q.rowwise, each.part), each.decode(stored[each.name])
        assert (again.dtype, again.shape) == (array.dtype, array.shape)
        assert again.tobytes() == array.tobytes()


def test_a_reciprocal_of_a_reciprocal_has_the_same_reciprocal():
    """Of every float32 mantissa, so that 1 / weight_global_scale is the global scale that was trained with."""
    for exponent in (-60, 0, 60):
        s = np.arange(2**23, 2**24, dtype=np.float32) * np.float32(2.0 ** (exponent - 23))
        inverse = 1 / s
        np.testing.assert_array_equal(1 / (1 / inverse), inverse)


@pytest.mark.parametrize("engine", ENGINE_FORMATS)
def test_other_formats_are_errors_that_name_those_that_fit(engine):
    for fmt in {*FORMATS.values(), NVFP4.with_options(global_scale="row")} - {*HELD[engine]}:
        what = Description(format=fmt, shape=(96, 96 * 4), dtype="float32", planes=(Usage.ROWWISE,))
        if fmt.name == "FP8_128x128":
            continue
        with pytest.raises(ValueError, match=r"up.weight .* has no form in .*quantize to .*FP8_128x128"):
            engine_tensors(engine, "up.weight", what)


def test_other_errors():
    what = Description(format=FP8_128x128, shape=(2, 64, 128), dtype="float32", planes=(Usage.ROWWISE,))
    with pytest.raises(ValueError, match=r"format .'modelop'. is unknown; did you mean 'modelopt'"):
        engine_tensors("modelop", "up.weight", what)
    with pytest.raises(
        ValueError, match=r"blocks of up.weight \(2, 64, 128\) span matrices that deepseek scales apart"
    ):
        engine_tensors("deepseek", "up.weight", what)
    columnwise = Description(format=MXFP4, shape=(64, 64), dtype="float32", planes=(Usage.COLUMNWISE,))
    with pytest.raises(ValueError, match=r"up.weight has no rowwise plane, which compressed-tensors needs"):
        engine_tensors("compressed-tensors", "up.weight", columnwise)
    with pytest.raises(ValueError, match=r"has no form in modelopt; write compressed-tensors"):
        engine_configs(
            "modelopt",
            {"up.weight": Description(format=MXFP4, shape=(64, 64), dtype="float32", planes=(Usage.ROWWISE,))},
        )


def test_configs_say_how_weights_are_stored():
    def of(fmt):
        return Description(format=fmt, shape=(128, 128), dtype="float32", planes=(Usage.ROWWISE,))

    entry = engine_configs("compressed-tensors", {"a.weight": of(NVFP4)}, ["head.weight"])
    entry = entry["config.json"]["quantization_config"]
    assert (entry["format"], entry["ignore"]) == ("nvfp4-pack-quantized", ["head"])
    assert entry["config_groups"]["group_0"]["targets"] == ["Linear"]
    mixed = {"a.weight": of(NVFP4), "b.weight": of(FP8_E4M3), "c.weight": of(NVFP4_16x16)}
    entry = engine_configs("compressed-tensors", mixed)["config.json"]["quantization_config"]
    assert entry["format"] == "mixed-precision"
    assert [group["targets"] for group in entry["config_groups"].values()] == [["a", "c"], ["b"]]
    configs = engine_configs("modelopt", mixed)
    assert configs["config.json"]["quantization_config"]["quant_algo"] == "MIXED_PRECISION"
    layers = configs["hf_quant_config.json"]["quantization"]["quantized_layers"]
    assert layers["c"] == {"quant_algo": "W4A16_NVFP4", "group_size": 16}


@pytest.mark.parametrize("engine", ["compressed-tensors", "modelopt"])
def test_a_whole_fp8_weight_has_its_scale_for_each_row(engine):
    """vLLM merges q, k and v. With one scale for each of them it would quantize them again, for one scale of all."""
    x = weight(0)
    q, what, tensors, stored = files_of(engine, FP8_E4M3, x)
    assert [each.dtype for each in tensors] == ["F8_E4M3", "F32"]
    assert stored["up.weight_scale"].tobytes() == np.full(len(x), q.rowwise.scale_inv).tobytes()
    entry = engine_configs(engine, {"up.weight": what})["config.json"]["quantization_config"]
    assert entry["config_groups"]["group_0"]["weights"]["strategy"] == "channel"


@pytest.mark.parametrize("others", [(), ("lm_head.weight",), ("head.weight",)])
def test_modelopt_ignores_a_head_that_is_not_quantized(others):
    """Without it, vLLM would read codes of the head of a model with tied embeddings, whose file has no head."""
    what = Description(format=FP8_E4M3, shape=(128, 128), dtype="float32", planes=(Usage.ROWWISE,))
    configs = engine_configs("modelopt", {"up.weight": what}, others)
    lists = (
        configs["config.json"]["quantization_config"]["ignore"],
        configs["hf_quant_config.json"]["quantization"]["exclude_modules"],
    )
    assert all(names.count("lm_head") == 1 for names in lists)
    quantized = engine_configs("modelopt", {"up.weight": what, "model.lm_head.weight": what}, others[1:])
    assert quantized["config.json"]["quantization_config"]["ignore"] == []
