"""`convert` of real models: classes of users, optimizers made before, what it leaves, helpers of torch.nn.utils."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import (
    clip_grad_norm_,
    clip_grad_value_,
    parameters_to_vector,
    parametrize,
    prune,
    vector_to_parameters,
)

from qshard.recipes import MXFP8, CurrentScaling, DelayedScaling
from qshard.torch_bridge import (
    Linear,
    ShardedWeight,
    convert,
    grouped_linear,
    linear,
    linear_cross_entropy,
    update_scales,
)
from support.formats import RECIPES
from support.torch_linears import Named, plain_copy, value, x_of
from support.travel import WAYS

RECIPE = CurrentScaling()
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Slotted(nn.Linear):
    __slots__ = ("size",)


def quietly(model, recipe=RECIPE):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return convert(model, recipe)


def warning_of(model, recipe=RECIPE, **options):
    with pytest.warns(UserWarning, match="^convert: ") as caught:
        convert(model, recipe, **options)
    (one,) = caught
    assert one.filename == __file__
    assert len(str(one.message)) <= 270
    return str(one.message)


def test_a_subclass_stays_what_it_was():
    layer = Named(32, "q")
    called = []
    layer.register_forward_hook(lambda *_: called.append(1))
    weight, before, kept = layer.weight, value(layer.weight), dict(vars(layer))
    assert convert(layer, RECIPE) is layer
    assert isinstance(layer, Named)
    assert isinstance(layer, Linear)
    assert layer.weight is weight
    assert torch.equal(value(weight), before)
    assert {name: getattr(layer, name) for name in ("name", "resets")} == {"name": "q", "resets": kept["resets"]}
    assert repr(layer).startswith("QuantizedNamed(name=q, in_features=32")
    assert type(layer) is type(convert(Named(32, "k"), MXFP8())), "one class for each class of a user"
    assert list(layer.state_dict()) == ["weight"]
    assert torch.equal(layer(x_of()), linear(x_of(), before, None, RECIPE))
    assert called
    layer.init_weights()
    assert (value(layer.weight) == 0.5).all()
    layer.reset_parameters()
    assert layer.resets == kept["resets"] + 1
    assert not (value(layer.weight) == 0.5).any()
    convert(layer, MXFP8())
    assert layer.recipe == MXFP8()
    assert type(layer) is type(convert(Named(32, "k"), MXFP8()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", [CurrentScaling(), DelayedScaling()], ids=["current", "delayed"])
def test_a_converted_subclass_travels(way, recipe):
    model = convert(nn.Sequential(Named(32, "q"), nn.Linear(32, 32)), recipe)
    model[0].weight.requires_grad_(False)
    other = WAYS[way](model)
    assert [type(layer) for layer in other] == [type(layer) for layer in model]
    assert [type(layer.weight) for layer in other] == [ShardedWeight] * 2
    assert [p.requires_grad for p in other.parameters()] == [False, True, True]
    assert type(other[0].weight.shard) is torch.Tensor
    assert (other[0].name, other[0].recipe) == ("q", recipe)
    assert torch.equal(other(x_of()), model(x_of()))


def test_subclasses_of_linear_take_a_new_recipe():
    class Own(Linear):
        pass

    layer = Own(32, 32, recipe=RECIPE)
    weight = layer.weight
    convert(layer, MXFP8())
    assert (type(layer), layer.recipe, layer.weight is weight) == (Own, MXFP8(), True)
    assert weight.scale_state.fmt == MXFP8().weight


def test_what_stays_as_it_is_and_why():
    """One warning, in the order of the model, of three layers and a count; `filter` silences it."""
    model = nn.ModuleDict(
        {
            "first": nn.Linear(32, 32),
            "embed": nn.Embedding(32, 32),
            "head": nn.Linear(32, 32),
            "doubled": Doubled(32, 32),
            "attention": nn.MultiheadAttention(32, 2),
            "normed": nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)),
            "lazy": nn.LazyLinear(32),
            "slotted": Slotted(32, 32),
        }
    )
    model["head"].weight = model["embed"].weight
    types = {name: type(layer) for name, layer in model.items()}
    assert warning_of(copy.deepcopy(model)) == (
        "convert: 6 of 7 layers were not converted: head (tied to embed.weight), doubled (Doubled overrides forward), "
        "attention (it multiplies in_proj_weight (q, k, v) and out_proj itself; use nn.Linear for each) and 3 more; "
        "exclude them with filter= to silence this"
    )
    late = {"first", "normed", "lazy", "slotted"}
    text = warning_of(copy.deepcopy(model), filter=lambda layer, name: name in late)
    assert "normed (its weight is computed), lazy (lazy, with no shape before its first call), slotted" in text
    convert(model, RECIPE, filter=lambda layer, name: name == "first")
    assert {name: type(layer) for name, layer in model.items()} == {**types, "first": Linear}
    with pytest.raises(
        ValueError,
        match=r"^convert: model .Doubled. has no layer that can be converted: the model .Doubled overrides for",
    ):
        convert(model["doubled"], RECIPE)


def test_layers_that_other_tools_have_changed_stay():
    """A forward that was replaced, an old-style weight_norm, a pruned weight, a parameter of another class."""

    class Special(nn.Parameter):
        pass

    layers = [nn.Linear(32, 32) for _ in range(5)]
    layers[0].forward = lambda x: x
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layers[1])
    prune.random_unstructured(layers[2], "weight", 0.5)
    layers[3].weight = Special(torch.ones(32, 32))
    model = nn.Sequential(*layers)
    text = warning_of(model)
    assert (
        "0 (its forward was replaced), 1 (its weight is computed; 1 more like these), 3 (its weight is a Special);"
        in text
    )
    assert [type(layer) for layer in model] == [nn.Linear] * 4 + [Linear]


def test_weights_tied_between_linear_layers_stay_tied():
    """Unless one of the layers has to stay: then all do."""
    model = nn.Sequential(nn.Linear(32, 32), Named(32, "b"), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    convert(model, RECIPE)
    assert model[1].weight is model[0].weight
    assert type(model[0].weight) is ShardedWeight
    model = nn.Sequential(nn.Linear(32, 32), Doubled(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    assert "0 (tied to 1.weight), 1 (Doubled overrides forward)" in warning_of(model)
    assert [type(layer) for layer in model] == [nn.Linear, Doubled, Linear]


def test_attention_of_torch_stays_right():
    """`nn.TransformerEncoderLayer` reads weights itself where nothing trains."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    quietly(layer)
    assert isinstance(layer.linear1, Linear)
    assert type(layer.self_attn.out_proj) is nn.modules.linear.NonDynamicallyQuantizableLinear
    x = torch.randn(2, 8, 32)
    with torch.no_grad():
        trained, evaluated = layer(x), layer.eval()(x)
    torch.testing.assert_close(trained, evaluated)


