"""`convert` for experts in 3-D parameters: `grouped_linear` with a recipe, and nothing else changes."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qshard.recipes import Role
from qshard.torch_bridge import (
    QuantizedTensor,
    convert,
    grouped_linear,
    linear,
    load_scaling_state,
    moe_permutation,
    moe_permute,
    moe_unpermute,
    numerics_of,
    quantized_init,
    quantized_state_dict,
    scaling_state,
    swiglu,
    update_scales,
)
from support.experts import GatedExperts, GroupedExperts, Mixture, OpenExperts, PlainExperts
from support.formats import RECIPES, STATELESS

ROUTED = [GatedExperts, OpenExperts, PlainExperts]
every_kind = pytest.mark.parametrize("kind", [*ROUTED, GroupedExperts])
E, WIDTH = 5, 128


def plain(kind, seed=0, **options):
    torch.manual_seed(seed)
    return Mixture(kind, **options)


def converted(kind, recipe, seed=0, rules=None):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return convert(plain(kind, seed), rules or {"router": None, "*": recipe})


def x_of(seed=1, rows=64, width=WIDTH):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def routed(experts=E, seed=2, rows=64):
    """Two experts for each token; the last expert has none."""
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.rand(rows, experts - 1, generator=generator).argsort(1)[:, :2]
    return chosen, torch.rand(rows, 2, generator=generator)


def sizes_of(chosen, experts=E):
    return torch.bincount(chosen.flatten(), minlength=experts)[:experts]


@pytest.mark.parametrize(
    ("kind", "name"), [(GatedExperts, name) for name in STATELESS] + [(kind, "NVFP4") for kind in ROUTED[1:]]
)
def test_routed_experts_are_grouped_linears(kind, name):
    """The bits of `grouped_linear` by hand, with the seeds of the module, in forward and all gradients."""
    recipe, x, (chosen, scores) = STATELESS[name], x_of(), routed()
    module = converted(kind, recipe).experts
    by_hand, seeds = copy.deepcopy(module), module.seed
    seeds = [None] * 2 if seeds is None else [seeds + torch.tensor([i, 0], dtype=torch.int32) for i in range(2)]
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    outputs.append(module(inputs[0], chosen, scores))
    permutation = moe_permutation(chosen, E)
    flat = chosen.flatten()[permutation.choices]
    layout = "KN" if by_hand.is_transposed else "NK"

    def project(x, name, seeds):
        y = grouped_linear(x, getattr(by_hand, name), sizes_of(chosen), recipe, weight_layout=layout, seeds=seeds)
        return y + getattr(by_hand, f"{name}_bias")[flat] if by_hand.has_bias else y

    rows = moe_permute(inputs[1], permutation)
    h = project(rows, "gate_up_proj" if by_hand.has_gate else "up_proj", seeds[0])
    activated = {GatedExperts: lambda: swiglu(*h.chunk(2, -1)), PlainExperts: lambda: by_hand.act_fn(h)}
    y = project(activated.get(kind, lambda: by_hand._apply_gate(h))(), "down_proj", seeds[1])
    y = by_hand.post_expert_norm(y) if by_hand.has_post_expert_norm else y
    outputs.append(moe_unpermute(y, permutation, scores))
    for output in outputs:
        output.square().sum().backward()
    assert torch.equal(*outputs)
    assert torch.equal(*(x.grad for x in inputs))
    for (name, a), b in zip(module.named_parameters(), by_hand.parameters(), strict=True):
        # Threads add the gradients of a bias in any order.
        assert torch.allclose(a.grad, b.grad, rtol=1e-5, atol=1e-4) if "bias" in name else torch.equal(a.grad, b.grad)
    if module.seed is not None:
        assert torch.equal(module.seed[:, 0], by_hand.seed[:, 0] + 2)


@pytest.mark.parametrize("name", ["CurrentScaling", "BlockScaling", "MXFP8"])
def test_an_expert_is_a_linear(name):
    """The rows of each expert give what `linear` with the weights of this expert gives."""
    recipe, x, (chosen, scores) = STATELESS[name], x_of(), routed()
    module = converted(GatedExperts, recipe).experts
    expected = torch.zeros_like(x)
    for expert in range(E):
        tokens, places = torch.where(chosen == expert)
        if len(tokens):
            h = linear(x[tokens], module.gate_up_proj[expert].detach(), None, recipe)
            y = linear(module._apply_gate(h), module.down_proj[expert].detach(), None, recipe)
            expected.index_add_(0, tokens, y * scores[tokens, places, None])
    # Equal codes; products are summed in another order, which may move a code of h to its neighbour.
    assert (module(x, chosen, scores) - expected).norm() < 1e-3 * expected.norm()


@pytest.mark.parametrize("name", STATELESS)
def test_grouped_mm_of_sorted_experts(name):
    """The method that torchtitan overrides: `grouped_linear` of the transposed weights."""
    recipe, x = STATELESS[name], x_of().bfloat16()
    module, sizes = converted(GroupedExperts, recipe).experts, torch.tensor([9, 0, 30, 21, 0])
    seeds = module.seed if module.seed is None else module.seed.clone()
    offs, w = sizes.cumsum(0).int(), module.w1_EFD.detach().bfloat16()
    y = module._grouped_mm(A=x, B_t=w.transpose(-2, -1), offs=offs)
    assert torch.equal(y, grouped_linear(x, w, sizes, recipe, weight_layout="NK", seeds=seeds))
    assert not y[60:].any()


@pytest.mark.parametrize(
    ("kind", "name"),
    [(GatedExperts, name) for name in RECIPES if name in STATELESS]
    + [(kind, "CurrentScaling") for kind in (OpenExperts, PlainExperts, GroupedExperts)],
)
def test_training(kind, name):
    """Outputs are near those of high precision, and the loss falls as there."""
    losses, recipe, x = [], STATELESS[name], x_of()
    target = torch.randint(32, (64,), generator=torch.Generator().manual_seed(3))
    few = min(recipe.format(role).element.bits for role in Role) < 8
    for quantized in (False, True):
        model = converted(kind, recipe) if quantized else plain(kind)
        before = {name: (type(p), p.shape, id(p)) for name, p in model.experts.named_parameters()}
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses.append([])
        for _ in range(6):
            loss = nn.functional.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        assert {name: (type(p), p.shape, id(p)) for name, p in model.experts.named_parameters()} == before
    exact, mine = losses
    assert mine[-1] < mine[0] - 0.5
    assert abs(mine[0] - exact[0]) < (0.2 if few else 0.05)
    assert abs(mine[-1] - exact[-1]) < (0.4 if few else 0.1)


@pytest.mark.parametrize("kind", ROUTED)
def test_experts_of_other_ranks(kind):
    """Tokens of experts that a rank lacks give zeros, and no gradient to the router, as under expert parallelism."""
    module, x, (chosen, scores) = converted(kind, "CurrentScaling").experts, x_of(), routed()
    local = chosen < 2
    scores = torch.where(local, scores, 0.0).requires_grad_()
    x = x.clone().requires_grad_()
    y = module(x, torch.where(local, chosen, E), scores)
    y.square().sum().backward()
    none = ~local.any(1)
    assert none.any()
    assert not y[none].any()
    assert not x.grad[none].any()
    assert not scores.grad[~local].any()
    alone = module(x, torch.where(local, chosen, E + 7), scores)
    assert torch.equal(alone, y)


def test_autocast():
    module, x, (chosen, scores) = converted(GatedExperts, "CurrentScaling").experts, x_of(), routed()
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, chosen, scores)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert torch.equal(y.bfloat16(), module(x.bfloat16(), chosen, scores))
    assert module.gate_up_proj.grad.dtype == torch.float32


@every_kind
def test_state_dicts_and_copies(kind):
    """State dicts are those of the plain model. Copies and pickles have the seeds of the original."""
    model, other, x = converted(kind, "NVFP4"), converted(kind, "NVFP4", seed=1), x_of()
    assert model.state_dict().keys() == plain(kind).state_dict().keys()
    plain(kind).load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict())
    load_scaling_state(other, scaling_state(model))
    assert scaling_state(model)["experts.seed"].shape == (E, 2)
    copies = [other, copy.deepcopy(model), pickle.loads(pickle.dumps(model))]

    def gradient(model):  # NVFP4 rounds gradients stochastically.
        return torch.autograd.grad(model(x).square().sum(), next(model.experts.parameters()))[0]

    expected = gradient(model)
    for one in copies:
        assert isinstance(one.experts, kind)
        assert type(one.experts) is type(model.experts)
        assert torch.equal(gradient(one), expected)
    assert not torch.equal(gradient(model), expected)
    exported = quantized_state_dict(model)
    assert isinstance(exported["head.weight"], QuantizedTensor)
    assert type(exported[f"experts.{next(iter(model.experts._parameters))}"]) is torch.Tensor
    assert "recipe=NVFP4" in repr(model.experts)


@every_kind
def test_a_model_on_meta(kind):
    """Seeds get values with the parameters, from `to_empty` and from a state dict."""
    values = plain(kind).state_dict()
    for assign in (False, True):
        with torch.device("meta"):
            model = converted(kind, "NVFP4")
        assert model.experts.seed.is_meta
        if not assign:
            model.to_empty(device="cpu")
        model.load_state_dict(values, assign=assign)
        assert model.experts.seed.device.type == "cpu"
        assert len(set(model.experts.seed.flatten().tolist())) == 2 * E
        assert model(x_of()).isfinite().all()


def test_recomputation():
    model, x = converted(GatedExperts, "MXFP8"), x_of()
    grads = []
    for recompute in (False, True):
        model.zero_grad()
        (checkpoint(model, x, use_reentrant=False) if recompute else model(x)).square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled():
    """The bits of eager calls, with the seeds of eager calls."""
    model, x = converted(GatedExperts, "NVFP4"), x_of()
    again = copy.deepcopy(model)
    for call in (model, torch.compile(again, backend="aot_eager")):
        call(x).square().sum().backward()
    for (name, a), b in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name
    assert torch.equal(model.experts.seed, again.experts.seed)


@pytest.mark.parametrize("kind", ROUTED)
def test_without_tokens(kind):
    """No tokens at all, or none of a rank's own experts: zeros, and gradients of zeros."""
    module = converted(kind, "MXFP8").experts
    for rows in (0, 7):
        module.zero_grad()
        x = torch.randn(rows, WIDTH, requires_grad=True)
        y = module(x, torch.full((rows, 2), E), torch.ones(rows, 2))
        y.sum().backward()
        assert y.shape == (rows, WIDTH)
        assert not y.any()
        assert not any(p.grad.any() for p in module.parameters())


