"""`switch_recipe` on ranks: a model that was converted with the new recipe has the same bits."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import qshard.torch_bridge as qt
from qshard.recipes import NVFP4, Recipe
from qshard.torch_bridge._ops.collectives import unlike_ranks
from support import torch_ranks
from support.torch_models import model_of, shard
from support.torch_parallel import Llama, mesh_of, parallelized
from support.torch_ranks import on_ranks, rarely

WIDTH = 128
VECTORS = Recipe(weight="MXFP8_E4M3", activation="MXFP8_E4M3", gradient="MXFP8_E4M3")
PAIRS = [
    ("NVFP4", "MXFP8"),
    ("NVFP4", None),
    ("CurrentScaling", "NVFP4"),
    ("CurrentScaling", "DelayedScaling"),
    ("DelayedScaling", "BlockScaling"),
    (None, "MXFP8"),
]
"""None: values, as without a recipe."""


def made(recipe, primary=False, dtype=torch.float32, compiled=False, **options):
    model = model_of(True, dtype, sizes=(WIDTH, 3 * WIDTH, WIDTH))
    if recipe is not None:
        qt.convert(model, recipe, primary=primary)
    if compiled:
        model[0], model[2] = (torch.compile(model[i], backend="aot_eager", fullgraph=True) for i in (0, 2))
    return shard(model, **options)


def adam(model):
    return (qt.Adam if isinstance(model, nn.Sequential) else torch.optim.AdamW)(model.parameters(), lr=1e-2)


def train(model, optimizer, steps=2):
    losses = []
    for step in range(steps):
        x = torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(step + 8 * dist.get_rank()))
        loss = model(x.to(torch_ranks.device)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        qt.update_scales(model)
        losses.append(loss.item())
    return losses


def assert_goes_on_alike(model, optimizer, other, training=train):
    """Assert that `other`, with the state of `model`, has the same losses and weights after more steps."""
    optimizers = [optimizer, adam(other)]
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
    optimizers[1].load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = qt.scaling_state(model)
    qt.load_scaling_state(other, {name: own.clone() for name, own in state.items() if not name.endswith("recipe")})
    losses = [training(*each) for each in zip((model, other), optimizers, strict=True)]
    assert losses[0] == losses[1]
    for name, theirs in other.state_dict().items():
        mine = model.state_dict()[name]
        assert torch.equal(*(each.to_local() if isinstance(each, DTensor) else each for each in (mine, theirs))), name


@pytest.mark.each_value
@on_ranks(1, 3, *rarely((2, 2)))
@pytest.mark.parametrize(("first", "then"), PAIRS)
def test_fsdp2(first, then):
    """Shards of three ranks are uneven and split blocks. Switching back and forth changes nothing."""
    model = made(first or "MXFP8")
    optimizer = adam(model)
    if first is None:
        qt.switch_recipe(model, None)
    train(model, optimizer)
    for recipe in (then, "CurrentScaling", then):
        assert qt.switch_recipe(model, recipe) is model
    assert_goes_on_alike(model, optimizer, made(then))


@on_ranks(2)
@pytest.mark.parametrize(
    ("how", "then"),
    [
        *itertools.product(["primary", "columns", "bfloat16", "policy", "primary bfloat16"], ["MXFP8", None]),
        *(pytest.param("compiled", then, marks=pytest.mark.slow) for then in ("MXFP8", None)),
    ],
)
def test_kinds_of_weights(how, then):
    warnings.simplefilter("ignore")  # Of Dynamo itself.
    torch._dynamo.reset()
    options = {"primary": "primary" in how, "compiled": how == "compiled"}
    if "bfloat16" in how:
        options["dtype"] = torch.bfloat16
    if how == "columns":
        options["shard_placement_fn"] = lambda p: Shard(p.ndim - 1)
    if how == "policy":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = made("NVFP4", **options)
    if how == "bfloat16":
        model.register_forward_pre_hook(lambda module, given: (given[0].bfloat16(),))
    optimizer = adam(model)
    train(model, optimizer)
    qt.switch_recipe(model, then)
    if how == "primary bfloat16":  # Plain weights have no masters to compare with.
        assert all(torch.isfinite(torch.tensor(train(model, optimizer))))
        return
    other = made(then, **options)
    if how == "bfloat16":
        other.register_forward_pre_hook(lambda module, given: (given[0].bfloat16(),))
    assert_goes_on_alike(model, optimizer, other)
    if how == "compiled":
        with torch.compiler.set_stance("fail_on_recompile"):
            train(model, optimizer, 50)


@pytest.mark.each_value
@on_ranks(2, *rarely((2, 2)))
@pytest.mark.parametrize(
    ("then", "overlap"),
    [
        ("MXFP8", False),
        (None, None),
        (None, False),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("MXFP8", None), ("CurrentScaling", False))),
    ],
)
def test_tensor_parallelism(overlap, then):
    def parallel(recipe):
        torch.manual_seed(0)
        model = Llama(WIDTH)
        if recipe is not None:
            qt.convert(model, recipe)
        parallelized(model.to(torch_ranks.device), mesh["tp"], overlap)
        for module in (*model.blocks, model) if mesh.ndim > 1 else ():
            fully_shard(module, mesh=mesh["fsdp"])
        return model

    def training(model, optimizer, steps=2):
        losses = []
        for step in range(steps):
            tokens = torch.randint(WIDTH, (2, 33), generator=torch.Generator().manual_seed(step))
            loss = model(tokens[:, :-1].to(torch_ranks.device), tokens[:, 1:].to(torch_ranks.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    mesh = mesh_of(*("fsdp", "tp")[-len(torch_ranks.shape) :])
    model = parallel("NVFP4")
    optimizer = adam(model)
    training(model, optimizer)
    qt.switch_recipe(model, then)
    assert_goes_on_alike(model, optimizer, parallel(then), training)


class Sorted(nn.Module):
    """Experts of torchtitan."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(5, WIDTH, WIDTH) / 16)

    def forward(self, x):
        rows = x[:30].bfloat16()
        offs = torch.arange(1, 6, device=x.device, dtype=torch.int32) * 6
        return self._grouped_mm(A=rows, B_t=self.w.bfloat16().mT, offs=offs) + 0

    def _grouped_mm(self, *, A, B_t, offs):
        return torch._grouped_mm(A, B_t, offs=offs)


