"""State dicts of converted models, and beside them the state of scaling: what a run needs to go on."""

import copy
import itertools

import pytest
import torch
from torch import nn

from qshard.recipes import CurrentScaling, DelayedScaling
from qshard.torch_bridge import convert, load_scaling_state, scaling_state, update_scales
from support.formats import RECIPES
from support.torch_linears import Named, plain_copy, value, x_of

RECIPE = CurrentScaling()
every_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())


@every_recipe
def test_state_dicts_are_those_of_plain_models(recipe):
    """Both ways, strictly; older files, which have the state of scaling, load too, and bring it."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model = convert(plain_copy(plain), recipe)
    assert list(model.state_dict()) == list(plain.state_dict())
    with torch.no_grad():
        model[0].weight.mul_(2)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain[0].weight, value(model[0].weight))
    with torch.no_grad():
        plain[0].weight.mul_(2)
    model.load_state_dict(plain.state_dict())
    assert torch.equal(plain[0].weight, value(model[0].weight))
    state = {name: tensor + 1 for name, tensor in scaling_state(model).items()}
    model.load_state_dict({**model.state_dict(), **state})
    assert all(torch.equal(tensor, state[name]) for name, tensor in scaling_state(model).items())
    assert bool(state) == (recipe.stateful or recipe.stochastic)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**model.state_dict(), "0.other": torch.ones(1)})


@every_recipe
def test_a_state_of_scaling_is_all_that_a_run_needs_to_go_on(recipe):
    """With that of the model; whatever wraps it. Buffers of users are none of it."""

    def made():
        torch.manual_seed(0)
        return convert(nn.Sequential(Named(128, "q"), nn.GELU(), nn.Linear(128, 128)), recipe)

    def train(model, seeds):
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), []
        for seed in seeds:
            optimizer.zero_grad()
            loss = (model(x_of(128, 128, seed)) - x_of(128, 128, seed + 1)).square().mean()
            loss.backward()
            optimizer.step()
            update_scales(model)
            losses.append(loss.item())
        return losses

    model = made()
    train(model, range(3))
    kept, scaling = copy.deepcopy((model.state_dict(), scaling_state(model)))
    expected = train(model, range(3, 6))
    again = torch.compile(made(), backend="eager")._orig_mod
    again[0] = torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper(again[0])
    again[0].load_state_dict({name[2:]: tensor for name, tensor in kept.items() if name.startswith("0.")})
    again[2].load_state_dict({name[2:]: tensor for name, tensor in kept.items() if name.startswith("2.")})
    assert scaling_state(again).keys() == scaling.keys()
    load_scaling_state(again, scaling)
    again[0] = again[0]._checkpoint_wrapped_module
    assert train(again, range(3, 6)) == expected


def test_a_state_of_other_layers_is_refused():
    model = convert(nn.Sequential(nn.Linear(32, 32)), DelayedScaling())
    state = copy.deepcopy(scaling_state(model))
    names, first = sorted(state), next(iter(state))
    assert names == sorted(
        f"0.delayed.{role}.{part}"
        for role, part in itertools.product(
            ("weight", "activation", "gradient"), ("scale", "scale_inv", "amax", "amax_history")
        )
    )
    for given, text in [
        ({}, rf"\(of 0 tensors\) lacks {first} and 11 more; pass the result of scaling_state"),
        ({**state, "1.seed": torch.ones(2)}, r"\(of 13 tensors\) also has 1.seed; pass the result"),
        ({**state, first: torch.ones(3)}, rf"\(of 12 tensors\) has another shape for {first}; pass the result"),
    ]:
        given = {name: tensor + 1 for name, tensor in given.items()}
        with pytest.raises(ValueError, match=f"^load_scaling_state: state {text}"):
            load_scaling_state(model, given)
    assert all(torch.equal(tensor, state[name]) for name, tensor in scaling_state(model).items())
    with pytest.raises(
        TypeError, match=r"^load_scaling_state: state \(None\) is not a dict; pass the result of scaling_state"
    ):
        load_scaling_state(model, None)
    assert scaling_state(nn.Linear(2, 2)) == scaling_state(convert(nn.Linear(32, 32), RECIPE)) == {}
