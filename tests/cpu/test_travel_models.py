"""Serialization of models, weights and optimizers: they continue training with the same bits."""

import copy
import pickle

import pytest
import torch
import torch.multiprocessing
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils import _pytree as pytree

from qshard.formats import FP8_E4M3, NVFP4, NVFP4_16x16
from qshard.recipes import NVFP4 as NVFP4Recipe
from qshard.recipes import CurrentScaling, DelayedScaling
from qshard.torch_bridge import (
    Adam,
    AdamW,
    CastPlan,
    Linear,
    QuantizedTensor,
    ShardedWeight,
    ZeroOptimizer,
    cast_master,
    convert,
    load_scaling_state,
    scaling_state,
    update_scales,
)
from support.formats import RECIPES
from support.travel import WAYS, assert_same, batches, learn, model_of, quantized, saved, serve

# One with scales of its own, and one with seeds.
with_states = pytest.mark.parametrize("recipe", [DelayedScaling(), NVFP4Recipe()], ids=["scales", "seeds"])
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors are small."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def state_of(model):
    return [*(p.detach() + 0 for p in model.parameters()), *(b.clone() for b in model.buffers())]


def assert_equal(got, want):
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def assert_converted(model, original):
    """A model in its own right, as `convert` makes it."""
    assert [type(layer) for layer in model] == [type(layer) for layer in original]
    for layer, other in zip(model, original, strict=True):
        if isinstance(layer, Linear):
            assert type(layer.weight) is ShardedWeight
            assert isinstance(layer.weight, nn.Parameter)
            assert layer.weight.requires_grad == other.weight.requires_grad
            assert (layer.recipe, layer.weight.scale_state.name) == (other.recipe, other.weight.scale_state.name)
            assert layer.weight.scale_state is not other.weight.scale_state
            assert layer.weight.data_ptr() == layer.weight.shard.data_ptr() or layer.weight.data_ptr() == 0
            if layer.recipe.stateful:
                assert layer.delayed["weight"] is layer.weight.scale_state.delayed
    assert model[4].weight is model[2].weight


@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@every_recipe
def test_models_travel_and_train_on_with_the_same_bits(way, recipe):
    """With their optimizer, which finds its parameters, whichever of the two comes first."""
    model = model_of(recipe)
    optimizer = AdamW(model.parameters(), lr=1e-2, exp_avg_dtype=torch.bfloat16)
    learn(model, batches(), optimizer)
    update_scales(model)
    before = state_of(model)
    made = []
    for pair in ((model, optimizer), (optimizer, model)):
        copies = WAYS[way](pair)
        other, other_optimizer = copies if pair[0] is model else copies[::-1]
        assert_converted(other, model)
        assert_equal(state_of(other), before)
        assert all(a is b for a, b in zip(other_optimizer.param_groups[0]["params"], other.parameters(), strict=True))
        made.append([*learn(other, batches(seed=1), other_optimizer), *state_of(other)])
        if way == "deepcopy" and pair[0] is model:
            assert other[0].weight.scale_state.passes.root is other
    assert_equal(state_of(model), before)
    want = [*learn(model, batches(seed=1), optimizer), *state_of(model)]
    for got in made:
        assert_equal(got, want)


def test_a_layer_and_a_weight_travel_alone():
    """Without the model that they were converted in. A weight is a plain parameter to those who read it."""
    model = model_of(CurrentScaling())
    size = len(pickle.dumps(model))
    for way, travel in WAYS.items():
        layer = travel(model[0])
        assert layer.weight.scale_state.passes.root is None
        assert_equal([layer(batches()[0])], [model[0](batches()[0])])
        weight = travel(model[0].weight)
        assert isinstance(weight, nn.Parameter)
        assert (type(weight) is ShardedWeight) == (way == "deepcopy")
        assert torch.equal(weight.detach() + 0, model[0].weight.shard)
    assert len(pickle.dumps(model[0])) < size / 2
    shallow = copy.copy(model[0])
    assert shallow.weight is model[0].weight
    weight = copy.copy(model[0].weight)
    assert (type(weight), weight.scale_state) == (ShardedWeight, model[0].weight.scale_state)
    assert weight.shard.data_ptr() == model[0].weight.shard.data_ptr()
    model[0].weight.tag = "expert"
    assert pickle.loads(pickle.dumps(model[0])).weight.tag == copy.copy(model[0].weight).tag == "expert"
    view = pickle.loads(pickle.dumps(model[0].weight.detach()))
    assert type(view) is torch.Tensor


@with_states
def test_averages_of_models(recipe):
    """`AveragedModel` keeps a deep copy: of weights, the average that it would keep of plain ones."""
    model, plain = model_of(recipe), model_of(recipe)
    plain = nn.ParameterList([nn.Parameter(p.detach() + 0) for p in plain.parameters()])
    averaged, reference = (AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.5)) for m in (model, plain))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for xs in (batches(), batches(seed=1)):
        learn(model, xs, optimizer)
        with torch.no_grad():
            for p, q in zip(plain, model.parameters(), strict=True):
                p.copy_(q)
        averaged.update_parameters(model)
        reference.update_parameters(plain)
    assert_equal([p.detach() + 0 for p in averaged.module.parameters()], [p.detach() for p in reference.parameters()])
    assert_converted(averaged.module, model)
    assert averaged.module[0].weight.scale_state.passes.root is averaged.module
    twin = convert(nn.Sequential(*(nn.Linear(*layer.weight.shape[::-1]) for layer in averaged.module[:1])), recipe)
    twin[0].load_state_dict(averaged.module[0].state_dict())
    load_scaling_state(twin[0], scaling_state(averaged.module[0]))
    assert_equal([averaged.module[0](batches()[0])], [twin(batches()[0])])


