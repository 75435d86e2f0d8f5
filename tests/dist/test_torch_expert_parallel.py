"""Expert parallelism: ranks that share experts against one process with all experts and the tokens of all ranks."""

import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from qshard._core.quantize_steps import plane_rows
from qshard.formats import Usage
from qshard.recipes import NAMED, Recipe, Role
from qshard.torch_bridge import (
    MoE,
    ZeroOptimizer,
    grouped_mlp,
    moe_permutation,
    moe_permute,
    prepare_modules_for_fsdp1,
    update_scales,
)
from qshard.torch_bridge._distributed.token_exchange import TokenExchange
from qshard.torch_bridge._experts.expert_parallel import place_received, quantize_dispatched
from qshard.torch_bridge._experts.tiles import quantize_experts, tile_rows_of, tiles_of
from qshard.torch_bridge._nn.operands import operand_spec
from support import torch_ranks
from support.formats import nearest
from support.torch_models import Wire
from support.torch_ranks import on_ranks

WIDTH, HIDDEN, EXPERTS, TOP_K = 128, 128, 8, 2
E4M3 = Recipe(weight="FP8_E4M3", activation="FP8_E4M3", gradient="FP8_E4M3")
RECIPES = {name: nearest(recipe) for name, recipe in NAMED.items() if not recipe.stateful} | {
    "E4M3": E4M3,
    "none": None,
}
CODES = ("CurrentScaling", "E4M3")


def group():
    return dist.group.WORLD


def weights_of_all():
    generator = torch.Generator().manual_seed(7)
    w13 = torch.randn(EXPERTS, 2 * HIDDEN, WIDTH, generator=generator) / WIDTH**0.5
    w2 = torch.randn(EXPERTS, WIDTH, HIDDEN, generator=generator) / HIDDEN**0.5
    return w13.to(torch_ranks.device), w2.to(torch_ranks.device)


def tokens_of(rank, load):
    """Return x, indices, weights of experts and the gradient of y on a rank.

    "uneven": ranks have different numbers of tokens, and expert 3 has none. "empty": only the experts of rank 0 have
    tokens, and rank 1 has no tokens of its own.
    """
    generator = torch.Generator().manual_seed(rank)
    tokens = {"uneven": 30 + 23 * rank, "empty": 0 if rank == 1 else 40}[load]
    x, dy = (torch.randn(tokens, WIDTH, generator=generator) * (1 + 3 * rank) for _ in range(2))
    indices = torch.randint(EXPERTS if load == "uneven" else 2, (tokens, TOP_K), generator=generator)
    indices[indices == 3] = -1
    weights = torch.rand(tokens, TOP_K, generator=generator)
    return [each.to(torch_ranks.device) for each in (x, indices, weights, dy)]


def both_ways(x, indices, weights, dy, w13, w2, recipe, **options):
    """Return y, and the gradients of x, weights, w13 and w2."""
    leaves = [each.clone().requires_grad_() for each in (x, weights, w13, w2)]
    y = grouped_mlp(leaves[0], indices, leaves[1], *leaves[2:], recipe, **options)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def own(of_experts, rank):
    return of_experts.chunk(dist.get_world_size())[rank]


def is_one_device(name, load, dtype="float32", error=0.0, top_k=TOP_K):
    rank, world = dist.get_rank(), dist.get_world_size()
    w13, w2 = (w.to(getattr(torch, dtype)) for w in weights_of_all())
    each = [tokens_of(other, load) for other in range(world)]
    for own_tokens in each:
        own_tokens[1:3] = (part[:, :top_k] for part in own_tokens[1:3])
        own_tokens[0], own_tokens[3] = (own_tokens[i].to(w13.dtype) for i in (0, 3))
    options = {}
    if RECIPES[name] is not None and RECIPES[name].stochastic:
        seeds = torch.arange(4 * EXPERTS, dtype=torch.int32, device=torch_ranks.device).view(2, EXPERTS, 2)
        options["seeds"] = tuple(seeds)
    whole = both_ways(*(torch.cat(parts) for parts in zip(*each, strict=True)), w13, w2, RECIPES[name], **options)
    if options:
        options["seeds"] = tuple(own(of_experts, rank) for of_experts in seeds)
    weights = own(w13, rank), own(w2, rank)
    found = both_ways(*each[rank], *weights, RECIPES[name], ep_group=group(), **options)
    sizes = [own_tokens[0].shape[0] for own_tokens in each]
    expected = [result.split(sizes)[rank] for result in whole[:3]] + [own(result, rank) for result in whole[3:]]
    for what, a, b in zip(("y", "dx", "dweights", "dw13", "dw2"), found, expected, strict=True):
        assert a.shape == b.shape, what
        if error:
            assert (a - b).norm() <= error * b.norm(), (what, (a - b).norm() / b.norm())
            if what in ("y", "dx"):  # A row in a wrong place would be off by its norm.
                assert ((a - b).norm(dim=-1) <= 8 * error * b.norm(dim=-1)).all(), what
        else:
            assert torch.equal(a, b), (what, (a - b).abs().max())


