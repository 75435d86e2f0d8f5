"""`torch_bridge.numerics_of`: rows are those of `stats` of what a step makes, and the step stays as it is."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from qshard.numerics import stats
from qshard.recipes import DelayedScaling, Role
from qshard.torch_bridge import (
    GroupedLinear,
    LinearCrossEntropy,
    MoE,
    convert,
    moe_permutation,
    moe_permute,
    numerics_of,
    swiglu,
    topk_routing,
    update_scales,
)
from qshard.torch_bridge._probe_calls import PART
from support.awkward import TAME, awkward_values
from support.formats import RECIPES


def make_model(recipe, bias=True):
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(64, 96, bias=bias), nn.Tanh(), nn.Linear(96, 32, bias=bias)), recipe)


def inputs(seed=0):
    return torch.from_numpy(awkward_values((64, 64), seed, kinds=("normal", "outlier", "zeros")))


def assert_row_is(row, x, fmt, **options):
    """Counts as `stats` has them, SQNR to float32 sums."""
    want = stats(x, fmt, **options)
    for name in ("zeros_made", "subnormal", "saturated", "nonfinite_given", "nonfinite_made"):
        assert getattr(row, name) == pytest.approx(getattr(want, name), rel=1e-12, abs=0), name
    assert row.sqnr_db == pytest.approx(want.sqnr_db, rel=1e-5, nan_ok=True)
    finite = np.abs(np.asarray(x, np.float64))
    assert row.amax == finite[np.isfinite(finite)].max(initial=0)
    assert (row.elements, row.format) == (math.prod(x.shape), str(fmt))


@pytest.mark.parametrize("name", [name for name in RECIPES if not RECIPES[name].stochastic])
def test_rows_are_those_of_stats(name):
    recipe = RECIPES[name]
    model, x, seen = make_model(recipe), inputs(), {}
    model[0].register_full_backward_hook(lambda layer, into, out: seen.update(dy=out[0].detach()))
    with numerics_of(model) as watch:
        (model(x.requires_grad_()) * torch.arange(32)).square().mean().backward()
    rows = watch.stats()
    assert [(row.layer, row.role) for row in rows.rows] == [(i, role) for i in "02" for role in Role]
    assert_row_is(rows.of("0", Role.WEIGHT), model[0].weight.detach().shard, recipe.weight)
    assert_row_is(rows.of("0", Role.ACTIVATION), x.detach(), recipe.activation)
    assert_row_is(rows.of("0", Role.GRADIENT), seen["dy"], recipe.gradient)


@pytest.mark.parametrize("name", RECIPES)
def test_a_watched_step_has_the_same_bits(name):
    """Random numbers and states of scaling too."""
    model = make_model(RECIPES[name])
    other = copy.deepcopy(model)
    for watched in (True, False):
        one, x = (model if watched else other), inputs().requires_grad_()
        for _ in range(2):
            if watched:
                with numerics_of(one) as watch:
                    one(x).square().sum().backward()
                assert len(watch.stats().rows) == 6
            else:
                one(x).square().sum().backward()
            update_scales(one)
        one.seen = x.grad
    assert torch.equal(model.seen, other.seen)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)


def test_stochastic_rows_are_of_the_layers_own_draws():
    """Half of 0.25 is rounded up to 0.5, as the codes that the layer multiplies are."""
    model, x = make_model("NVFP4", bias=False), torch.zeros(64, 64)
    x[:, ::16], x[:, 1::16] = 6.0, 0.25
    with numerics_of(model) as watch:
        model(x).sum().backward()
    assert 0 < watch.stats().of("2", Role.GRADIENT).elements == 64 * 32


def test_scales_of_delayed_scaling_saturate():
    """The second step has 8 times the values that the scale was made for."""
    model = make_model(DelayedScaling(history=1))
    for factor, saturated in ((1.0, 0), (8.0, 1)):
        with numerics_of(model) as watch:
            model(factor * torch.ones(16, 64)).sum().backward()
        update_scales(model)
        row = watch.stats().of("0", Role.ACTIVATION)
        assert (row.saturated, row.scale_low) == (saturated, np.float32(1 / 448))


def test_calls_add_up_and_checkpointing_does_not():
    model, x = make_model("CurrentScaling"), inputs()
    with numerics_of(model) as watch:
        for factor in (1, 2):
            checkpoint(model, factor * x, use_reentrant=False).sum().backward()
    rows = watch.stats()
    assert {row.role: row.calls for row in rows.rows} == {Role.WEIGHT: 1, Role.ACTIVATION: 2, Role.GRADIENT: 2}
    assert rows.of("0", Role.ACTIVATION).elements == 2 * x.numel()
    assert rows.of("0", Role.ACTIVATION).amax == 2 * x.abs().max()
    with numerics_of(model) as watch:
        checkpoint(model, x.requires_grad_(), use_reentrant=True).sum().backward()
    assert {row.calls for row in watch.stats().rows} == {1}


def test_not_finite_and_empty():
    model = make_model("CurrentScaling")
    x = torch.ones(16, 64)
    x[0, 0], x[1, 1] = math.inf, math.nan
    with numerics_of(model) as watch:
        model(x)
        model(torch.ones(0, 64))
    row = watch.stats().of("0", Role.ACTIVATION)
    assert (row.nonfinite_given, row.amax, row.calls) == (2 / 1024, 1.0, 2)


@pytest.mark.parametrize("name", ["NVFP4", "MXFP8"])
def test_many_rows_are_measured_in_parts(name):
    """The last part is not whole."""
    x = awkward_values((300, 64), 2, kinds=TAME)
    x = torch.from_numpy(np.tile(x, (-(-PART // x.size) + 1, 1)))
    model = make_model(RECIPES[name])
    with torch.no_grad(), numerics_of(model, weights=False) as seen:
        model[0](x)
    assert_row_is(seen.stats().of("0", Role.ACTIVATION), x, RECIPES[name].activation)


def test_hooks_go_and_mistakes_are_told():
    model = make_model("MXFP8")
    with numerics_of(model, weights=False) as watch:
        model(inputs())
    assert [row.role for row in watch.stats().rows] == [Role.ACTIVATION] * 2
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
    with pytest.raises(ValueError, match=r"numerics_of: model \(the class Linear\) has no converted layer"):
        numerics_of(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module"):
        numerics_of([model])
    with numerics_of(model) as watch:
        pass
    with pytest.raises(RuntimeError, match="no forward pass of its 2 layers was seen"):
        watch.stats()


class Head(nn.Module):
    def __init__(self, reduction="mean"):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), LinearCrossEntropy(64, 96, chunk=48, reduction=reduction)

    def forward(self, x, labels=None):
        return self.head(self.body(x), labels)


@pytest.mark.parametrize("name", ["CurrentScaling", "MXFP8", "NVFP4"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_head_that_gives_the_loss(reduction, name):
    """Chunks of 48 and of 16 rows are calls; gradients are those of logits; bits stay, and later calls are not seen."""
    torch.manual_seed(0)
    model = convert(Head(reduction), name)
    other = copy.deepcopy(model)
    x, labels = torch.randn(64, 64), torch.randint(96, (64,))
    with numerics_of(model) as watch:
        loss = model(x, labels)
        loss.sum().backward()
    want = other(x, labels)
    want.sum().backward()
    assert torch.equal(loss, want)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    rows = watch.stats()
    assert {row.role: row.calls for row in rows.rows if row.layer == "head"} == {
        Role.WEIGHT: 1,
        Role.ACTIVATION: 2,
        Role.GRADIENT: 2,
    }
    assert rows.of("head", Role.ACTIVATION).elements == 64 * 64
    assert rows.of("head", Role.GRADIENT).elements == 64 * 96
    with torch.no_grad():
        body = model.body(x)
        logits = torch.nn.functional.linear(body, model.head.weight.shard)
        of_logits = (logits.softmax(-1) - torch.nn.functional.one_hot(labels, 96)) / (64 if reduction == "mean" else 1)
    if name != "NVFP4":  # Whose body draws other numbers here.
        assert rows.of("head", Role.ACTIVATION).amax == body.abs().max()
        # Logits are products of codes.
        assert rows.of("head", Role.GRADIENT).amax == pytest.approx(of_logits.abs().max().item(), rel=0.1)
    model(x, labels)
    assert model.head.observer is None


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_head_under_checkpointing_counts_once(reduction, reentrant):
    model, labels = convert(Head(reduction), "MXFP8"), torch.zeros(64, dtype=torch.int64)
    x = torch.randn(64, 64, requires_grad=True)
    with numerics_of(model, weights=False) as watch:
        checkpoint(model, x, labels, use_reentrant=reentrant).sum().backward()
        model(x, labels).detach()  # Whose gradients nobody takes.
    rows = watch.stats()
    assert [rows.of("head", role).calls for role in (Role.ACTIVATION, Role.GRADIENT)] == [4, 2]
    assert [rows.of("body", role).calls for role in (Role.ACTIVATION, Role.GRADIENT)] == [2, 1]


def test_a_head_without_labels_is_a_layer():
    model = convert(Head(), "MXFP8")
    with numerics_of(model, weights=False) as watch:
        model(inputs()).square().sum().backward()
    assert [row.calls for row in watch.stats().rows] == [1] * 4


@pytest.mark.parametrize("name", RECIPES)
def test_experts_have_the_rows_of_their_groups(name):
    """As layers that are called alone; one without rows is called with none."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    layers = [nn.Linear(64, 96, bias=False) for _ in range(3)]
    alone = convert(nn.ModuleList(layers), recipe)
    model = nn.Sequential()
    model.up = GroupedLinear.of(copy.deepcopy(alone))
    sizes, x = torch.tensor([33, 0, 30]), inputs().requires_grad_()
    scale = torch.arange(96.0)
    with numerics_of(model) as watch:
        (model.up(x, group_sizes=sizes) * scale).square().sum().backward()
    with numerics_of(alone) as other:
        for layer, rows in zip(alone, x[:63].split(sizes.tolist()), strict=True):
            (layer(rows) * scale).square().sum().backward()
    seen, want = watch.stats(), other.stats()
    assert [row.layer for row in seen.rows] == [f"up.experts.{i}" for i in range(3) for _ in Role]
    for row, like in zip(seen.rows, want.rows, strict=True):
        assert (row.role, row.calls, row.elements) == (like.role, like.calls, like.elements)
        # Products of experts are summed in another order, so a gradient may be rounded to its neighbour.
        close = {"rel": 1e-4 if row.role is Role.GRADIENT else 0, "abs": 0}
        assert row.amax == pytest.approx(like.amax, **close)
        assert row.sqnr_db == pytest.approx(like.sqnr_db, abs=0.1, nan_ok=True)


