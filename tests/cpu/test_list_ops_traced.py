"""Ops on lists fail alike where they run and where they are traced: one binder checks both."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import qshard.torch_bridge  # noqa: F401 - makes torch.ops.qshard

BLOCKS = {"block_rows": 1, "block_cols": 16, "rounded_to": "float32", "shapes": [2, 16], "whole": "none"}


def slices(**other):
    given = {
        "starts": torch.zeros(1, 2, dtype=torch.int32),
        "amax": torch.zeros(2),
        "x": [torch.ones(32)],
        **BLOCKS,
        **other,
    }
    operands = [given.pop(name) for name in ("starts", "amax", "x")]
    return torch.ops.qshard.amax_slices, operands, given


def transposes(data, data_t):
    return torch.ops.qshard.transpose_each, [data, data_t], {}


BYTES = torch.zeros(4, 2, dtype=torch.uint8)
WRONG = {
    "dtype": lambda: slices(amax=torch.zeros(2, dtype=torch.float64)),
    "dtypes": lambda: slices(x=[torch.ones(8), torch.ones(8).half()], starts=torch.zeros(2, 2, dtype=torch.int32)),
    "count": lambda: slices(starts=torch.zeros(2, 2, dtype=torch.int32)),
    "rank": lambda: slices(amax=torch.zeros(2, 1)),
    "block": lambda: slices(block_rows=-1),
    "text": lambda: slices(whole="column"),
    "extents": lambda: slices(shapes=[-1, 16]),
    "lists": lambda: transposes([BYTES], [BYTES.clone(), BYTES.clone()]),
    "same": lambda: transposes([BYTES], [torch.zeros(2, 4)]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_eager_and_traced_calls_fail_alike(wrong):
    op, operands, attributes = WRONG[wrong]()
    with pytest.raises((ValueError, TypeError)) as eager:
        op(*operands, **attributes)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [[mode.from_tensor(t) for t in o] if isinstance(o, list) else mode.from_tensor(o) for o in operands]
        with pytest.raises((ValueError, TypeError)) as traced:
            op(*fake, **attributes)
    assert str(traced.value).splitlines()[0] == str(eager.value).splitlines()[0]


def test_a_right_call_is_traced():
    op, operands, attributes = slices()
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        op(
            *[[mode.from_tensor(t) for t in o] if isinstance(o, list) else mode.from_tensor(o) for o in operands],
            **attributes,
        )
    op(*operands, **attributes)
    assert operands[1].tolist() == [1.0, 1.0]
