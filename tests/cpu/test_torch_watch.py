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
from qshard.torch_bridge import convert, numerics_of, update_scales
from support.awkward import TAME, awkward_values
from support.formats import GATHERED, RECIPES


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


def test_many_rows_are_measured_in_parts(monkeypatch):
    from qshard.torch_bridge import watch

    x = torch.from_numpy(awkward_values((300, 64), 2, kinds=TAME))
    found = []
    for part in (watch.PART, 128 * 64):
        monkeypatch.setattr(watch, "PART", part)
        for name in ("NVFP4", "MXFP8"):
            model = make_model(GATHERED[name])
            with numerics_of(model) as seen:
                model(x)
            found.append(seen.stats().of("0", Role.ACTIVATION))
    for one, other in zip(found[:2], found[2:], strict=True):
        assert one.sqnr_db == pytest.approx(other.sqnr_db, rel=1e-5)
        assert (one.zeros_made, one.subnormal, one.scale_low) == (other.zeros_made, other.subnormal, other.scale_low)


def test_hooks_go_and_mistakes_are_told():
    model = make_model("MXFP8")
    with numerics_of(model, weights=False) as watch:
        model(inputs())
    assert [row.role for row in watch.stats().rows] == [Role.ACTIVATION] * 2
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model)
    with pytest.raises(ValueError, match="has no Linear of qshard; convert it with a recipe first"):
        numerics_of(nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"is not a torch\.nn\.Module"):
        numerics_of([model])
    with numerics_of(model) as watch:
        pass
    with pytest.raises(RuntimeError, match="no forward pass of its 2 layers was seen"):
        watch.stats()
