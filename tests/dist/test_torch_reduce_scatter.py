"""`reduce_gradients_in_order`: FSDP2 gradients are the float32 sums of what ranks send, in the order of ranks."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from qshard import reference
from qshard.formats import FORMATS
from qshard.torch_bridge import Adam, ZeroOptimizer, convert, reduce_gradients_in_order
from support import torch_ranks
from support.torch_models import shard, whole
from support.torch_ranks import on_ranks

SIZES = (64, 32, 96, 32)  # Three ranks do not divide the rows.


def made(recipe=None):
    torch.manual_seed(0)
    layers = [nn.Linear(k, n) for k, n in itertools.pairwise(SIZES)]
    model = nn.Sequential(*layers).to(torch_ranks.device)
    return model if recipe is None else convert(model, recipe)


def batch(microbatch, rank):
    generator = torch.Generator().manual_seed(10 * microbatch + rank)
    return torch.randn(5, SIZES[0], generator=generator).to(torch_ranks.device)


def sums_in_order(model, ranks, dtype, microbatches=1, param_dtype=None):
    """Compute what each rank sends, one after the other, and add it."""
    plain = copy.deepcopy(model).to(param_dtype)
    totals = []
    for rank in ranks:
        plain.zero_grad()
        for microbatch in range(microbatches):
            plain(batch(microbatch, rank).to(param_dtype)).square().sum().backward()
        sent = [p.grad.to(dtype).float() for p in plain.parameters()]
        totals = [a + b for a, b in zip(totals, sent, strict=True)] if totals else sent
    return totals


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("recipe", "dtype"), [(None, FP16), (None, FP32), ("CurrentScaling", BF16), ("MXFP8", BF16)], ids=str
)
@on_ranks(1, 3, 4)
def test_sums_are_in_the_order_of_ranks(recipe, dtype):
    model = made(recipe)
    want = sums_in_order(model, range(dist.get_world_size()), dtype)
    shard(model)
    reduce_gradients_in_order(model, dtype)
    model(batch(0, dist.get_rank())).square().sum().backward()
    for p, total in zip(model.parameters(), want, strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.equal(p.grad.full_tensor(), total / dist.get_world_size())


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@on_ranks(3)
def test_mixed_precision(reduce_dtype):
    """Whatever FSDP2 was told, the sum is float32."""
    model = made("CurrentScaling").to(torch.bfloat16).float()
    want = sums_in_order(model, range(dist.get_world_size()), torch.bfloat16, param_dtype=torch.bfloat16)
    shard(model, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=reduce_dtype))
    reduce_gradients_in_order(model)
    model(batch(0, dist.get_rank())).square().sum().backward()
    for p, total in zip(model.parameters(), want, strict=True):
        assert torch.equal(p.grad.full_tensor(), total / dist.get_world_size())


@on_ranks(3)
def test_microbatches():
    """The unsharded sum of three microbatches is sent once."""
    model = made("CurrentScaling")
    want = sums_in_order(model, range(dist.get_world_size()), torch.bfloat16, microbatches=3)
    shard(model)
    reduce_gradients_in_order(model)
    for microbatch in range(3):
        for module in (*model, model):
            module.set_requires_gradient_sync(microbatch == 2)
        model(batch(microbatch, dist.get_rank())).square().sum().backward()
    for p, total in zip(model.parameters(), want, strict=True):
        assert torch.equal(p.grad.full_tensor(), total / dist.get_world_size())


@on_ranks((2, 2), (2, 1))
def test_replicas():
    """Each replica sums its ranks; the sum of two replicas is the same in any order, and in float32."""
    model, shards = made("CurrentScaling"), dist.get_world_size() // 2
    replicas = range(shards), range(shards, 2 * shards)
    first, second = (sums_in_order(model, ranks, torch.bfloat16) for ranks in replicas)
    shard(model)
    reduce_gradients_in_order(model)
    model(batch(0, dist.get_rank())).square().sum().backward()
    for p, a, b in zip(model.parameters(), first, second, strict=True):
        assert torch.equal(p.grad.full_tensor(), (a / shards + b / shards) / 2)


@on_ranks(3)
def test_offload_and_a_forced_sum():
    model = made("CurrentScaling")
    want = sums_in_order(model, range(dist.get_world_size()), torch.bfloat16)
    if torch_ranks.device == "cpu":
        shard(model)
    else:
        shard(model, offload_policy=CPUOffloadPolicy())
    reduce_gradients_in_order(model)
    for module in (*model, model):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(2.0)
    model(batch(0, dist.get_rank())).square().sum().backward()
    for p, total in zip(model.parameters(), want, strict=True):
        assert torch.equal(p.grad.full_tensor().cpu(), (total / 2).cpu())


@on_ranks(3)
def test_zero_sums_alike():
    """An optimizer step from the sums of either is the same."""
    model = made()
    zero = copy.deepcopy(model)
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    ours = ZeroOptimizer(zero, reduce_dtype=torch.bfloat16, **settings)
    shard(model)
    reduce_gradients_in_order(model)
    adam = Adam(model.parameters(), **settings)
    x = batch(0, dist.get_rank())
    for each, optimizer in ((model, adam), (zero, ours)):
        each(x).square().sum().backward()
        optimizer.step()
    for name, p in zero.named_parameters():
        assert torch.equal(p, whole(model)[name]), name


def is_near(sums, want, sent, fraction):
    """Check sums of codes: `sent` are the absolute values that ranks sent, added, and their largest element.

    An element of each rank may be off by 1 / 229376 of it; 2^-17 is more, for the fp32 sums.
    """
    absolute, largest = sent
    return ((sums - want).abs() <= absolute * fraction + largest * 2.0**-17 * dist.get_world_size()).all()


@pytest.mark.each_value
@pytest.mark.parametrize(("fmt", "fraction"), [("MXFP8_E4M3", 1 / 16), ("MXFP8_E5M2", 1 / 8)])
@on_ranks(1, 3, 4)
def test_codes_on_the_wire(fmt, fraction):
    """FSDP2, and ZeRO in both stages, are as near to the sums of values as the format promises."""
    model = made("CurrentScaling")
    ranks, world = range(dist.get_world_size()), dist.get_world_size()
    want = sums_in_order(model, ranks, FP32)
    each = [sums_in_order(model, [rank], FP32) for rank in ranks]
    absolute = [sum(g.abs() for g in grads) for grads in zip(*each, strict=True)]
    largest = max(g.abs().max() for grads in each for g in grads)
    zeros = [copy.deepcopy(model) for _ in range(2)]
    shard(model)
    reduce_gradients_in_order(model, fmt)
    model(batch(0, dist.get_rank())).square().sum().backward()
    for p, total, sent in zip(model.parameters(), want, absolute, strict=True):
        assert is_near(p.grad.full_tensor() * world, total, (sent, largest), fraction)
        assert world == 1 or not torch.equal(p.grad.full_tensor() * world, total)  # One rank sends nothing.
    stages = []
    for zero, sharded in zip(zeros, (False, True), strict=True):
        optimizer = ZeroOptimizer(zero, reduce_dtype=fmt, shard_weights=sharded, units=[zero] if sharded else None)
        zero(batch(0, dist.get_rank())).square().sum().backward()
        optimizer.step()
        stages.append(optimizer.full_weights())
    assert all(torch.equal(a, b) for a, b in zip(*(stage.values() for stage in stages), strict=True))


class Scale(nn.Module):
    """A layer whose gradient is its input."""

    def __init__(self, *shape):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return self.weight * x


@on_ranks(3)
def test_codes_are_of_what_a_rank_receives():
    """Zeros arrive as zeros; infinities and NaN as such, in blocks of 32 elements of what rank 0 receives."""
    model = nn.Sequential(Scale(6, 64)).to(torch_ranks.device)
    shard(model)
    reduce_gradients_in_order(model, "MXFP8_E4M3")
    sent = torch.zeros(6, 64, device=torch_ranks.device)
    if dist.get_rank() == 1:
        sent[0, 3], sent[1, 5], sent[2] = float("inf"), float("nan"), 3.0
    model(sent).sum().backward()
    grad = model[0].weight.grad.full_tensor().cpu()
    want = torch.zeros(6, 64)
    want[0, 3], want[1, :32], want[2] = float("inf"), float("nan"), 1.0
    assert torch.equal(grad.nan_to_num(nan=5.0), want.nan_to_num(nan=5.0))


@pytest.mark.parametrize("fmt", ["MXFP8_E4M3", "MXFP8_E5M2"])
@on_ranks(3)
def test_sums_of_codes_are_in_the_order_of_ranks(fmt):
    """Two rows of 64 elements for each rank: whole blocks."""
    model = nn.Sequential(Scale(6, 64)).to(torch_ranks.device)
    shard(model)
    reduce_gradients_in_order(model, fmt)
    ranks = range(dist.get_world_size())
    grads = [torch.randn(6, 64, generator=torch.Generator().manual_seed(rank)) for rank in ranks]
    model(grads[dist.get_rank()].to(torch_ranks.device)).sum().backward()
    arrived = [reference.quantize(grad.view(-1, 32).numpy(), FORMATS[fmt]).dequantize() for grad in grads]
    want = torch.from_numpy(arrived[0] + arrived[1] + arrived[2]).view(6, 64) / len(ranks)
    assert torch.equal(model[0].weight.grad.full_tensor().cpu(), want)


@on_ranks(3)
def test_zero_sends_codes_in_any_number_of_messages():
    """A block never spans two messages, and weights without a gradient send zeros."""
    done = []
    for sent_at_once in (1 << 27, 3 * 4 * 64):
        model = made("MXFP8").to(torch.bfloat16)
        unused = nn.Linear(7, 3).to(torch_ranks.device)
        optimizer = ZeroOptimizer(nn.ModuleList([model, unused]), lr=1e-2, reduce_dtype="MXFP8_E4M3")
        for flat in optimizer._flats:
            flat.gradient.sent_at_once = sent_at_once
        for microbatch in range(2):
            model(batch(microbatch, dist.get_rank()).to(torch.bfloat16)).square().sum().backward()
        optimizer.step()
        done.append(optimizer.full_weights())
    assert all(torch.equal(a, b) for a, b in zip(*(weights.values() for weights in done), strict=True))


@on_ranks(2)
def test_mistakes():
    with pytest.raises(ValueError, match="no module of the model is an FSDP2 module; call fully_shard before"):
        reduce_gradients_in_order(made())
    model = shard(made())
    with pytest.raises(TypeError, match="reduce_gradients_in_order: dtype"):
        reduce_gradients_in_order(model, torch.float8_e4m3fn)
    for fmt in ("NVFP4", "MXFP8_32x32", "MXFP8_E4M3[scale_rounding=floor]"):
        with pytest.raises(ValueError, match="is not a format of gradients; pass MXFP8_E4M3, MXFP8_E5M2 or a float"):
            reduce_gradients_in_order(model, fmt)
    with pytest.raises(ValueError, match="ZeroOptimizer: reduce_dtype"):
        ZeroOptimizer(made(), reduce_dtype="FP8_E4M3")
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module"):
        reduce_gradients_in_order([model])
    reduce_gradients_in_order(model)
    for module in (*model, model):
        module.set_gradient_divide_factor(3.0)
    with pytest.raises(NotImplementedError, match=r"set_force_sum_reduction_for_comms\(True\)"):
        model(batch(0, dist.get_rank())).square().sum().backward()
