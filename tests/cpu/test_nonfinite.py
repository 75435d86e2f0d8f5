"""Infinities and NaNs in `linear` and in a training step. Single ops are in test_nonfinite_ops.py."""

import copy
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from torch import nn

import qshard.jax as qj
from qshard.formats import FP8_E4M3, Format
from qshard.recipes import CurrentScaling, Role
from qshard.torch_bridge import convert
from support.awkward import BFLOAT16
from support.formats import RECIPES
from support.products import operands

ROWS, K, N = 32, 64, 96


def products(front, recipe, x, w, dy):
    """y, dx and dw; under delayed scaling of a second step, with scales of a first whose numbers were finite."""
    if not recipe.stateful:
        return front.linear(x, w, dy, recipe, seed=1)
    states = {role: (1.0, np.zeros(recipe.state_shapes["amax_history"])) for role in Role}
    finite = tuple(np.nan_to_num(a.astype(np.float32), nan=1, posinf=1, neginf=1).astype(a.dtype) for a in (x, w, dy))
    _, _, states = front.delayed_step([finite], recipe, states)
    made, _, _ = front.delayed_step([(x, w, dy)], recipe, states)
    return made[0]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_one_bad_number_reaches_all_that_depends_on_it(front, recipe):
    """In a block with others. What does not depend on it is finite."""
    for bad, place in itertools.product((np.inf, -np.inf, np.nan), range(3)):
        x, w, dy = operands((ROWS, K), N, BFLOAT16)
        (x, w, dy)[place][3, 5] = bad
        y, dx, dw = (~np.isfinite(a.astype(np.float32)) for a in products(front, recipe, x, w, dy))
        shown, hidden = [
            ([y[3, :], dw[:, 5]], dx),
            ([y[:, 3], dx[:, 5]], dw),
            ([dx[3, :], dw[5, :]], y),
        ][place]
        assert all(part.all() for part in shown), "xwd"[place]
        assert not hidden.any(), "xwd"[place]


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_recipes_for_training_show(recipe):
    assert {recipe.format(role).nonfinite for role in Role} == {"nan"}
    described = recipe.format(Role.WEIGHT)
    assert str(described).endswith("nonfinite=nan]")
    assert Format.of(described.description) == described


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match=r"nonfinite \('inf'\) must be 'saturate' or 'nan'"):
        FP8_E4M3.with_options(nonfinite="inf")


# --- what looks for it in training ---


def test_grad_scaler_skips_the_step():
    """A loss scale of 2^127 overflows the gradient of y. Without quantizing, PyTorch skips as well."""
    model = convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), CurrentScaling())
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for skips in (True, False):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 32)).sum() * 4
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(new_scale=1.0)
        changed = any(not torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
        assert changed != skips


def test_apply_if_finite_skips_the_step():
    optimizer = optax.apply_if_finite(optax.sgd(1.0), max_consecutive_errors=3)
    w = jnp.ones((32, 32))
    state = optimizer.init(w)
    for dy, skips in [(jnp.inf, True), (1.0, False)]:
        _, vjp = jax.vjp(lambda w: qj.linear(jnp.ones((4, 32)), w, CurrentScaling()), w)
        grad = vjp(jnp.ones((4, 32)).at[1, 2].set(dy))[0]
        updates, state = optimizer.update(grad, state, w)
        assert bool((updates == 0).all()) == skips
        assert int(state.notfinite_count) == skips
