"""`qshard.torch_bridge.Adam` on FSDP2 shards: a rank has its rows of what one process would have, states included."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qshard import reference
from qshard.formats import FP8_E4M3, Usage
from qshard.recipes import CurrentScaling
from qshard.torch_bridge import Adam, convert
from support import torch_ranks
from support.awkward import assert_bits_equal
from support.torch_ranks import run

COLUMNS = 200  # A block of 128, and a cut one.
ROWS = (128, 105, 3, 1)  # Even, uneven, and fewer than ranks.
SETTINGS = [
    ("float32", {}),
    ("bfloat16", {"exp_avg_dtype": "float8_e4m3fn", "exp_avg_sq_dtype": "float8_e5m2", "master_weights": "remainder"}),
    ("bfloat16", {"exp_avg_dtype": "bfloat16", "exp_avg_sq_dtype": "float16", "master_weights": "float32"}),
]
every_setting = pytest.mark.parametrize(("dtype", "settings"), SETTINGS, ids=str)


class Layers(nn.Sequential):
    """Layers side by side, so that every one of them has a forward."""

    def forward(self, x):
        return torch.cat([layer(x) for layer in self], dim=-1)


def model_of(dtype):
    torch.manual_seed(0)
    return Layers(*(nn.Linear(COLUMNS, rows, dtype=getattr(torch, dtype)) for rows in ROWS))


def optimizer_of(model, settings):
    dtypes = {k: getattr(torch, v) if k.endswith("dtype") else v for k, v in settings.items()}
    return Adam(model.parameters(), lr=1e-2, weight_decay=0.1, decoupled_weight_decay=True, **dtypes)


def sharded(dtype):
    model = convert(model_of(dtype), CurrentScaling(weight=FP8_E4M3))
    for layer in model:
        fully_shard(layer, mesh=torch_ranks.mesh())
    return fully_shard(model, mesh=torch_ranks.mesh())


def set_grads(model, seed):
    for i, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * seed + i)).to(p.dtype)
        p.grad = distribute_tensor(grad, p.device_mesh, p.placements) if isinstance(p, DTensor) else grad


def trained(model, optimizer, steps=range(3)):
    for step in steps:
        set_grads(model, step)
        optimizer.step()
    return model, optimizer


def local_of(tensor):
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    local = getattr(local, "shard", local).detach()
    return local.view(torch.uint8) if local.dtype.itemsize == 1 else local


def assert_is_shard_of(model, optimizer, whole, whole_optimizer):
    """The parameters of this rank and all of their states are the rows of those of the whole model."""
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        rows = torch_ranks.own_rows(q.shape[0])
        a, b = optimizer.state[p], whole_optimizer.state[q]
        assert a.keys() == b.keys()
        for key, ours, theirs in [("parameter", p, q), *((key, a[key], b[key]) for key in a)]:
            assert ours.dtype == theirs.dtype
            if key == "step":
                assert ours == theirs
                continue
            assert type(ours) is DTensor or key == "parameter"
            assert ours.shape == theirs.shape, f"{key} of {name}"
            assert torch.equal(local_of(ours), local_of(theirs)[rows]), f"{key} of {name}"


def updates(dtype, settings):
    model = sharded(dtype)
    optimizer = optimizer_of(model, settings)
    trained(model, optimizer)
    whole = model_of(dtype)
    whole_optimizer = optimizer_of(whole, settings)
    trained(whole, whole_optimizer)
    assert_is_shard_of(model, optimizer, whole, whole_optimizer)
    for layer, exact in zip(model, whole, strict=True):  # The step has made scales out of date.
        layer.unshard()
        expected = reference.quantize(exact.weight.detach().float().numpy(), FP8_E4M3, Usage.ROWWISE).rowwise
        assert_bits_equal(layer.weight.rowwise.data.view(torch.uint8).clone().numpy(), expected.data)
        layer.reshard()


@pytest.mark.parametrize("world", [2, 4])
@every_setting
def test_shards_are_updated_where_they_are(world, dtype, settings):
    run(world, updates, dtype=dtype, settings=settings)


def trains(settings):
    model = sharded("float32")
    optimizer = optimizer_of(model, settings)
    losses = []
    for _ in range(8):
        loss = model(torch.ones(4, COLUMNS)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_a_model_trains_on_fp8_states():
    run(2, trains, settings={"exp_avg_dtype": "float8_e4m3fn", "exp_avg_sq_dtype": "float8_e4m3fn"})


def saves(folder, dtype, settings):
    model = sharded(dtype)
    optimizer = optimizer_of(model, settings)
    trained(model, optimizer)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=folder)


def loads(folder, dtype, settings):
    model = sharded(dtype)
    optimizer = optimizer_of(model, settings)
    state, optimizer_state = get_state_dict(model, optimizer)
    both = {"model": state, "optimizer": optimizer_state}
    dcp.load(both, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=both["model"], optim_state_dict=both["optimizer"])
    trained(model, optimizer, [7])
    whole = model_of(dtype)
    whole_optimizer = optimizer_of(whole, settings)
    trained(whole, whole_optimizer, [0, 1, 2, 7])
    assert_is_shard_of(model, optimizer, whole, whole_optimizer)


@every_setting
def test_a_checkpoint_goes_on_with_other_ranks(dtype, settings, tmp_path):
    """Bit for bit: what FP8 codes stand for depends on no rank, so they may move as they are."""
    run(2, saves, folder=str(tmp_path), dtype=dtype, settings=settings)
    run(3, loads, folder=str(tmp_path), dtype=dtype, settings=settings)


def refuses_cut_blocks():
    mesh = torch_ranks.mesh()
    p = nn.Parameter(distribute_tensor(torch.ones(4, 300), mesh, [Shard(1)]))
    with pytest.raises(ValueError, match=r"parameter \(4, 300\) \(cut into 2 along axis 1\) is not cut at blocks"):
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


def test_columns_are_cut_at_blocks():
    run(2, refuses_cut_blocks)
