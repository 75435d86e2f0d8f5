"""`switch_recipe` in one process: a model that was converted with the new recipe has the same bits."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from torch import nn

import qshard.torch_bridge as qt
from qshard.recipes import MXFP8, NVFP4, CurrentScaling
from support.conv1d import Conv1D
from support.experts import GatedExperts, GroupedExperts, Mixture, OpenExperts, PlainExperts

WIDTH = 128


class Model(nn.Module):
    """A linear layer, a `Conv1D` and a head that returns the loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Conv1D(WIDTH, WIDTH)
        self.head = qt.LinearCrossEntropy(WIDTH, WIDTH)

    def forward(self, x, labels):
        return self.head(self.second(self.first(x).relu()), labels)


def converted(recipe):
    return Model() if recipe is None else qt.convert(Model(), recipe)


def train(model, optimizer, steps=2):
    losses = []
    for step in range(steps):
        made = torch.Generator().manual_seed(step)
        x, labels = torch.randn(32, WIDTH, generator=made), torch.randint(WIDTH, (32,), generator=made)
        loss = model(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        qt.update_scales(model)
        losses.append(loss.item())
    return losses


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def assert_goes_on_alike(model, optimizer, other):
    other.load_state_dict({name: own.clone() for name, own in model.state_dict().items()})
    theirs = adam(other)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    state = {name: own for name, own in qt.scaling_state(model).items() if not name.endswith("recipe")}
    qt.load_scaling_state(other, state)
    assert train(model, optimizer) == train(other, theirs)
    for name, own in other.state_dict().items():
        assert torch.equal(model.state_dict()[name], own), name


@pytest.mark.parametrize("then", ["MXFP8", "CurrentScaling", "BlockScaling", None])
@pytest.mark.parametrize("first", ["NVFP4", "CurrentScaling"])
def test_goes_on_alike(first, then):
    """Also with the weights that were there before, whose optimizer goes on."""
    model = converted(first)
    optimizer, weights = adam(model), [*model.parameters()]
    train(model, optimizer)
    assert qt.switch_recipe(model, then) is model
    assert all(one is other for one, other in zip(weights, model.parameters(), strict=True))
    assert_goes_on_alike(model, optimizer, converted(then))


@pytest.mark.slow
@pytest.mark.parametrize("then", ["MXFP8", None, pytest.param("DelayedScaling", marks=pytest.mark.slow)])
def test_compiled(then):
    """One more compilation, and none after it."""
    warnings.simplefilter("ignore")  # Of Dynamo itself.
    torch._dynamo.reset()
    models = []
    for recipe in ("NVFP4", then):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        models.append(layer if recipe is None else qt.convert(layer, recipe))
    x = torch.randn(32, WIDTH)
    compiled = torch.compile(models[0], backend="aot_eager")
    compiled(x).sum().backward()
    qt.switch_recipe(compiled, then)
    losses = []
    for model in (compiled, torch.compile(models[1], backend="aot_eager")):
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        losses.append([loss, *(p.grad for p in model.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*losses, strict=True))
    qt.update_scales(compiled)
    compiled(x).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for _ in range(50):
            compiled(x).sum().backward()


def test_codes_get_delayed_scales():
    """Frozen codes are those of both recipes. `x` of ones has the same scale before and after."""
    model = qt.freeze(qt.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "CurrentScaling"))
    x = torch.ones(4, 64)
    want = model(x)
    assert torch.equal(qt.switch_recipe(model, "DelayedScaling")(x), want)
    assert [str(layer.recipe) for layer in model] == ["DelayedScaling()"] * 2


def test_seeds_stay_or_are_drawn():
    model = qt.convert(nn.Sequential(nn.Linear(32, 32)), "NVFP4")
    seed = model[0].seed
    qt.switch_recipe(model, NVFP4(wgrad="bf16"))
    assert model[0].seed is seed
    qt.switch_recipe(model, "MXFP8")
    assert model[0].seed is None
    seeds = []
    for number in (3, 3, 4):
        torch.manual_seed(number)
        seeds.append(qt.switch_recipe(qt.switch_recipe(model, "MXFP8"), "NVFP4")[0].seed.tolist())
    assert seeds[0] == seeds[1] != seeds[2]


def test_patterns():
    """Layers without a pattern keep their recipe, and layers in high precision stay there."""
    layers = nn.ModuleDict({"layers": nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), "head": nn.Linear(32, 32)})
    model = qt.convert(layers, {"head": None, "*": "NVFP4"})
    qt.switch_recipe(model, {"layers[-2:]": None, "layers.0.weight": "MXFP8"})
    assert [layer.recipe for layer in model["layers"]] == [MXFP8(), NVFP4(), None, None]
    qt.switch_recipe(model, "CurrentScaling")
    assert [layer.recipe for layer in model["layers"]] == [CurrentScaling()] * 4
    assert type(model["head"]) is nn.Linear