@pytest.mark.each_value
@on_ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize("load", ["uneven", "empty"])
@pytest.mark.parametrize("name", RECIPES)
def test_is_one_device(name, load):
    """Bit for bit on a CPU, where products sum rows of an expert in their order, whatever padding follows them."""
    is_one_device(name, load)


@on_ranks(2)
@pytest.mark.parametrize(("dtype", "name"), [("bfloat16", "CurrentScaling"), ("float16", "BlockScaling")])
def test_other_dtypes_and_one_expert_a_token(dtype, name):
    is_one_device(name, "uneven", dtype, top_k=1)


@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling"])
def test_gradients_of_two_microbatches_add_up(name):
    """The second microbatch has tokens of rank 0 only."""
    layer, both = layer_of(name, group()), layer_of(name, group())
    own_tokens = tokens_of(dist.get_rank(), "uneven")[0]
    batches = [own_tokens, own_tokens[: 7 * (dist.get_rank() == 0)]]
    sums = {key: torch.zeros_like(parameter) for key, parameter in layer.named_parameters()}
    for x in batches:
        layer.zero_grad()
        layer(x).square().sum().backward()
        both(x).square().sum().backward()
        for key, parameter in layer.named_parameters():
            sums[key] += parameter.grad
    for key, parameter in both.named_parameters():
        assert torch.equal(parameter.grad, sums[key]), key


def codes_are_those_of_one_device(name, role, usage=Usage.BOTH):
    """Planes of a local expert are, bit for bit, planes of its rows from all ranks on one device."""
    recipe, world, rank = RECIPES[name], dist.get_world_size(), dist.get_rank()
    spec = operand_spec(recipe, role, usage)

    def sorted_rows(parts):
        x, indices = (torch.cat([part[i] for part in parts]) for i in range(2))
        permutation = moe_permutation(indices, EXPERTS)
        return moe_permute(x, permutation), permutation.group_sizes

    each = [tokens_of(other, "uneven") for other in range(world)]
    rows, sizes = sorted_rows(each)
    whole_tiles, _ = tiles_of(tile_rows_of(rows.device, recipe), rows.shape[0], sizes)
    whole, _ = quantize_experts(rows, spec, whole_tiles)
    rows, sizes = sorted_rows(each[rank : rank + 1])
    exchange = TokenExchange(sizes, rows.shape[0], group(), "facts")
    tiles, _ = tiles_of(tile_rows_of(rows.device, recipe), exchange.received, exchange.group_sizes)
    tiles = place_received(tiles, exchange)
    found = quantize_dispatched(rows, spec, tiles, exchange, seeds=None)
    local = EXPERTS // world
    for usage, operand in found.items():
        for expert in range(local):
            a = operand_of(operand, tiles, expert)
            b = operand_of(whole[usage], whole_tiles, rank * local + expert)
            for one, other in zip(a, b, strict=True):
                assert torch.equal(one.view(torch.uint8), other.view(torch.uint8)), (usage, expert)


def operand_of(operand, tiles, expert):
    """Return the tensors of a plane of one expert."""
    (start, stop), scale = [0, *tiles.stops.tolist()][expert : expert + 2], operand.expert_scale
    parts = operand.parts if scale is None else operand.parts._replace(scale_inv=None)
    parts = plane_rows(parts, operand.format, operand.usage, start, stop)
    if scale is not None:
        return [parts.data.contiguous(), scale[expert : expert + 1]]
    used = (parts.data != 0).any(1)  # Scales of padding are not defined, and its codes are 0.
    return [parts.data.contiguous(), parts.scale_inv[used].contiguous()]


@on_ranks(2)
@pytest.mark.parametrize("role", [Role.ACTIVATION, Role.GRADIENT], ids=str)
@pytest.mark.parametrize("name", CODES)
def test_codes(name, role):
    codes_are_those_of_one_device(name, role)


@on_ranks(2)
@pytest.mark.parametrize("name", ["BlockScaling", "MXFP8", "MXFP4"])
def test_codes_of_blocks(name):
    codes_are_those_of_one_device(name, Role.GRADIENT, Usage.ROWWISE)