@every_recipe
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_made_before_trains_the_weights(kind, recipe):
    """Also with states, gradients and hooks of before: as one made after does, bit for bit."""

    def run(before):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 128))
        optimizer, called = kind(model.parameters(), lr=0.01), []
        step(model, optimizer)
        model(x_of(128, 128)).square().mean().backward()
        states = copy.deepcopy(optimizer.state_dict())
        gradients = [p.grad.clone() for p in model.parameters()]
        handle = model[0].weight.register_hook(lambda gradient: called.append("hook"))
        model[0].weight.register_post_accumulate_grad_hook(lambda p: called.append("after"))
        model[0].weight.tag = "expert"
        torch.manual_seed(1)
        convert(model, recipe)
        assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
        if not before:
            optimizer = kind(model.parameters(), lr=0.01)
            optimizer.load_state_dict(states)
        start = value(model[0].weight)
        step(model, optimizer)
        assert not torch.equal(value(model[0].weight), start)
        assert called == ["hook", "after"]
        assert model[0].weight.tag == "expert"
        handle.remove()
        step(model, optimizer)
        assert called == ["hook", "after", "after"]
        return [value(p) for p in model.parameters()]

    def step(model, optimizer):
        optimizer.zero_grad()
        x = x_of(128, 128)
        (model(x) - x).square().mean().backward()
        optimizer.step()
        update_scales(model)

    for a, b in zip(run(before=True), run(before=False), strict=True):
        assert torch.equal(a, b)


def test_a_weight_that_a_graph_holds_is_refused_and_nothing_changes():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    loss = model[1](x_of()).sum()
    parameters, kinds = list(model.parameters()), [type(p) for p in model.parameters()]
    with pytest.raises(
        ValueError, match=r"^convert: 1\.weight \(referenced by DistributedDataParallel, FullyShardedDataParallel"
    ):
        convert(model, RECIPE)
    assert [type(layer) for layer in model] == [nn.Linear] * 2
    assert [a is b for a, b in zip(model.parameters(), parameters, strict=True)] == [True] * 4
    assert [type(p) for p in model.parameters()] == kinds
    loss.backward()
    del loss
    gradient = model[1].weight.grad
    convert(model, RECIPE)
    assert model[1].weight.grad is gradient