@pytest.mark.parametrize("then", ["MXFP8", None])
def test_checkpoints(then):
    """A state of the tail does not load into a model of the first phase, but into any other."""
    model, plain = (qt.convert(nn.Sequential(nn.Linear(32, 32)), "NVFP4"), nn.Sequential(nn.Linear(32, 32)))
    early = copy.deepcopy(model.state_dict())
    qt.switch_recipe(model, then)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "scaling": qt.scaling_state(model)}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = qt.convert(nn.Sequential(nn.Linear(32, 32)), "NVFP4")
    before = copy.deepcopy(resumed.state_dict())
    with pytest.raises(
        RuntimeError, match=r"saved after switch_recipe, which gave 0 the recipe .*call\s+switch_recipe"
    ):
        resumed.load_state_dict(saved["model"])
    with pytest.raises(ValueError, match=r"saved after switch_recipe, with 0 in .*here it has NVFP4\(\)"):
        qt.load_scaling_state(resumed, saved["scaling"])
    qt.switch_recipe(resumed, then)
    resumed.load_state_dict(saved["model"])
    qt.load_scaling_state(resumed, saved["scaling"])
    assert not torch.equal(before["0.weight"], resumed[0].weight)
    for other in (plain, qt.convert(nn.Sequential(nn.Linear(32, 32)), "CurrentScaling")):
        other.load_state_dict(saved["model"])
    resumed.load_state_dict(early)
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    x = torch.randn(4, 32)
    for again in copies:
        assert again[0].recipe == model[0].recipe
        assert torch.equal(again(x), model(x))
        with pytest.raises(RuntimeError, match="saved after switch_recipe"):
            qt.convert(nn.Sequential(nn.Linear(32, 32)), "NVFP4").load_state_dict(again.state_dict())
    qt.switch_recipe(model, "NVFP4")
    qt.convert(nn.Sequential(nn.Linear(32, 32)), "NVFP4").load_state_dict(model.state_dict())


def test_other_calls_know_layers_without_a_recipe():
    model = qt.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), "NVFP4")
    qt.switch_recipe(model, {"1": None})
    state = qt.quantized_state_dict(model)
    assert [type(state[name]) for name in ("0.weight", "1.weight")] == [qt.QuantizedTensor, torch.Tensor]
    assert [qt.is_converted(layer.weight) for layer in model] == [True, False]
    with qt.numerics_of(model) as seen:
        model(torch.randn(4, 32)).sum().backward()
    assert {row.layer for row in seen.stats().rows} == {"0"}
    qt.freeze(model)
    assert [type(layer.weight) is nn.Parameter for layer in model] == [False, False]


def refused():
    frozen = qt.freeze(qt.convert(nn.Sequential(nn.Linear(32, 32)), "MXFP8"))
    zero = qt.convert(nn.Sequential(nn.Linear(32, 32)), "MXFP8")
    yield lambda: qt.switch_recipe(nn.Sequential(nn.Linear(2, 2)), "MXFP8"), ValueError, "no converted layer"
    yield lambda: qt.switch_recipe(frozen, "NVFP4"), ValueError, "0.weight"
    yield lambda: qt.switch_recipe(frozen, None), ValueError, "has only codes"
    optimizer = qt.ZeroOptimizer(zero)
    yield lambda: qt.switch_recipe(zero, "NVFP4") and optimizer, NotImplementedError, "ZeroOptimizer"
    model = qt.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(20, 20)), "CurrentScaling")
    yield lambda: qt.switch_recipe(model, "MXFP8"), ValueError, r"1.weight \(20, 20\)"
    yield lambda: qt.switch_recipe(model, {"2": "MXFP8"}), ValueError, "matches no layer"
    yield lambda: qt.switch_recipe(model, {"*": MXFP8}), TypeError, "is not an instance"
    experts = qt.MoE(32, 32, num_experts=2, top_k=1, recipe="MXFP8")
    yield lambda: qt.switch_recipe(experts, None), ValueError, "no products of values"
    yield lambda: qt.switch_recipe(experts, {"w13.experts.0": "NVFP4"}), ValueError, "would have 2 recipes"
    tied = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    tied[1].weight = tied[0].weight
    qt.convert(tied, "MXFP8")
    yield lambda: qt.switch_recipe(tied, {"1": "NVFP4"}), ValueError, "shares its weight with 0"


def test_convert_again_does_not_convert_back():
    """None in a pattern would leave a converted layer in its recipe."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    recipe = {"0": None, "*": "CurrentScaling"}
    qt.convert(model, "MXFP8")
    with pytest.raises(ValueError, match=r"^convert: 0 has MXFP8\(\), .* call switch_recipe\(model, {'0': None}\)$"):
        qt.convert(model, recipe)
    assert model[1].recipe == MXFP8()
    qt.convert(qt.switch_recipe(model, {"0": None}), recipe)
    assert [layer.recipe for layer in model] == [None, CurrentScaling()]


def test_one_error_for_all_layers_that_do_not_fit():
    model = qt.convert(nn.Sequential(*(nn.Linear(48, 48) for _ in range(3))), "CurrentScaling")
    with pytest.raises(ValueError, match=r"switch_recipe: 0.weight .*; 0 \(do not fit; 2 more like these\)$"):
        qt.switch_recipe(model, "MXFP8")
    assert [layer.recipe for layer in model] == [CurrentScaling()] * 3


@pytest.mark.parametrize("number", range(10))
def test_refusals_change_nothing(number):
    call, kind, text = [*refused()][number]
    with pytest.raises(kind, match=rf"switch_recipe: .*{text}"):
        call()


@pytest.mark.parametrize("kind", [GatedExperts, OpenExperts, PlainExperts, GroupedExperts])
@pytest.mark.parametrize("then", ["CurrentScaling", None])
def test_experts_of_other_libraries(kind, then):
    """Without a recipe they run the `forward`, or the product, of their own class."""
    torch.manual_seed(0)
    plain = Mixture(kind)
    model, other = qt.convert(copy.deepcopy(plain), {"router": None, "*": "MXFP8"}), copy.deepcopy(plain)
    other = other if then is None else qt.convert(other, {"router": None, "*": then})
    x = torch.randn(32, 128)
    model(x).sum().backward()
    qt.switch_recipe(model, then)
    model.zero_grad()
    results = []
    for each in (model, other):
        y = each(x)
        y.square().mean().backward()
        results.append([y, *(p.grad for p in each.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
