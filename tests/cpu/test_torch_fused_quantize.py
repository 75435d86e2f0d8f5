"""`swiglu_quantize` and `rms_norm_quantize` give the bits of the two calls that each stands for."""

import pytest
import torch

import qshard.torch_bridge as qt
from qshard.formats import FP8_E4M3, MXFP8_E4M3, NVFP4, Usage
from support.awkward import assert_bits_equal

HADAMARD = NVFP4.with_options(hadamard=True)


def assert_same(actual, expected):
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    for mine, other in ((actual.rowwise, expected.rowwise), (actual.columnwise, expected.columnwise)):
        for a, b in zip(mine, other, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert_bits_equal(*(part.reshape(-1).view(torch.uint8).numpy() for part in (a, b)))


@pytest.mark.parametrize("fmt", [FP8_E4M3, MXFP8_E4M3, NVFP4, HADAMARD], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_are_those_of_two_calls(fmt, dtype):
    gate, up = (torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(2))
    weight = up[0, 0].clone().requires_grad_()
    both = {"usage": Usage.BOTH}
    assert_same(qt.swiglu_quantize(gate, up, fmt, **both), qt.quantize(qt.swiglu(gate, up), fmt, **both))
    y = qt.rms_norm(gate, weight, 1e-5).detach()
    assert_same(qt.rms_norm_quantize(gate, weight, 1e-5, fmt, **both), qt.quantize(y, fmt, **both))


def test_nothing_is_read_again_for_its_amax():
    x = torch.ones(8, 32)
    for make in (lambda: qt.swiglu_quantize(x, x, FP8_E4M3), lambda: qt.rms_norm_quantize(x, x[0], 0.0, FP8_E4M3)):
        make()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
            make()
        names = {event.key for event in profile.key_averages()}
        assert any("cast_tensor" in name for name in names)
        assert not any("amax_tensor" in name for name in names)


def test_what_does_not_fit():
    x = torch.ones(8, 24)
    with pytest.raises(ValueError, match="swiglu_quantize"):
        qt.swiglu_quantize(x, x, NVFP4)
    with pytest.raises(ValueError, match="stochastic"):
        qt.swiglu_quantize(torch.ones(32, 32), torch.ones(32, 32), NVFP4.with_options(rounding="stochastic"))
