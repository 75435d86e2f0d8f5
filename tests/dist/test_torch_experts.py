"""Converted experts in 3-D parameters under FSDP2, DDP and ZeRO: the rows of a rank, as in one process."""

import copy
import pickle
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from qshard.torch_bridge import (
    QuantizedStack,
    WithMasters,
    ZeroOptimizer,
    convert,
    quantized_state_dict,
    stream_weights,
)
from support import torch_ranks
from support.experts import GatedExperts, GroupedExperts, Mixture, OpenExperts
from support.torch_models import Wire
from support.torch_ranks import on_ranks

KINDS = [GatedExperts, OpenExperts, GroupedExperts]


def model_of(kind, recipe):
    torch.manual_seed(0)
    model = Mixture(kind, sizes=(6, 128, 128)).to(torch_ranks.device)
    if kind is GroupedExperts:  # It casts weights to bfloat16 before the product, and FSDP2 gathers codes of shards.
        with torch.no_grad():
            for weight in model.experts.parameters():
                weight.copy_(weight.bfloat16())
    return convert(model, {"router": None, "head": None, "*": recipe})


def loss_of(model, rank):
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(rank)).to(torch_ranks.device)
    return model(x).square().mean()


def gradients_of(kind, recipe):
    """The mean over ranks, in one process."""
    model, world = model_of(kind, recipe), dist.get_world_size()
    for rank in range(world):
        (loss_of(model, rank) / world).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def assert_near(model, expected):
    for name, parameter in model.named_parameters():
        grad = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        want = expected[name.removeprefix("module.")]
        assert (grad - want).norm() <= 1e-5 * want.norm(), name


@pytest.mark.each_value
@on_ranks(2, 4)
@pytest.mark.parametrize("recipe", ["CurrentScaling", "MXFP8"])
@pytest.mark.parametrize("kind", KINDS)
def test_fsdp2(kind, recipe):
    """FSDP2 shards experts evenly or not, and gathers codes of the experts' weights."""
    model, rank, mesh = model_of(kind, recipe), dist.get_rank(), torch_ranks.mesh()
    for module in (model.experts, model):
        fully_shard(module, mesh=mesh)
    with Wire() as wire:
        loss = loss_of(model, rank)
    assert torch.uint8 in {dtype for dtype, _ in wire.of("allgather")}
    assert torch.equal(loss, loss_of(model_of(kind, recipe), rank))
    loss.backward()
    assert_near(model, gradients_of(kind, recipe))


@on_ranks(2)
def test_fsdp2_with_mixed_precision():
    """Codes are of the float32 shards, and the products have the dtype of the policy."""
    model, mesh = model_of(GatedExperts, "CurrentScaling"), torch_ranks.mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for module in (model.experts, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    x = torch.randn(32, 128).to(torch_ranks.device)
    with Wire() as wire:
        y = model(x)
    sent = wire.of("allgather")  # The router and the head are gathered as values.
    assert {dtype for dtype, _ in sent} == {torch.uint8, torch.bfloat16}
    assert sum(size for dtype, size in sent if dtype == torch.uint8) >= 6 * 3 * 128 * 128 // 2
    assert y.dtype == torch.bfloat16


@on_ranks(2)
def test_seeds_of_ranks_differ():
    """Ranks with equal buffers draw different bits for the same rows."""
    model = model_of(GatedExperts, "NVFP4")
    loss_of(model, 0).backward()
    grads = [torch.empty_like(model.experts.gate_up_proj) for _ in range(2)]
    dist.all_gather(grads, model.experts.gate_up_proj.grad)
    assert not torch.equal(*grads)


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_ddp(kind):
    model = DistributedDataParallel(model_of(kind, "CurrentScaling"))
    loss_of(model, dist.get_rank()).backward()
    assert_near(model, gradients_of(kind, "CurrentScaling"))


@pytest.mark.each_value
@on_ranks(1, 2)
@pytest.mark.parametrize("kind", KINDS)
def test_zero(kind):
    """Both stages have the same bits; experts are a unit."""
    results = []
    for stage in (False, True):
        model = model_of(kind, "CurrentScaling")
        optimizer = ZeroOptimizer(model, lr=1e-2, shard_weights=stage)
        losses = []
        for _ in range(3):
            loss = loss_of(model, dist.get_rank())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[-1] < losses[0]
        results.append((losses, optimizer.full_weights()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(value, results[1][1][name]) for name, value in results[0][1].items())


def sharded(kind, recipe="CurrentScaling", **options):
    torch.manual_seed(0)
    model = convert(Mixture(kind, sizes=(6, 128, 128)), {"router": None, "head": None, "*": recipe}, **options)
    for module in (model.experts, model):
        fully_shard(module, mesh=torch_ranks.mesh())
    return model.to(torch_ranks.device)


def train(model, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        loss = loss_of(model, dist.get_rank())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.each_value
@on_ranks(2, 4)
@pytest.mark.parametrize("recipe", ["CurrentScaling", "NVFP4"])
def test_primary_weights(recipe):
    """Codes as parameters: the losses of masters that each pass quantizes. State dicts have the masters."""
    found = []
    for primary in (False, True):
        model = sharded(GatedExperts, recipe, primary=primary)
        optimizer = WithMasters(model.parameters(), torch.optim.SGD, lr=0.1)
        found.append((train(model, optimizer), get_model_state_dict(model)))
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(*(each.full_tensor() for each in (value, found[1][1][name]))), name


@on_ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_and_checkpointing(kind):
    """Gradients of two microbatches without a reduction between them; recomputed activations have the same bits."""
    wholes = []
    for recompute in (False, True):
        model = sharded(kind)
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)
            x = torch.randn(32, 128, generator=torch.Generator().manual_seed(part)).to(torch_ranks.device)
            (checkpoint(model, x, use_reentrant=False) if recompute else model(x)).square().mean().backward()
        wholes.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*wholes, strict=True))
    one = model_of(kind, "CurrentScaling") if kind is not GroupedExperts else None
    for part in range(2) if one is not None else ():
        x = torch.randn(32, 128, generator=torch.Generator().manual_seed(part)).to(torch_ranks.device)
        one(x).square().mean().backward()
    for got, want in zip(wholes[0], one.parameters(), strict=True) if one is not None else ():
        assert (got - want.grad).norm() <= 1e-5 * want.grad.norm()