EXPERTS = {
    "sorted": lambda recipe: (qt.convert if recipe else lambda model, _: model)(Sorted(), recipe),
    "list": lambda recipe: qt.MoE(WIDTH, WIDTH, num_experts=3, top_k=2, recipe=recipe),
    "stacked": lambda recipe: qt.MoE(WIDTH, WIDTH, num_experts=3, top_k=2, recipe=recipe, stacked=True),
}


@pytest.mark.each_value
@on_ranks(2)
@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize("then", ["MXFP8", VECTORS, None])
def test_experts(kind, then):
    """Values are gathered for a recipe with 1-D blocks, which FSDP2 cannot gather for linear layers."""

    def of(recipe):
        torch.manual_seed(0)
        return fully_shard(EXPERTS[kind](recipe).to(torch_ranks.device), mesh=torch_ranks.mesh())

    model = of("NVFP4")
    optimizer = adam(model)
    train(model, optimizer)
    refused = kind != "sorted" and then is None or kind == "list" and then == VECTORS
    if refused:
        with pytest.raises((ValueError, NotImplementedError), match=r"switch_recipe|fully_shard"):
            qt.switch_recipe(model, then)
        train(model, optimizer)
        return
    qt.switch_recipe(model, then)
    assert_goes_on_alike(model, optimizer, of(then))


@on_ranks(2)
def test_ddp():
    def wrapped(recipe):
        return DistributedDataParallel(qt.convert(model_of(True, sizes=(WIDTH, WIDTH)), recipe))

    model = wrapped("DelayedScaling")
    optimizer = adam(model)
    train(model, optimizer)
    qt.switch_recipe(model, "MXFP8")
    train(model, optimizer)
    qt.switch_recipe(model, "DelayedScaling")
    assert_goes_on_alike(model, optimizer, wrapped("DelayedScaling"))


@on_ranks((2, 2))
def test_errors_name_the_global_rank_that_differs():
    mesh, rank = torch_ranks.mesh(), dist.get_rank()
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim)]
    facts = b"other" if rank == 2 else b"alike"
    assert unlike_ranks(facts, groups, torch_ranks.device) == ([0, 1, 3] if rank == 2 else [2])
    assert unlike_ranks(facts, groups, torch_ranks.device, to_first=True) == [2]
    pair = dist.get_process_group_ranks(groups[1])
    assert unlike_ranks(facts, groups[1], torch_ranks.device, to_first=True) == ([3] if 2 in pair else [])