def test_a_second_recipe():
    model = converted(GatedExperts, "NVFP4")
    kind = type(model.experts)
    convert(model, {"router": None, "*": "BlockScaling"})
    assert type(model.experts) is kind
    assert model.experts.seed is None
    assert model.experts.recipe == STATELESS["BlockScaling"]


def test_patterns_and_filters():
    config = plain(GatedExperts).experts.config
    model = convert(plain(GatedExperts), {"experts.gate_up_proj": "MXFP8", "*": None})
    assert model.experts.recipe == STATELESS["MXFP8"]
    assert type(model.head) is nn.Linear
    model = convert(plain(GatedExperts), "MXFP8", filter=lambda _, name: name == "head")
    assert type(model.experts) is GatedExperts
    model = convert(plain(GatedExperts), "MXFP8", filter=lambda layer, name: layer.out_features > 5)
    assert model.experts.recipe == STATELESS["MXFP8"]  # A filter of linear layers does not exclude experts.
    with quantized_init("MXFP8", primary=False):
        model = nn.ModuleList([GatedExperts(config)])
    assert model[0].recipe == STATELESS["MXFP8"]


def warned(model, recipe="CurrentScaling"):
    with pytest.warns(UserWarning, match=r"^convert: 1 of 3 layers were not converted: experts ") as caught:
        convert(model, recipe)
    return str(caught[0].message)