@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "MXFP8", "NVFP4"])
@pytest.mark.parametrize("frozen", [False, True])
def test_bytes_on_the_wire(name, frozen):
    """Codes of x and dy are sent with one scale, and in blocks without columnwise planes; values of y and dx."""
    recipe, tokens = RECIPES[name], tokens_of(dist.get_rank(), "uneven")
    weights = [own(w, dist.get_rank()).bfloat16().requires_grad_(not frozen) for w in weights_of_all()]
    x, indices, of_experts, dy = tokens[0].bfloat16().requires_grad_(), *tokens[1:3], tokens[3].bfloat16()
    options = {"ep_group": group()}
    if recipe.stochastic:
        options["seeds"] = tuple(torch.arange(4 * EXPERTS, dtype=torch.int32).view(2, EXPERTS, 2)[:, : EXPERTS // 2])
    with Wire() as wire:
        grouped_mlp(x, indices, of_experts, *weights, recipe, **options).backward(dy)
    is_block, values = name in ("BlockScaling", "MXFP8"), [torch.bfloat16]
    codes = values if name == "NVFP4" or (is_block and not frozen) else [torch.uint8]
    if is_block and frozen:
        codes = [torch.uint8, torch.float32 if name == "BlockScaling" else torch.uint8]
    sent = [dtype for dtype, _ in wire.of("alltoall")]
    assert sent == [torch.int32, *codes, *values, *codes, *values], wire.calls
    assert wire.of("allreduce") == ([(torch.int32, EXPERTS)] * 2 if name == "CurrentScaling" else [])


@on_ranks(2)
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "MXFP8"])
def test_frozen_experts_are_one_device(name):
    """Also where codes of blocks are sent, without a gradient and with one for the tokens only."""
    rank, world = dist.get_rank(), dist.get_world_size()
    w13, w2 = weights_of_all()
    each = [tokens_of(other, "uneven") for other in range(world)]

    def run(x, indices, weights, dy, *experts, **options):
        with torch.no_grad():
            alone = grouped_mlp(x, indices, weights, *experts, RECIPES[name], **options)
        x = x.clone().requires_grad_()
        y = grouped_mlp(x, indices, weights, *experts, RECIPES[name], **options)
        assert torch.equal(alone, y)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    whole = run(*(torch.cat(parts) for parts in zip(*each, strict=True)), w13, w2)
    found = run(*each[rank], own(w13, rank), own(w2, rank), ep_group=group())
    sizes = [own_tokens[0].shape[0] for own_tokens in each]
    for a, b in zip(found, whole, strict=True):
        assert torch.equal(a, b.split(sizes)[rank])


@on_ranks(2, 4)
def test_ranks_that_differ_raise_on_all():
    rank = dist.get_rank()
    x, indices, weights, _ = tokens_of(0, "uneven")
    w13, w2 = (own(w, rank) for w in weights_of_all())
    with pytest.raises(ValueError, match="has other experts, recipe, dtype of x or gradients"):
        grouped_mlp(x if rank else x.bfloat16(), indices, weights, w13, w2, "CurrentScaling", ep_group=group())
    fewer = slice(0, 1 if rank else None)
    with pytest.raises(ValueError, match="has other experts, recipe, dtype of x or gradients"):
        grouped_mlp(x, indices, weights, w13[fewer], w2[fewer], "CurrentScaling", ep_group=group())
    learned = w2.clone().requires_grad_(rank == 0)
    with pytest.raises(ValueError, match="has other experts, recipe, dtype of x or gradients"):
        grouped_mlp(x, indices, weights, w13, learned, "CurrentScaling", ep_group=group())
    mesh = init_device_mesh(torch_ranks.device, (1, dist.get_world_size()), mesh_dim_names=("dp", "ep"))
    with pytest.raises(TypeError, match="a DeviceMesh of 2 axes"):
        grouped_mlp(x, indices, weights, w13, w2, "CurrentScaling", ep_group=mesh)
    with pytest.raises(NotImplementedError, match="DelayedScaling is not supported with ep_group"):
        grouped_mlp(x, indices, weights, w13, w2, "DelayedScaling", ep_group=mesh["ep"])
    with pytest.raises(ValueError, match="do not divide num_experts"):
        MoE(WIDTH, HIDDEN, num_experts=3, top_k=1, recipe="MXFP8", ep_group=mesh["ep"])
    # No rank is left with a collective of its own.
    y = grouped_mlp(x, indices, weights, w13, w2, "CurrentScaling", ep_group=mesh["ep"])
    assert y.isfinite().all()


