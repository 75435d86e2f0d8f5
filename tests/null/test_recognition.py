"""Quantized weights of others are recognized by names, dtypes and shapes; what contradicts is not."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from null.test_engine_formats import BYTES, CASES, files_of, weight
from qshard._files.engine_formats import engine_tensors
from qshard._files.recognition import TensorSpec, block_of_config, recognize
from qshard.reference import Plane, Quantized

N, K = 256, 512
W = {"l.weight": TensorSpec("F8_E4M3", (N, K))}
KNOWN = {
    "DeepSeek": (W | {"l.weight_scale_inv": TensorSpec("F32", (2, 4))}, "FP8_128x128[pow2=False]"),
    "edges": (
        {"l.weight": TensorSpec("F8_E4M3", (200, 352)), "l.weight_scale_inv": TensorSpec("F32", (2, 3))},
        "FP8_128x128[pow2=False]",
    ),
    "DeepSeek, E8M0": (W | {"l.scale": TensorSpec("F8_E8M0", (2, 4))}, "FP8_128x128[pow2=False]"),
    "tensor": (W | {"l.weight_scale": TensorSpec("F32", ()), "l.input_scale": TensorSpec("F32", ())}, "FP8_E4M3"),
    "fbgemm": (
        W | {"l.weight_scale": TensorSpec("F32", (N, 1)), "l.input_scale_ub": TensorSpec("F32", (1,))},
        "FP8_1x128[block=(1, 512), pow2=False]",
    ),
    "compressed-tensors": (W | {"l.weight_scale": TensorSpec("BF16", (N, 1))}, "FP8_1x128[block=(1, 512), pow2=False]"),
    "ModelOpt FP8_PB_WO": (W | {"l.weight_scale": TensorSpec("F32", (2, 1, 4, 1))}, "FP8_128x128[pow2=False]"),
    "E5M2": (
        {"l.weight": TensorSpec("F8_E5M2", (N, K)), "l.weight_scale": TensorSpec("F32", (1,))},
        "FP8_E5M2",
    ),
    "MXFP8": (W | {"l.weight_scale": TensorSpec("U8", (N, K // 32))}, "MXFP8_E4M3"),
    "MXFP8, E8M0": (W | {"l.weight_scale_inv": TensorSpec("F8_E8M0", (N, K // 32))}, "MXFP8_E4M3"),
    "MXFP4": (
        {"l.weight_packed": TensorSpec("U8", (N, K // 2)), "l.weight_scale": TensorSpec("U8", (N, K // 32))},
        "MXFP4",
    ),
    "NVFP4": (
        {
            "l.weight_packed": TensorSpec("U8", (N, K // 2)),
            "l.weight_scale": TensorSpec("F8_E4M3", (N, K // 16)),
            "l.weight_global_scale": TensorSpec("F32", (1,)),
            "l.input_global_scale": TensorSpec("F32", (1,)),
        },
        "NVFP4",
    ),
    "NVFP4 of ModelOpt": (
        {
            "l.weight": TensorSpec("U8", (N, K // 2)),
            "l.weight_scale": TensorSpec("F8_E4M3", (N, K // 16)),
            "l.weight_scale_2": TensorSpec("F32", ()),
            "l.input_scale": TensorSpec("F32", ()),
        },
        "NVFP4",
    ),
    "gpt-oss": (
        {
            "l.weight_blocks": TensorSpec("U8", (4, N, K // 32, 16)),
            "l.weight_scales": TensorSpec("U8", (4, N, K // 32)),
            "l.weight_bias": TensorSpec("BF16", (4, N)),
        },
        "MXFP4",
    ),
    "experts": (
        {"l.weight": TensorSpec("F8_E4M3", (4, N, K)), "l.weight_scale_inv": TensorSpec("F32", (4, 2, 4))},
        "FP8_128x128[pow2=False]",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_layouts(name):
    tensors, fmt = KNOWN[name]
    (found,) = recognize(tensors | {"other.weight": TensorSpec("BF16", (4, 4))}).values()
    assert (found.name, str(found.description.format)) == ("l.weight", fmt)
    assert {each.name for each in found.tensors} <= tensors.keys()
    shape = tensors.get("l.weight", TensorSpec("", (4, N, K) if "l.weight_blocks" in tensors else (N, K))).shape
    assert found.description.shape == ((N, K) if name == "NVFP4 of ModelOpt" else shape)


@pytest.mark.parametrize("name", KNOWN)
@pytest.mark.parametrize(
    "change",
    [
        {"l.weight_zero_point": TensorSpec("I8", (N, 1))},
        {"l.pre_quant_scale": TensorSpec("BF16", (K,))},
        {"l.weight_g_idx": TensorSpec("I32", (K,))},
        {"l.weight_scale_3": TensorSpec("F32", ())},
        "shape",
        "dtype",
        "missing",
    ],
    ids=str,
)
def test_what_contradicts_is_not_recognized(name, change):
    tensors = dict(KNOWN[name][0])
    scale = list(tensors)[1]
    dtype, shape = tensors[scale]
    if change == "shape":
        tensors[scale] = TensorSpec(dtype, (*shape, 3))
    elif change == "dtype":
        tensors[scale] = TensorSpec("I32", shape)
    elif change == "missing":
        del tensors[scale]
    else:
        tensors |= change
    assert recognize(tensors) == {}


def test_two_scales_or_a_name_that_is_taken():
    both = W | {"l.weight_scale": TensorSpec("F32", ()), "l.weight_scale_inv": TensorSpec("F32", (2, 4))}
    assert recognize(both) == {}
    assert recognize(KNOWN["MXFP4"][0] | {"l.weight": TensorSpec("BF16", (N, K))}) == {}
    spanning = {"l.weight": TensorSpec("F8_E4M3", (2, 65, 128)), "l.weight_scale_inv": TensorSpec("F32", (2, 1, 1))}
    assert recognize(spanning) == {}


def test_blocks_of_the_config():
    tensors = W | {"l.weight_scale_inv": TensorSpec("F32", (4, 8))}
    assert recognize(tensors) == {}
    block = block_of_config({"text_config": {"quantization_config": {"weight_block_size": [64, 64]}}})
    (found,) = recognize(tensors, block).values()
    assert str(found.description.format) == "FP8_128x128[block=(64, 64), pow2=False]"
    for config in (None, {}, {"weight_block_size": None}, {"weight_block_size": [64]}, {"weight_block_size": "axb"}):
        assert block_of_config(config) == (128, 128)
    assert block_of_config({"weights": {"block_structure": "64x32"}}) == (64, 32)


@pytest.mark.parametrize(("engine", "fmt"), CASES, ids=str)
def test_values_of_what_qshard_writes(engine, fmt):
    """The planes that are read have the values of those that were written, and give the same bytes again."""
    q, _, tensors, stored = files_of(engine, fmt, weight(3))
    (found,) = recognize({each.name: TensorSpec(each.dtype, each.shape) for each in tensors}).values()
    raw = {name: np.ascontiguousarray(array).reshape(-1).view(np.uint8) for name, array in stored.items()}
    plane, what = found.plane(raw), found.description
    again = Quantized(format=what.format, shape=what.shape, dtype=np.dtype("f4"), rowwise=Plane(**plane._asdict()))
    np.testing.assert_array_equal(again.dequantize().view(np.uint32), q.dequantize(np.float32).view(np.uint32))
    for each in engine_tensors(engine, found.name, what):
        bytes_of_it = np.ascontiguousarray(each.encode(getattr(plane, each.part), np))
        assert bytes_of_it.dtype == BYTES[each.dtype]
        assert bytes_of_it.tobytes() == raw[each.name].tobytes()


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F8_E8M0"])
def test_float_scales_of_other_dtypes_are_widened(dtype):
    of_numpy = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F8_E8M0": ml_dtypes.float8_e8m0fnu}[dtype]
    scale = np.array([[0.5, 2**-14], [1, 4]], np.float32).astype(of_numpy)
    codes = np.full((256, 256), 0x38, np.uint8)  # 1
    (found,) = recognize(
        {"w.weight": TensorSpec("F8_E4M3", (256, 256)), "w.weight_scale_inv": TensorSpec(dtype, (2, 2))}
    ).values()
    plane = found.plane({"w.weight": codes.reshape(-1), "w.weight_scale_inv": scale.reshape(-1).view(np.uint8)})
    np.testing.assert_array_equal(plane.scale_inv, scale.astype(np.float32))
