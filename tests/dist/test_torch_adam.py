"""`qshard.torch_bridge.Adam` on FSDP2 shards: a rank has its rows of what one process would have, states included.

Checkpoints of it are in test_torch_checkpoint.py.
"""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from qshard.formats import FP8_E4M3
from qshard.recipes import CurrentScaling
from qshard.torch_bridge import Adam, Muon, convert
from support import torch_ranks
from support.awkward import awkward_values
from support.torch_models import assert_gathers_the_whole, shard, side_by_side
from support.torch_ranks import on_ranks

COLUMNS = 200  # A block of 128, and a cut one.
ROWS = (128, 105, 3, 1)  # Even, uneven, and fewer than ranks.
FP8 = {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e5m2}
SETTINGS = [
    ("float32", {}),
    ("bfloat16", {**FP8, "master_weights": "remainder"}),
    ("bfloat16", {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.float16, "master_weights": "float32"}),
]


def model_of(dtype):
    values = [awkward_values((rows, COLUMNS), rows, dtype, kinds=["normal"]) for rows in ROWS]
    return side_by_side(values, bias=True)


def optimizer_of(model, settings):
    return Adam(model.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, **settings)


def sharded(dtype):
    return shard(convert(model_of(dtype), CurrentScaling(weight=FP8_E4M3)))


def local_of(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = getattr(local, "shard", local).detach()
    return local.view(torch.uint8) if local.dtype.itemsize == 1 else local


@pytest.mark.each_value
@on_ranks(2, 4)
@pytest.mark.parametrize(("dtype", "settings"), SETTINGS, ids=str)
def test_shards_are_updated_where_they_are(dtype, settings):
    """The parameters of this rank and all of their states are the rows of those of the whole model."""
    torch.manual_seed(0)
    whole = model_of(dtype)
    torch.manual_seed(0)
    model = sharded(dtype)
    optimizers = [optimizer_of(each, settings) for each in (model, whole)]
    for step in range(3):
        for i, (p, q) in enumerate(zip(model.parameters(), whole.parameters(), strict=True)):
            q.grad = torch.randn(q.shape, generator=torch.Generator().manual_seed(100 * step + i)).to(q.dtype)
            p.grad = distribute_tensor(q.grad, p.device_mesh, p.placements)
        for optimizer in optimizers:
            optimizer.step()
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        rows = torch_ranks.own_rows(q.shape[0])
        a, b = optimizers[0].state[p], optimizers[1].state[q]
        assert a.keys() == b.keys()
        for key, ours, theirs in [("parameter", p, q), *((key, a[key], b[key]) for key in a)]:
            assert ours.dtype == theirs.dtype
            if key == "step":
                assert ours == theirs
                continue
            assert type(ours) is DTensor or key == "parameter"
            assert ours.shape == theirs.shape, f"{key} of {name}"
            assert torch.equal(local_of(ours), local_of(theirs)[rows]), f"{key} of {name}"
    assert_gathers_the_whole(model)  # The step has made scales out of date.


@on_ranks(2)
def test_a_model_trains_on_fp8_states():
    torch.manual_seed(0)
    model = sharded("float32")
    optimizer = optimizer_of(model, FP8)
    losses = []
    for _ in range(8):
        loss = model(torch.ones(4, COLUMNS)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


@on_ranks(2)
def test_columns_are_cut_at_blocks():
    mesh = torch_ranks.mesh()
    p = nn.Parameter(distribute_tensor(torch.ones(4, 300), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"parameter \(4, 300\) \(axis 1 in 2 shards\) is not sharded on blocks"):
        Adam([p], exp_avg_dtype=torch.float8_e4m3fn)
    Adam([p])
    whole = nn.Parameter(torch.ones(4, 512))
    p = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(1)]))
    a, b = (Adam([x], exp_avg_dtype=torch.float8_e4m3fn) for x in (p, whole))
    grad = torch.randn(4, 512)
    p.grad, whole.grad = distribute_tensor(grad, mesh, [Shard(1)]), grad
    a.step()
    b.step()
    for key in ("exp_avg_scale_inv", "exp_avg_sq"):
        assert torch.equal(a.state[p][key].full_tensor(), b.state[whole][key])
    assert torch.equal(p.full_tensor(), whole)


@on_ranks(2)
@pytest.mark.parametrize("kind", [Adam, Muon])
def test_partial_sums_of_gradients_are_added(kind):
    """Replicated parameters under sequence parallelism, such as norms, have partial sums as gradients."""
    mesh, rank = torch_ranks.mesh(), torch.distributed.get_rank()
    parts = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0)).to(torch_ranks.device)
    whole = nn.Parameter(torch.ones_like(parts[0]))
    weight = nn.Parameter(distribute_tensor(whole.detach().clone(), mesh, [Replicate()]))
    whole.grad = parts.sum(0)
    weight.grad = DTensor.from_local(parts[rank], mesh, [Partial()])
    for parameter in (weight, whole):
        kind([("weight", parameter)], lr=1e-2).step()
    assert torch.equal(weight.to_local(), whole)