def test_one_error_for_all_weights_that_do_not_fit():
    """Names that differ only in numbers are listed once."""
    blocks = [nn.ModuleDict({"a": nn.Linear(40, 64), "b": nn.Linear(64, 48), "c": nn.Linear(64, 64)}) for _ in range(3)]
    model = nn.Sequential(*blocks)
    with pytest.raises(ValueError, match=r"^convert: 0\.a\.weight \(64, 40\) .*with filter=; ") as raised:
        convert(model, "MXFP8")
    assert str(raised.value).endswith("; 0.a.weight, 0.b.weight (do not fit; 4 more like these)")
    assert not any(hasattr(layer, "recipe") for layer in model.modules())
    with pytest.raises(ValueError, match=r"or exclude the layer with filter=$"):
        convert(model, "MXFP8", filter=lambda _, name: name in ("0.a", "0.c"))
    convert(model, "MXFP8", filter=lambda _, name: name.endswith("c"))


def test_data_can_be_set():
    """As of plain parameters: the weight is then that memory."""
    layer, x = convert(nn.Linear(32, 32, bias=False), RECIPE), x_of()
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    layer.weight.data = x
    assert torch.equal(layer(x), linear(x, x, None, RECIPE))
    x.mul_(2)
    assert torch.equal(value(layer.weight), x)
    layer(x).sum().backward()
    optimizer.step()
    assert torch.equal(value(layer.weight), x)
    other = convert(nn.Linear(32, 32, bias=False), MXFP8())
    other.weight.data = layer.weight.data
    assert torch.equal(other(x), linear(x, x, None, MXFP8()))
    with torch.no_grad():
        layer.weight.data.zero_()
    assert not x.any()
    assert torch.equal(copy.deepcopy(layer).weight.shard, x)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (torch.ones(32, 16), r"data \(shape \(32, 16\)\) does not have the shape of weight, \(32, 32\); pass"),
        (torch.ones(32, 32).half(), r"data \(dtype torch.float16\) does not have the dtype of weight, torch.float32; "),
        (x_of().t(), r"data \(strides \(1, 32\)\) does not have the strides of weight, \(32, 1\); pass"),
        ([1.0], r"data \(\[1.0\]\) is not a torch.Tensor; pass"),
    ],
    ids=["shape", "dtype", "strides", "list"],
)
def test_data_of_another_kind_is_refused(data, text):
    layer = convert(nn.Linear(32, 32), RECIPE)
    before = value(layer.weight)
    with pytest.raises((TypeError, ValueError), match=f"^ShardedWeight: {text}"):
        layer.weight.data = data
    assert torch.equal(value(layer.weight), before)


def test_helpers_of_torch_nn_utils_on_weights():
    """They do to a converted weight what they do to a plain one."""
    plain = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model = convert(plain_copy(plain), RECIPE)
    vector = torch.arange(float(parameters_to_vector(plain.parameters()).numel()))
    for each in (plain, model):
        vector_to_parameters(vector, each.parameters())
        for i, p in enumerate(each.parameters()):
            p.grad = torch.full(p.shape, float(i + 1))
    assert torch.equal(parameters_to_vector(model.parameters()).detach(), vector)
    norms = [clip_grad_norm_(each.parameters(), 1.0) for each in (plain, model)]
    assert torch.equal(*norms)
    for each in (plain, model):
        clip_grad_value_(each.parameters(), 0.01)
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)
        assert torch.equal(p.detach(), value(q))
    with torch.no_grad():  # Weights are parts of one memory now.
        assert torch.equal(torch.compile(model, backend="eager")(x_of()), model(x_of()))
    made = nn.utils.skip_init(Linear, 32, 32, recipe=RECIPE)
    assert made.weight.shape == (32, 32)
    assert type(made.weight) is ShardedWeight


