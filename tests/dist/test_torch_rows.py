"""A scale of a row is of its own elements: over a group, each rank quantizes its rows as they would be in the whole."""

import numpy as np
import pytest
import torch.distributed as dist

from qshard import reference
from qshard.formats import NVFP4, Usage
from qshard.torch_bridge import gather_slices, quantize
from support import torch_ranks
from support.awkward import TAME, assert_bits_equal, awkward_values
from support.fronts import TorchFront
from support.torch_ranks import run

FRONT = TorchFront("cpu")
BY_ROW = [NVFP4.with_options(global_scale="row"), NVFP4.with_options(global_scale="row", four_over_six="mae")]


def quantize_rows(rows, fmt):
    x = awkward_values((rows, 64), 3, kinds=TAME) * np.float32(2.0) ** np.arange(rows)[:, None]
    part = torch_ranks.own_rows(rows)
    mine = FRONT.array(x[part].astype(np.float32)).to(torch_ranks.device)
    q = quantize(mine, fmt, group=dist.group.WORLD).rowwise
    whole = reference.quantize(x.astype(np.float32), fmt, Usage.ROWWISE).rowwise
    for name in ("data", "scale_inv", "global_scale_inv"):
        assert_bits_equal(FRONT.numpy(getattr(q, name)), getattr(whole, name)[part], name)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("rows", [6, 7, 2])
@pytest.mark.parametrize("fmt", BY_ROW, ids=str)
def test_rows_have_scales_of_their_own(world, rows, fmt):
    """Even rows, uneven ones, and fewer than ranks."""
    run(world, quantize_rows, rows=rows, fmt=fmt)


def gathers_nothing():
    assert gather_slices([], [], dist.group.WORLD) == []


def test_no_slices_are_gathered_as_no_weights():
    run(2, gathers_nothing)