@on_ranks(2)
def test_ranks_that_differ_raise_on_all():
    model = made("NVFP4")
    optimizer = adam(model)
    before = train(model, optimizer)
    with pytest.raises(ValueError, match=r"rank . passes another recipe"):
        qt.switch_recipe(model, ("MXFP8", "CurrentScaling")[dist.get_rank()])
    with pytest.raises(ValueError, match=r"switch_recipe: (rank|pattern 'none')"):
        qt.switch_recipe(model, ("MXFP8", {"none": "MXFP8"})[dist.get_rank()])
    assert all(layer.recipe == qt.convert(nn.Linear(32, 32), "NVFP4").recipe for layer in (model[0], model[2]))
    assert len(train(model, optimizer)) == len(before)


@on_ranks(2)
def test_is_refused_within_a_step():
    """Before gradients are reduced, and in a pass. Codes of old graphs are gone, so their backward pass raises."""
    model = made("NVFP4")
    x = torch.randn(32, WIDTH, device=torch_ranks.device)
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of a micro-batch"):
        qt.switch_recipe(model, "MXFP8")
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    hook = model[1].register_forward_hook(lambda *_: qt.switch_recipe(model, "MXFP8") and None)
    with pytest.raises(RuntimeError, match="a pass is running"):
        model(x)
    hook.remove()
    model.zero_grad()
    model.set_reshard_after_forward(True)
    model(x).sum().backward()
    old = model(x).sum()
    qt.switch_recipe(model, "MXFP8")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


@on_ranks(2)
def test_formats_that_fsdp2_cannot_gather():
    model = made("NVFP4")
    optimizer = adam(model)
    train(model, optimizer)
    for recipe in (VECTORS, NVFP4(dgrad="bf16")):
        with pytest.raises(NotImplementedError, match=r"fully_shard: 0.weight"):
            qt.switch_recipe(model, recipe)
    qt.switch_recipe(model, {"2": NVFP4(wgrad="bf16"), "0": None})
    assert [model[0].recipe, model[2].recipe] == [None, NVFP4(wgrad="bf16")]
    train(model, optimizer)


@on_ranks(2)
def test_zero_begins_anew():
    """A `ZeroOptimizer` raises, and its checkpoint goes on in a new model with the new recipe."""

    def of(recipe):
        model = qt.convert(model_of(True, sizes=(WIDTH, WIDTH)), recipe)
        return model, qt.ZeroOptimizer(model, lr=1e-2)

    def state_of(model, optimizer):
        return copy.deepcopy(get_state_dict(model, optimizer, options=whole))

    whole = StateDictOptions(full_state_dict=True)
    model, optimizer = of("NVFP4")
    train(model, optimizer)
    with pytest.raises(NotImplementedError, match=r"switch_recipe: .* is trained by a ZeroOptimizer"):
        qt.switch_recipe(model, "MXFP8")
    weights, states = state_of(model, optimizer)
    late = of("MXFP8")
    set_state_dict(*late, model_state_dict=weights, optim_state_dict=states, options=whole)
    for name, value in state_of(*late)[0].items():
        assert torch.equal(value, weights[name])
    plain = qt.convert(model_of(True, sizes=(WIDTH, WIDTH)), "MXFP8")
    plain.load_state_dict(weights)
    x = torch.randn(32, WIDTH, device=torch_ranks.device)
    assert torch.equal(plain(x), late[0](x))
    assert len(train(*late)) == 2


@on_ranks(2, *rarely(4))
@pytest.mark.parametrize("then", ["BlockScaling", "NVFP4"])
def test_expert_parallelism(then):
    """Ranks have the seeds of their experts, also if they drew different numbers before."""

    def of(recipe):
        torch.manual_seed(0)
        group = dist.group.WORLD
        return qt.MoE(WIDTH, WIDTH, num_experts=8, top_k=2, recipe=recipe, stacked=True, ep_group=group)

    model = of("MXFP8")
    optimizer = adam(model)
    train(model, optimizer)
    torch.manual_seed(dist.get_rank())
    qt.switch_recipe(model, then)
    if then == "NVFP4":
        own = model.w13.experts.seed
        assert own.shape == (8, 2)
        assert own.to_local().shape == (8 // dist.get_world_size(), 2)
    assert_goes_on_alike(model, optimizer, of(then))
    with pytest.raises(ValueError, match="no products of values"):
        qt.switch_recipe(model, None)
