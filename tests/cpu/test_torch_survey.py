"""Recipes by layer in one `convert`, and the weights that it names because it leaves them."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from qshard.recipes import MXFP8, DelayedScaling
from qshard.torch_bridge import Linear, convert, quantized_init, update_scales
from qshard.torch_bridge._convert.survey import survey
from support.torch_linears import x_of


class Experts(nn.Module):
    """Experts as in torchtitan's `GroupedExperts`: one 3-D tensor holds a weight of all experts."""

    def __init__(self, experts=4, size=32):
        super().__init__()
        self.w1 = nn.Parameter(torch.ones(experts, 2 * size, size))
        self.w2 = nn.Parameter(torch.ones(experts, size, 2 * size))

    def forward(self, x):
        return torch.einsum("th,eih->eti", x, self.w1).sum(0) @ self.w2[0].t()


class OpenExperts(nn.Module):
    """Experts as in transformers' `GptOssExperts`, with a bias for each expert."""

    def __init__(self, experts=4, size=32):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.ones(experts, size, 2 * size))
        self.gate_up_proj_bias = nn.Parameter(torch.ones(experts, 2 * size))


class Router(nn.Module):
    """A router as in transformers' `MixtralTopKRouter`."""

    def __init__(self, experts=4, size=32):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(experts, size))

    def forward(self, x):
        return F.linear(x, self.weight)


class Layer(nn.Module):
    def __init__(self, experts):
        super().__init__()
        self.q, self.o = nn.Linear(32, 32), nn.Linear(32, 32)
        self.router, self.experts = Router(), experts


class Mixture(nn.Module):
    def __init__(self, layers=8, kind=Experts):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.pos_embed = nn.Parameter(torch.ones(1, 16, 32))
        self.cls_token = nn.Parameter(torch.ones(1, 1, 32))
        self.layers = nn.ModuleList(Layer(kind()) for _ in range(layers))
        self.norm = nn.LayerNorm((4, 32))
        self.head = nn.Linear(32, 64, bias=False)


def warned(model, recipe="CurrentScaling", **options):
    with pytest.warns(UserWarning, match="^convert: ") as caught:
        convert(model, recipe, **options)
    (one,) = caught
    return str(one.message)


def silent(model, recipe="CurrentScaling", **options):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return convert(model, recipe, **options)


def kinds(model):
    return {name: type(m.recipe).__name__ for name, m in model.named_modules() if isinstance(m, Linear)}


def test_weights_of_three_axes_are_named_once():
    assert warned(Mixture()) == (
        "convert: 16 of 33 layers were not converted: layers.0.router (Router has its own weight; for "
        "the weight of a product use nn.Linear; 7 more like these), layers.0.experts (w1, w2 with 3 axes, a weight per "
        "expert; use grouped_linear, or a GroupedLinear of nn.Linear layers; 7 more like these); exclude them with "
        "filter= to silence this"
    )
    assert "layers.0.experts (gate_up_proj with 3 axes, a weight per expert; use" in warned(Mixture(kind=OpenExperts))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        (nn.Conv2d(4, 8, 3), r"1 \(convolutions are not supported\)"),
        (nn.LazyConv1d(8, 3), r"1 \(convolutions are not supported\)"),
        (nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 8, 3)), r"1 \(convolutions are not supported\)"),
        (nn.LSTM(32, 32), r"1 \(recurrent layers are not supported\)"),
        (nn.GRUCell(32, 32), r"1 \(recurrent layers are not supported\)"),
        (nn.Bilinear(8, 8, 8), r"1 \(bilinear layers are not supported\)"),
        (
            nn.MultiheadAttention(32, 2),
            r"1 \(it multiplies in_proj_weight \(q, k, v\) and out_proj itself; use nn.Linear for each\)",
        ),
        (
            nn.MultiheadAttention(32, 2, kdim=16),
            r"it multiplies q_proj_weight, k_proj_weight, v_proj_weight \(q, k, v\) and",
        ),
        (nn.ParameterList([torch.ones(4, 4)]), r"1 \(ParameterList has its own 0; for the weight of a product use"),
    ],
    ids=["conv", "lazy conv", "parametrized conv", "lstm", "gru cell", "bilinear", "attention", "kdim", "list"],
)
def test_what_else_is_named(module, text):
    with pytest.warns(UserWarning, match=f"^convert: 1 of 2 layers were not converted: .*{text}"):
        convert(nn.Sequential(nn.Linear(32, 32), module), "CurrentScaling")
    silent(nn.Sequential(nn.Linear(32, 32), module), filter=lambda module, name: name != "1")
    silent(nn.Sequential(nn.Linear(32, 32), module), {"1": None, "*": "CurrentScaling"})