@pytest.mark.parametrize(
    "change",
    [lambda w: w.t(), lambda w: w.repeat(1, 2)[:, :32], lambda w: w[:1].expand(32, 32)],
    ids=["transposed", "columns", "expanded"],
)
def test_weights_that_are_not_contiguous(change):
    """As `nn.Linear` takes them: parts of others, tied to a transpose, or what `orthogonal` computes."""
    w, x, sizes = change(x_of(seed=1)), x_of(), torch.tensor([20, 12])
    layers = [nn.Linear(32, 32, bias=False) for _ in range(2)]
    for layer, values in zip(layers, (w, w.contiguous()), strict=True):
        layer.weight = nn.Parameter(values)
        convert(layer, RECIPE)(x).square().sum().backward()
    assert torch.equal(*(layer(x) for layer in layers))
    assert torch.equal(*(layer.weight.grad for layer in layers))
    assert torch.equal(*(grouped_linear(x, [each, each], sizes, RECIPE) for each in (w, w.contiguous())))
    labels = torch.arange(32)
    assert torch.equal(*(linear_cross_entropy(x, each, labels, recipe=RECIPE) for each in (w, w.contiguous())))
    wide = convert(nn.Linear(64, 32), RECIPE)
    nn.utils.parametrizations.orthogonal(wide)
    assert torch.equal(wide(x_of(columns=64)), linear(x_of(columns=64), wide.weight.contiguous(), wide.bias, RECIPE))


class Half(nn.Module):
    def forward(self, w):
        return w * 0.5


def test_only_forward_computes_a_weight():
    """Some parametrizations change their state each time, such as `spectral_norm`, so other calls leave them alone."""
    layer, uses = convert(nn.Linear(32, 32), RECIPE), []

    class Counted(nn.Module):
        def forward(self, w):
            uses.append(w)
            return w

    parametrize.register_parametrization(layer, "weight", Counted())
    uses.clear()
    torch.optim.SGD(layer.parameters())
    layer.load_state_dict(layer.state_dict())
    assert not uses
    layer(x_of())
    assert len(uses) == 1


@pytest.mark.parametrize(
    ("change", "undo"),
    [
        (
            lambda layer: parametrize.register_parametrization(layer, "weight", Half()),
            lambda layer: parametrize.remove_parametrizations(layer, "weight"),
        ),
        (
            lambda layer: parametrize.register_parametrization(layer, "bias", Half()),
            lambda layer: parametrize.remove_parametrizations(layer, "bias"),
        ),
        (
            nn.utils.parametrizations.weight_norm,
            lambda layer: parametrize.remove_parametrizations(layer, "weight"),
        ),
        (
            nn.utils.parametrizations.spectral_norm,
            lambda layer: parametrize.remove_parametrizations(layer, "weight"),
        ),
        (nn.utils.weight_norm, nn.utils.remove_weight_norm),
        (lambda layer: prune.l1_unstructured(layer, "weight", 0.5), lambda layer: prune.remove(layer, "weight")),
    ],
    ids=["parametrize", "bias", "weight_norm", "spectral_norm", "old_weight_norm", "prune"],
)
@pytest.mark.filterwarnings("ignore:.*torch.nn.utils.weight_norm.* is deprecated:FutureWarning")
def test_weights_that_torch_nn_utils_computes(change, undo):
    """What they make of a converted weight is what they make of a plain one, quantized."""
    plain, x = nn.Linear(32, 32), x_of()
    layer = convert(plain_copy(plain), RECIPE)
    for each in (plain, layer):
        torch.manual_seed(0)
        change(each.eval())
    assert torch.equal(layer(x), linear(x, plain.weight, plain.bias, RECIPE))
    assert list(layer.state_dict()) == list(plain.state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layer(x), linear(x, plain.weight, plain.bias, RECIPE))
    layer.load_state_dict(plain.state_dict())
    assert torch.equal(layer(x), linear(x, plain.weight, plain.bias, RECIPE))
    plain.load_state_dict(layer.state_dict())
    for each in (plain, layer):
        undo(each)
    assert torch.equal(layer(x), linear(x, plain.weight, plain.bias, RECIPE))


def test_a_replaced_weight_warns():
    """FSDP2 would gather its values. `convert` wraps it again."""
    model = convert(nn.Sequential(nn.Linear(64, 64)), "MXFP8")
    with pytest.warns(UserWarning, match="Linear: the converted weight is replaced by a plain parameter") as warned:
        model[0].weight = nn.Parameter(torch.ones(64, 64))
    assert warned[0].filename == __file__
    assert type(convert(model, "MXFP8")[0].weight) is ShardedWeight