def layer_of(recipe, ep_group=None, stacked=False):
    torch.manual_seed(0)
    options = {"num_experts": EXPERTS, "top_k": TOP_K, "stacked": stacked}
    return MoE(WIDTH, HIDDEN, recipe=recipe, ep_group=ep_group, **options).to(torch_ranks.device)


class Block(nn.Module):
    """A residual block of experts."""

    def __init__(self, moe):
        super().__init__()
        self.moe = moe

    def forward(self, x):
        return x + self.moe(x)


def whole(grad):
    return grad.full_tensor() if isinstance(grad, DTensor) else grad


def trains_with_fsdp2(name):
    """Ranks of "ep" share experts, and FSDP2 shards them over "dp"; it shards other parameters over all ranks."""
    # Relative to the norm. Gradients are added over ranks in another order, so a few codes of the next step differ.
    # Tensor cores keep fewer bits of sums, so a few codes of gradients do.
    error = 1e-3 if torch_ranks.device == "cpu" else 5e-2
    mesh = init_device_mesh(torch_ranks.device, torch_ranks.shape, mesh_dim_names=("dp", "ep"))
    recipe, world, rank = RECIPES[name], dist.get_world_size(), dist.get_rank()
    one, many = Block(layer_of(recipe)), Block(layer_of(recipe, mesh["ep"]))
    for experts in (many.moe.w13, many.moe.w2):
        fully_shard(experts, mesh=mesh["dp"])
        experts.set_gradient_divide_factor(world)
        experts.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums.
    fully_shard(many, mesh=init_device_mesh(torch_ranks.device, (world,)))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, many)]
    each = [tokens_of(other, "uneven")[0] for other in range(world)]
    replicas = mesh.mesh.tolist()  # Ranks of one replica are one device.
    for _ in range(2):
        losses = {}
        for ranks in replicas:
            sizes = [each[other].shape[0] for other in ranks]
            parts = one(torch.cat([each[other] for other in ranks])).split(sizes)
            of_ranks = [part.square().mean() for part in parts]
            (sum(of_ranks) / world).backward()
            losses.update(zip(ranks, of_ranks, strict=True))
        loss = many(each[rank]).square().mean()
        loss.backward()
        assert loss.item() == pytest.approx(losses[rank].item(), rel=error)
        of_one = dict(one.named_parameters())
        for key, parameter in many.named_parameters():
            a, b = whole(parameter.grad), of_one[key].grad
            assert (a - b).norm() <= error * b.norm(), key
        for model, optimizer in zip((one, many), optimizers, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)


@on_ranks((2, 2))
@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling"])
def test_with_fsdp2(name):
    trains_with_fsdp2(name)