def test_models_and_tensors_in_other_processes():
    """Spawned ones give the bits of this one, under both ways to share; they and forked ones write to one memory."""
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(inbox, outbox), daemon=False)
    process.start()
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        for sharing in sorted(torch.multiprocessing.get_all_sharing_strategies()):
            torch.multiprocessing.set_sharing_strategy(sharing)
            for recipe in (DelayedScaling(), NVFP4Recipe()):
                model, x = model_of(recipe), batches()[0]
                want = copy.deepcopy(model)(x)
                inbox.put(("run", model, x))
                assert torch.equal(outbox.get(timeout=100), want)
            for fmt in (FP8_E4M3, NVFP4):
                q = quantized(fmt)
                assert not q.is_shared()
                assert q.share_memory_() is q
                assert q.is_shared()
                values = q.dequantize()
                inbox.put(("read", q))
                assert torch.equal(outbox.get(timeout=100), values)
                again = outbox.get(timeout=100)
                assert_same(again, q)
                assert not q.dequantize().any()  # The other process wrote to the memory of this one.
        for recipe in (DelayedScaling(), NVFP4Recipe()):
            model = model_of(recipe)
            alone = copy.deepcopy(model)
            learn(model, batches(1), torch.optim.SGD(model.parameters(), lr=0.0))  # So there are gradients.
            learn(alone, batches(1), torch.optim.SGD(alone.parameters(), lr=0.0))
            assert model.share_memory() is model
            assert all(tensor.is_shared() for tensor in (*model.parameters(), *model.buffers()))
            assert_converted(model, alone)
            assert model[0].weight.is_shared()
            assert not alone[0].weight.is_shared()
            inbox.put(("train", model, batches()))
            assert outbox.get(timeout=100) == 0
            learn(alone, batches(), torch.optim.SGD(alone.parameters(), lr=0.1))
            assert_equal(state_of(model), state_of(alone))
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
        inbox.put(None)
        process.join(20)
        if process.is_alive():
            process.kill()
    assert process.exitcode == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_states_of_optimizers_are_plain_tensors(dtype):
    model = model_of(CurrentScaling()).bfloat16()
    options = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype, "master_weights": "remainder"}
    optimizer = Adam(model.parameters(), lr=1e-2, **options)
    learn(model, batches().bfloat16(), optimizer)
    state = torch.load(saved(optimizer.state_dict()), weights_only=True)
    held = pytree.tree_leaves(state["state"])  # FP8 and int16 are bytes in dicts.
    assert {type(value) for value in held} == {torch.Tensor}
    other = copy.deepcopy(model)
    made = Adam(other.parameters())
    made.load_state_dict(state)
    learn(model, batches(seed=1).bfloat16(), optimizer)
    learn(other, batches(seed=1).bfloat16(), made)
    assert_equal(state_of(other), state_of(model))


def test_plans_and_slices_travel():
    weights = [quantized(NVFP4_16x16), quantized(FP8_E4M3), quantized(NVFP4_16x16)]
    masters = [torch.randn(32 * 64) for _ in weights]
    plan = CastPlan(weights, parity="master")
    cast_master(weights, masters, [0] * 3, parity="master", plan=plan)
    for travel in WAYS.values():
        others, other_plan = travel((weights, plan))
        for q in others:
            q.rowwise.data.view(torch.uint8).zero_()
        cast_master(others, masters, [0] * 3, parity="master", plan=other_plan)
        for a, b in zip(others, weights, strict=True):
            assert_same(a, b)


def test_zero_says_what_cannot_travel():
    def made(shard_weights):
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32))
        model = convert(model, CurrentScaling())
        return model, ZeroOptimizer(model, lr=1e-2, shard_weights=shard_weights)

    torch.manual_seed(0)
    model, optimizer = made(False)
    learn(model, batches(), optimizer)
    for travel in (copy.copy, *WAYS.values()):
        with pytest.raises(TypeError, match="ZeroOptimizer: it owns memory and hooks of its model, so it cannot be"):
            travel(optimizer)
    for travel in WAYS.values():  # A snapshot of what layers see.
        other = travel(model)
        assert isinstance(other[0].weight, QuantizedTensor)
        assert_equal([other(batches()[0])], [model(batches()[0])])
    before = other(batches()[0])
    state = torch.load(saved(optimizer.state_dict()), weights_only=True)
    saved_model = torch.load(saved(model.state_dict()), weights_only=True)
    assert_equal(saved_model.values(), optimizer.full_weights().values())
    learn(model, batches(seed=1), optimizer)
    assert torch.equal(other(batches()[0]), before)
    torch.manual_seed(1)
    again, resumed = made(False)
    resumed.load_state_dict(state)
    learn(again, batches(seed=1), resumed)
    assert_equal(resumed.full_weights().values(), optimizer.full_weights().values())

    sharded, optimizer = made(True)
    losses = learn(sharded, batches(), optimizer)
    for travel in (copy.deepcopy, pickle.dumps, saved):
        with pytest.raises(TypeError, match=r"ZeroOptimizer: Linear \(sharded weights\) cannot be pickled or copied"):
            travel(sharded)
    assert_equal(torch.load(saved(sharded.state_dict())).values(), optimizer.full_weights().values())
    for travel in (copy.deepcopy, pickle.dumps, saved, lambda q: q.share_memory_()):
        with pytest.raises(RuntimeError, match=r"0\.weight \(64, 32\) \(sharded weights\) is freed between uses of"):
            travel(sharded[0].weight)
    assert len(losses) == 2
    assert torch.load(saved(optimizer.state_dict()), weights_only=True)["zero"]["rank"] == 0