@on_ranks(2, 3)
def test_state_dicts():
    """A checkpoint has plain values, under the names of the plain model, and resumes on any kind of model."""
    model = sharded(GatedExperts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    states = get_state_dict(model, optimizer)
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(dict(enumerate(states)), checkpoint_id=f"{folder[0]}/saved")
    plain = Mixture(GatedExperts, sizes=(6, 128, 128)).to(torch_ranks.device)
    assert states[0].keys() == plain.state_dict().keys()
    expected = train(model, optimizer)
    model = sharded(GatedExperts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loaded = dict(enumerate(get_state_dict(model, optimizer)))
    dcp.load(loaded, checkpoint_id=f"{folder[0]}/saved")
    set_state_dict(model, optimizer, model_state_dict=loaded[0], optim_state_dict=loaded[1])
    assert train(model, optimizer) == expected
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        plain.load_state_dict(whole)
    exported = quantized_state_dict(model)
    assert all(type(exported[f"experts.{name}"]) is torch.Tensor for name in ("gate_up_proj", "down_proj"))
    model.unshard()
    model.experts.unshard()
    with pytest.raises(NotImplementedError, match=r"^QuantizedStack: .* call reshard\(\) on the module"):
        quantized_state_dict(model)


@on_ranks(1, 3)
def test_initial_values_do_not_depend_on_ranks():
    """Weights without memory are drawn by position: by experts, and by rows of every expert."""
    whole = None
    for axis in range(2) if dist.get_world_size() == 3 else range(1):
        with torch.device("meta"):
            model = convert(Mixture(GatedExperts, sizes=(5, 192, 96)), {"experts": "MXFP8", "*": None})
        fully_shard(model.experts, mesh=torch_ranks.mesh(), shard_placement_fn=lambda _, axis=axis: Shard(axis))
        model.experts.to_empty(device=torch_ranks.device)
        torch.manual_seed(5)
        nn.init.normal_(model.experts.gate_up_proj.to_local())
        found = model.experts.state_dict()["gate_up_proj"].full_tensor()
        assert whole is None or torch.equal(found, whole)
        whole = found
    total = whole.double().square().sum().item()
    assert total == pytest.approx(whole.numel(), rel=0.05)


@on_ranks(1, 2)
@pytest.mark.parametrize("kind", [GatedExperts, OpenExperts])
def test_streamed_weights(kind):
    """FSDP2 and both stages of ZeRO stream the codes of each expert of a whole model."""
    wanted = {name: bytes_of(each) for name, each in stream_weights(model_of(kind, "BlockScaling"), "deepseek")}
    streamed = [sharded(kind, "BlockScaling")]
    for stage in (False, True):
        streamed.append(model_of(kind, "BlockScaling"))
        ZeroOptimizer(streamed[-1], lr=1e-2, shard_weights=stage)
    for model in streamed:
        found = {name: bytes_of(each) for name, each in stream_weights(model, "deepseek")}
        assert found == wanted


def bytes_of(tensor):
    return tuple(tensor.shape), bytes(tensor.cpu().contiguous().flatten().view(torch.uint8).tolist())


@on_ranks(1)
def test_copies_of_codes():
    """A model with codes of stage 1 of ZeRO can be copied and pickled."""
    model = model_of(OpenExperts, "NVFP4")
    ZeroOptimizer(model, lr=1e-2)
    x = torch.ones(4, 128, device=torch_ranks.device)
    for copied in (copy.deepcopy(model.experts.down_proj), pickle.loads(pickle.dumps(model.experts.down_proj))):
        assert isinstance(copied, QuantizedStack)
        assert torch.equal(copied.dequantize(), model.experts.down_proj.dequantize())
    assert model(x).isfinite().all()