def test_no_false_alarm():
    """Embeddings, norms, tables of positions, tokens, vectors and scales of channels are no weights of products."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.bag = nn.Embedding(8, 8), nn.EmbeddingBag(8, 8)
            self.norms = nn.ModuleList(
                [nn.LayerNorm((4, 8)), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.RMSNorm((4, 8))]
            )
            self.pos_embed = nn.Parameter(torch.ones(1, 4, 8))
            self.relative_position_bias_table = nn.Parameter(torch.ones(9, 2))
            self.cls_token, self.register_tokens = (nn.Parameter(torch.ones(1, n, 8)) for n in (1, 4))
            self.layer_scale = nn.Parameter(torch.ones(8, 1, 1))
            self.steps = nn.Parameter(torch.ones(4, 4, dtype=torch.int32), requires_grad=False)
            self.act = nn.PReLU(8)
            self.layer = nn.Linear(16, 16)
            self.register_buffer("frequencies", torch.ones(4, 4))

    assert list(survey(Model())) == ["layer"]
    silent(Model())
    tied = nn.ModuleDict({"embed": nn.Embedding(8, 8), "layer": nn.Linear(16, 16), "head": Router()})
    tied["head"].weight = tied["embed"].weight
    silent(tied)


def test_a_filter_of_linear_layers_meets_other_modules():
    """It may read what those lack: then it has not left them out."""
    text = warned(Mixture(), filter=lambda layer, name: layer.out_features == 32)
    assert text.startswith("convert: 16 of 32 layers were not converted: layers.0.router")
    silent(Mixture(), filter=lambda layer, name: "experts" not in name and "router" not in name)
    with pytest.raises(AttributeError, match="no_such"):
        convert(Mixture(), "CurrentScaling", filter=lambda layer, name: layer.no_such)


def test_recipes_by_layer():
    rules = {
        "*.experts": None,
        "*.router": None,
        "head": None,
        "layers.[01].*": "DelayedScaling",
        "*.q": MXFP8(),
        "*": "BlockScaling",
    }
    model = nn.Sequential()
    model.layers = nn.ModuleList(Layer(nn.Identity()) for _ in range(3))
    for layer in model.layers:
        layer.q, layer.o, layer.router = nn.Linear(128, 128), nn.Linear(128, 128), nn.Identity()
    model.head = nn.Linear(32, 64)
    rules = {name: recipe for name, recipe in rules.items() if name not in ("*.experts", "*.router")}
    silent(model, rules)
    assert kinds(model) == {
        **{f"layers.{i}.{name}": "DelayedScaling" for i in (0, 1) for name in "qo"},
        "layers.2.q": "MXFP8",
        "layers.2.o": "BlockScaling",
    }
    assert type(model.head) is nn.Linear
    x = x_of(32, 128)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for layer in model.layers:
            x = layer.o(layer.q(x))
        x.sum().backward()
        optimizer.step()
        update_scales(model)
        x = x.detach()
    assert model.layers[0].q.delayed["activation"].scale > 0
    silent(model, "CurrentScaling", filter=lambda _, name: name.endswith(".q"))  # Another call changes what it selects.
    assert kinds(model)["layers.0.q"] == "CurrentScaling"
    assert kinds(model)["layers.0.o"] == "DelayedScaling"


def test_layers_without_a_pattern_are_named():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert "convert: 1 of 2 layers were not converted: 1 (no pattern matches it); exclude" in warned(
        model, {"0": "MXFP8"}
    )
    assert kinds(model) == {"0": "MXFP8"}


def test_a_slice_selects_blocks():
    """Blocks without linear layers count, and so does the list of a model that is one."""
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Sequential(nn.Linear(32, 32)) for _ in range(6))})
    model.layers.append(nn.Identity())
    silent(model, {"layers[:1].*": "MXFP8", "*s[-40%:].*": None, "*": "BlockScaling"})
    assert kinds(model) == {"layers.0.0": "MXFP8", **{f"layers.{i}.0": "BlockScaling" for i in (1, 2, 3)}}
    assert kinds(convert(nn.Sequential(*[nn.Linear(32, 32) for _ in range(3)]), {"[1:2]": "MXFP8", "*": None})) == {
        "1": "MXFP8"
    }


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (
            {"layers[90:].*": None, "*": "MXFP8"},
            r"pattern 'layers\[90:\].\*' matches no layer; the closest are 'layers.0.",
        ),
        (
            {"*.expert.*": "MXFP8", "*": "MXFP8"},
            r"pattern '\*.expert.\*' matches no layer; the closest are 'layers.0.expe",
        ),
        (
            {"*": "MXFP8", "*.q": "BlockScaling"},
            r"pattern '\*.q' has no effect: '\*' before it matches all .* 'layers.0.q'",
        ),
        ({"*": None}, r"recipe \({'\*': None}\) gives no layer a recipe; pass at least one, such as"),
        ({}, r"recipe \({}\) gives no layer a recipe"),
        ({"*": "MXFP9"}, r"recipe\['\*'\] \('MXFP9'\) is not a recipe name; did you mean 'MXFP8'"),
        ({1: "MXFP8"}, r"pattern \(1\) is not a string"),
        ({"*.q": "MXFP8", "head": "NVFP4", "*": 3}, r"recipe\['\*'\] \(3\) is not a recipe or a recipe name"),
    ],
)
def test_rules_that_are_wrong_change_nothing(recipe, text):
    model = Mixture()
    with pytest.raises((TypeError, ValueError), match=f"^convert: {text}"):
        convert(model, recipe)
    assert kinds(model) == {}


def test_a_pattern_may_keep_what_is_no_layer():
    model = nn.ModuleDict({"embed": nn.Embedding(8, 8), "layer": nn.Linear(16, 16)})
    silent(model, {"embed": None, "*": "CurrentScaling"})
    with pytest.raises(ValueError, match="pattern 'embed' matches no layer"):
        convert(model, {"embed": "MXFP8", "*": "CurrentScaling"})


def test_a_shared_weight_has_one_recipe():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    with pytest.raises(
        ValueError, match=r"^convert: 1.weight \(MXFP8\) is also 0.weight \(CurrentScaling\), but a weigh"
    ):
        convert(model, {"0": "CurrentScaling", "1": "MXFP8"})
    silent(model, {"[01]": "MXFP8"})


def test_quantized_init_takes_recipes_by_layer():
    with quantized_init({"0": "DelayedScaling", "*": MXFP8()}, primary=False):
        model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    assert kinds(model) == {"0": "DelayedScaling", "1": "MXFP8"}
    assert model[0].recipe == DelayedScaling()
    with (
        pytest.raises(ValueError, match=r"^quantized_init: recipe \(\{\}\) gives no layer a recipe; pass at"),
        quantized_init({}),
    ):
        pass