@on_ranks(2)
@pytest.mark.parametrize("how", ["checkpointing", "compile"])
def test_layer_is_the_same(how):
    rank = dist.get_rank()
    for text in (".* should not be instantiated", "The .grad attribute"):  # From dynamo itself.
        warnings.filterwarnings("ignore", text)
    plain, other = layer_of("CurrentScaling", group()), layer_of("CurrentScaling", group())
    call = torch.compile(other, backend="eager") if how == "compile" else other
    x = tokens_of(rank, "uneven")[0]
    y = plain(x)
    found = checkpoint(call, x, use_reentrant=False) if how == "checkpointing" else call(x)
    assert torch.equal(found, y)
    for each in (y, found):
        each.square().mean().backward()
    for a, b in zip(plain.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


@on_ranks(2)
def test_ddp():
    """DistributedDataParallel would average different experts, and raises; without experts it is right."""
    rank, world = dist.get_rank(), dist.get_world_size()
    with pytest.raises(
        ValueError, match=r"DistributedDataParallel averages moe\.w13\.experts\.\d\.weight over 2 ranks"
    ):
        DistributedDataParallel(Block(layer_of("CurrentScaling", group())))(tokens_of(rank, "uneven")[0])
    one, many = Block(layer_of("CurrentScaling")), Block(layer_of("CurrentScaling", group()))
    experts = {name: each for name, each in many.named_parameters() if ".experts." in name}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(many, [*experts])
    each = [tokens_of(other, "uneven")[0] for other in range(world)]
    ddp = DistributedDataParallel(many)
    ddp(each[rank]).square().mean().backward()
    parts = one(torch.cat(each)).split([len(x) for x in each])
    (sum(part.square().mean() for part in parts) / world).backward()
    of_one = dict(one.named_parameters())
    for name, parameter in many.named_parameters():
        grad = parameter.grad / world if name in experts else parameter.grad
        torch.testing.assert_close(grad, of_one[name].grad, rtol=1e-4, atol=1e-6)
    alone = dist.new_group([rank], use_local_synchronization=True)
    DistributedDataParallel(Block(layer_of("CurrentScaling", group())), process_group=alone)(each[rank])


def wrap_with_fsdp1(block):
    prepare_modules_for_fsdp1(block)
    return FullyShardedDataParallel(block, use_orig_params=True, device_id=torch.device(torch_ranks.device))


def wrap_with_fsdp2(block):
    return fully_shard(block, mesh=init_device_mesh(torch_ranks.device, (dist.get_world_size(),)))


def wrap_experts_with_hsdp(block):
    # Replicas of shards: ranks of a replica have different experts.
    for experts in (block.moe.w13, block.moe.w2):
        fully_shard(experts, mesh=init_device_mesh(torch_ranks.device, (2, 1), mesh_dim_names=("replica", "shard")))
    return block


MIXED = "mesh of 2 ranks, and joins them over 2 ranks that have different experts"
WRAPPERS = {
    "FSDP1": (wrap_with_fsdp1, r"FullyShardedDataParallel \(FSDP1\) is not supported with ep_group"),
    "FSDP2": (wrap_with_fsdp2, MIXED),
    "HSDP": (wrap_experts_with_hsdp, MIXED),
}


@on_ranks(2)
@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_of_different_experts(name):
    """FSDP would join experts of two ranks to one weight. All ranks raise."""
    wrap, text = WRAPPERS[name]
    model = wrap(Block(layer_of("CurrentScaling", group())))
    with pytest.raises(ValueError, match=text):
        model(tokens_of(dist.get_rank(), "uneven")[0])


@on_ranks(2)
def test_fsdp2_of_a_functions_weights():
    """FSDP2 has gathered the weights that a module passes to `grouped_mlp`."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w13, self.w2 = (nn.Parameter(own(w, dist.get_rank())) for w in weights_of_all())

        def forward(self, x, indices, weights):
            options = {"ep_group": group()}
            return grouped_mlp(x, indices, weights, self.w13, self.w2, "CurrentScaling", **options)

    tokens = tokens_of(dist.get_rank(), "uneven")[:3]
    alone = init_device_mesh(torch_ranks.device, (2, 1), mesh_dim_names=("ep", "dp"))["dp"]
    fully_shard(Experts(), mesh=alone)(*tokens)
    with pytest.raises(ValueError, match="mesh of 2 ranks, and joins them"):
        fully_shard(Experts())(*tokens)


@on_ranks(2)
def test_checkpoints_have_all_experts():
    """Names count all experts, so ranks save different ones, and a model without ep_group loads them."""
    shared = layer_of("CurrentScaling", group())
    local = range(dist.get_rank() * EXPERTS // 2, (dist.get_rank() + 1) * EXPERTS // 2)
    names = [f"w13.experts.{e}.weight" for e in local]
    assert [name for name in shared.state_dict() if name.startswith("w13")] == names
    assert torch.equal(shared.w13.experts[-1].weight, shared.state_dict()[names[-1]])
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    dcp.save(shared.state_dict(), checkpoint_id=folder[0])
    one = layer_of("CurrentScaling")
    expected = {name: value.clone() for name, value in one.state_dict().items()}  # One seed gives the same weights.
    for parameter in one.parameters():
        torch.nn.init.zeros_(parameter)
    state = one.state_dict()
    dcp.load(state, checkpoint_id=folder[0])
    one.load_state_dict(state)
    assert all(torch.equal(value, expected[name]) for name, value in one.state_dict().items())


@on_ranks(2)
def test_zero():
    """One group cannot average the router over all ranks and the experts over those that have the same ones."""
    shared, alone = (
        layer_of("CurrentScaling", group()),
        dist.new_group([dist.get_rank()], use_local_synchronization=True),
    )
    for ranks in (None, alone):
        with pytest.raises(ValueError, match=r"router.weight would differ between the 2 ranks that share the experts"):
            ZeroOptimizer(shared, lr=1e-3, group=ranks)
    experts = torch.nn.ModuleList([shared.w13, shared.w2])
    with pytest.raises(ValueError, match="has another model"):
        ZeroOptimizer(experts, lr=1e-3)
    ZeroOptimizer(experts, lr=1e-3, group=alone)
    ZeroOptimizer(layer_of("CurrentScaling", alone), lr=1e-3)
