"""Scales and casts where elements are infinite or NaN, for either value of the option `nonfinite`.

The bits of every format with either value are under every test that runs over `support.formats`. Here are all amaxes
that matter, and scales that are given, as in delayed scaling, where elements and no scale must show an infinity.
"""

import itertools

import numpy as np
import pytest
import torch

import qshard.torch_bridge  # noqa: F401 - makes torch.ops.qshard
from qshard import reference
from qshard.formats import E2M1, E4M3, E5M2, FP8_E4M3, FP8_E5M2
from support import op_calls
from support.awkward import DTYPES, assert_bits_equal, awkward_values
from support.op_calls import call

OPTIONS = ("saturate", "nan")


def amaxes(count=600):
    """Of blocks: bells, subnormals, the largest number, and some zeros, infinities and NaN."""
    amax = np.abs(awkward_values((6, count), 3, np.float32)).reshape(-1)
    amax[::7] = np.array([0, np.inf, np.nan, np.finfo(np.float32).max, 1e-45], np.float32)[
        np.arange(len(amax[::7])) % 5
    ]
    return amax


@pytest.mark.parametrize("nonfinite", OPTIONS)
def test_scales_of_amaxes(nonfinite):
    amax = amaxes()
    for element, pow2, eps in itertools.product((E4M3, E5M2), (False, True), (0.0, 0.5)):
        options = {"pow2": pow2, "eps": eps, "nonfinite": nonfinite}
        got, want = (
            call("scale_from_amax", amax, element=element.name, **options),
            reference.scale_from_amax(amax, element, **options),
        )
        for a, b in zip(got, want, strict=True):
            assert_bits_equal(a, b, f"scale_from_amax {element} {options}")
        assert np.isnan(got[0]).any() == (nonfinite == "nan")
    shown = reference.shown_amax(amax, nonfinite)
    for element, rounding in itertools.product((E4M3, E5M2), ("up", "floor")):
        _, codes = call("scale_e8m0", amax, element=element.name, rounding=rounding, nonfinite=nonfinite)
        assert_bits_equal(codes, reference.e8m0_from_amax(shown, element, rounding=rounding), f"scale_e8m0 {rounding}")
    for whole in (np.float32(3), np.float32(np.inf)):
        got = call("scale_nvfp4", amax, whole, scale_max=448.0, nonfinite=nonfinite)
        want = call("scale_nvfp4", shown, whole, scale_max=448.0)
        for a, b in zip(got, want, strict=True):
            assert_bits_equal(a, b, f"scale_nvfp4 {whole}")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nonfinite", OPTIONS)
def test_casts_under_a_scale_of_earlier_steps(nonfinite, dtype):
    """Infinite elements alone become NaN; the bits of finite ones, zeros with their signs among them, do not change."""
    for fmt, shape in itertools.product((FP8_E4M3, FP8_E5M2), [(1, 1), (31, 37), (130, 72), (256, 384)]):
        x = awkward_values(shape, 1, dtype)
        x.flat[:: max(1, x.size // 50)] = np.inf
        x.flat[1 :: max(1, x.size // 40)] = -np.inf
        for scale in (np.float32(1.7), np.float32(1e-30), np.float32(1e30)):
            chosen = fmt.with_options(nonfinite=nonfinite)
            want = reference.quantize(x, chosen, scale=scale).rowwise.data
            options = {"element": fmt.element.name, "nonfinite": nonfinite, "lead": 0}
            data, amax = call("cast_amax", x, scale, **options)
            assert_bits_equal(data, want, f"cast_amax {chosen} {shape} {scale}")
            assert_bits_equal(amax, reference.amax(x), "amax")
            data, data_t, amax = call("cast_transpose_amax", x, scale, batch=0, **options)
            assert_bits_equal(data, want, f"cast_transpose_amax {chosen} {shape} {scale}")
            assert_bits_equal(data_t, np.ascontiguousarray(want.T), "transposed")
            assert_bits_equal(amax, reference.amax(x), "amax")
            infinite = np.isinf(x.astype(np.float32))
            assert (want[infinite] == fmt.element.nan_code).all() == (nonfinite == "nan")


@pytest.mark.parametrize("element", [E4M3, E5M2, E2M1], ids=str)
@pytest.mark.parametrize("nonfinite", OPTIONS)
def test_slices_under_a_scale_of_earlier_steps(nonfinite, element):
    """Slices that begin and end amid a byte; ones long enough for every way through the kernel."""
    rows, cols = 40, 130
    for start, length in [(0, rows * cols), (3, 20), (131, 4001), (2, 1)]:
        x = awkward_values((1, length), start, np.float32).reshape(-1)
        x[::3], x[1::7] = np.inf, -np.inf
        scaled = np.where(np.isinf(x) & (nonfinite == "nan"), np.float32(np.nan), x * np.float32(1.7))
        want = np.zeros(rows * cols, np.uint8)
        want[start : start + length] = reference.encode(scaled, element)
        want = reference.pack(want) if element is E2M1 else want
        data = torch.zeros(len(want), dtype=torch.uint8, device=op_calls.device)
        torch.ops.qshard.cast_slices(
            torch.tensor([[start, 0]], dtype=torch.int32, device=op_calls.device),
            torch.tensor([1.7], device=op_calls.device),
            [torch.from_numpy(x).to(op_calls.device)],
            [data],
            block_rows=0,
            block_cols=0,
            element=element.name,
            nonfinite=nonfinite,
            pieces=False,
            rounded_to="float32",
            shapes=[rows, cols],
        )
        assert_bits_equal(data.cpu().numpy(), want, f"{element} {start} {length}")
