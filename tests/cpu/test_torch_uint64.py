"""64-bit numbers as int32 pairs, and errors for values that are not such numbers."""

import numpy as np
import pytest
import torch

from qshard.formats import FP8_E4M3, MXFP8_32x32, Usage
from qshard.torch_bridge import cast_master, quantize, update_columnwise
from qshard.torch_bridge._ops.uint64 import as_uint64

CPU = torch.device("cpu")
NUMBERS = [0, 5, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]


def test_words_are_the_number():
    expected = np.array(NUMBERS, np.uint64).view(np.int32).reshape(-1, 2)
    each = torch.stack([as_uint64("op", "seed", number, CPU) for number in NUMBERS])
    assert np.array_equal(each.numpy(), expected)
    assert np.array_equal(as_uint64("op", "starts", NUMBERS, CPU, len(NUMBERS)).numpy(), expected)
    as_int64 = torch.from_numpy(np.array(NUMBERS[:5], np.int64))
    assert np.array_equal(as_uint64("op", "starts", as_int64, CPU, 5).numpy(), expected[:5])
    assert as_uint64("op", "starts", [], CPU, 0).shape == (0, 2)


@pytest.mark.parametrize("starts", [[-1], torch.tensor([-1])], ids=["int", "tensor"])
def test_a_negative_start_is_refused(starts):
    q = quantize(torch.zeros(4), FP8_E4M3)
    with pytest.raises(ValueError, match=r"cast_master: starts \(-1\) is not in \[0, 2\*\*64\)"):
        cast_master([q], [torch.ones(2)], starts, parity="master")
    assert not q.dequantize().any()


@pytest.mark.parametrize("change", [torch.detach, torch.clone], ids=["detach", "clone"])
def test_a_stale_plane_stays_stale_and_keeps_its_memory(change):
    q = quantize(torch.zeros(32, 64), MXFP8_32x32, usage=Usage.BOTH)
    cast_master([q], [torch.ones(32 * 64)], [0], parity="master")
    other = change(q)
    memory = other.parts(Usage.COLUMNWISE, stale=True).data
    assert q.columnwise is None
    assert other.columnwise is None
    assert memory.shape == (64, 32)
    update_columnwise([other])
    assert other.parts(Usage.COLUMNWISE).data.data_ptr() == memory.data_ptr()
    assert torch.equal(other.dequantize(usage=Usage.COLUMNWISE), torch.ones(32, 64))