@pytest.mark.parametrize("recipe", ["CurrentScaling", "BlockScaling", "MXFP8"])
def test_experts_of_a_layer_in_padded_rows(recipe):
    """`MoE` keeps rows padded from product to product: each expert is measured as with rows in the order of tokens."""
    torch.manual_seed(0)
    moe = MoE(64, 128, num_experts=4, top_k=2, recipe=recipe)
    x = torch.randn(40, 64)
    with numerics_of(moe) as watch:
        moe(x).square().sum().backward()
    indices, _ = topk_routing(moe.router(x), 2)
    permutation = moe_permutation(indices, 4)
    with numerics_of(moe) as other:
        h = moe.w13(moe_permute(x, permutation), permutation.group_sizes)
        moe.w2(swiglu(*h.chunk(2, -1)), permutation.group_sizes)
    want = {(row.layer, row.role): row for row in other.stats().rows}
    seen = [row for row in watch.stats().rows if (row.layer, row.role) in want and row.role is not Role.GRADIENT]
    assert {row.layer.split(".")[0] for row in seen} == {"w13", "w2"}
    for row in seen:
        like = want[row.layer, row.role]
        assert (row.calls, row.elements) == (like.calls, like.elements)
        assert row.amax == pytest.approx(like.amax, rel=1e-5)  # SwiGLU of halves is rounded otherwise.
    of_gradients = [row for row in watch.stats().rows if row.role is Role.GRADIENT and row.layer.startswith("w2.")]
    assert sum(row.elements for row in of_gradients) == 80 * 64


def test_heads_that_are_not_measured_are_named():
    model = nn.Sequential(nn.Linear(64, 64), LinearCrossEntropy(64, 96, recipe="MXFP8"))
    convert(model, "MXFP8", filter=lambda module, name: name == "0")
    with pytest.warns(UserWarning, match=r"numerics_of: 1 \(LinearCrossEntropy with recipe=\) are not measured"):
        numerics_of(model)