def test_what_is_left_out_is_named():
    model = plain(GatedExperts)
    assert "DelayedScaling has no scales by expert; match it with a pattern of another recipe" in warned(
        model, "DelayedScaling"
    )
    assert type(model.experts) is GatedExperts
    convert(model, {"experts": "CurrentScaling", "*": "DelayedScaling"})
    model(x_of()).sum().backward()
    update_scales(model)
    model = plain(GatedExperts)
    model.experts.forward = model.experts.forward
    assert "its forward was replaced" in warned(model)
    model = plain(GatedExperts)
    nn.utils.parametrize.register_parametrization(model.experts, "down_proj", nn.Identity())
    assert "a weight per expert; use grouped_linear" in warned(model)

    class Overrides(GatedExperts):
        def forward(self, *given):
            return super().forward(*given) * 2

    assert "gate_up_proj, down_proj with 3 axes, a weight per expert; use grouped_linear" in warned(plain(Overrides))

    class Scaled(GroupedExperts):
        def _grouped_mm(self, *, A, B_t, offs):
            return A

    assert "w1_EFD, w2_EDF, w3_EFD with 3 axes, a weight per expert" in warned(plain(Scaled))

    class Third(GatedExperts):
        def __init__(self, config):
            super().__init__(config)
            self.third = nn.Parameter(torch.ones(E, 4, 4))

    assert "gate_up_proj, down_proj, third with 3 axes" in warned(plain(Third))


def test_an_option_that_convert_does_not_know():
    has_sink = True
    original_init = GatedExperts.__init__

    def __init__(self, config):
        original_init(self, config)
        self.has_sink = has_sink

    later = type("Later", (GatedExperts,), {"__init__": __init__, "forward": GatedExperts.forward})
    assert "Later uses has_sink of transformers, which convert does not know" in warned(plain(later))


def test_errors():
    model = plain(GatedExperts, sizes=(E, 112, 128))
    with pytest.raises(ValueError, match=r"^convert: experts.gate_up_proj .*exclude the layer with filter="):
        convert(model, "MXFP8", filter=lambda _, name: name == "experts")
    assert type(model.experts) is GatedExperts
    model = plain(GatedExperts)
    model.experts.double()
    with pytest.raises(TypeError, match=r"^convert: experts.gate_up_proj \(float64\)"):
        convert(model, "MXFP8", filter=lambda _, name: name == "experts")
    with pytest.raises(ValueError, match=r"numerics_of: model .* has no converted layer"):
        numerics_of(convert(plain(GatedExperts), {"experts": "MXFP8", "*": None}))
    with pytest.warns(UserWarning, match=r"numerics_of: experts \(3-D parameters of experts\) are not measured"):
        numerics_of(converted(GatedExperts, "MXFP8"))


def test_experts_of_several_sizes():
    """Weights `[E, K, N]` with N unlike K have the layout of the module."""
    for kind in (GatedExperts, OpenExperts, PlainExperts, GroupedExperts):
        torch.manual_seed(0)
        model = Mixture(kind, sizes=(3, 128, 256))
        exact = model(x_of()).detach()
        convert(model, {"router": None, "head": None, "*": "MXFP8"})
        assert (model(x_of()) - exact).norm() < 0.1 * exact.norm()
