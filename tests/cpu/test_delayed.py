"""Delayed scaling of both front ends: casts with scales of earlier steps, merged amaxes, and the update."""

import dataclasses

import numpy as np
import pytest

from qshard import reference
from qshard.recipes import Role
from support.awkward import assert_bits_equal
from support.formats import STATEFUL
from support.products import assert_is_product, operands

every_recipe = pytest.mark.parametrize("recipe", STATEFUL.values(), ids=STATEFUL.keys())


def fresh(recipe):
    return {role: (np.float32(0), np.zeros(recipe.state_shapes["amax_history"], np.float32)) for role in Role}


def assert_updated(after, before, amaxes, recipe):
    for role in Role:
        scale, history = reference.delayed_scale_update(
            *before[role],
            amaxes[role],
            recipe.format(role).element,
            margin=recipe.margin,
            algorithm=recipe.algorithm,
        )
        assert_bits_equal(after[role][0], scale, f"scale of {role}")
        assert_bits_equal(after[role][1], history, f"history of {role}")


SCALES = {Role.WEIGHT: 500.0, Role.ACTIVATION: 7.3, Role.GRADIENT: 0.77}


@pytest.mark.each_value
@every_recipe
@pytest.mark.parametrize("scales", [SCALES, dict.fromkeys(Role, 0.0)], ids=["given", "first"])
@pytest.mark.parametrize("margin", [0, 3])
def test_a_step_over_microbatches(front, recipe, scales, margin):
    """Operands are cast with their current scales, or, in a first step, each with the scale of its own amax.

    Amaxes are merged by a maximum, in any order.
    """
    recipe = dataclasses.replace(recipe, margin=margin)
    states = {role: (np.float32(scale), fresh(recipe)[role][1]) for role, scale in scales.items()}
    x, w, dy = operands((5, 16), 48)
    batches = [(np.float32(factor) * x, w, dy / np.float32(factor)) for factor in (1, 4, 0.5)]
    products, amaxes, after = front.delayed_step(batches, recipe, states)

    def scale_of(a, role):
        return reference.delayed_scale(scales[role], reference.amax(a), recipe.format(role).element, margin=margin)

    for batch, (y, dx, dw) in zip(batches, products, strict=True):
        xq, wq, dyq = (
            reference.quantize(a, recipe.format(role), scale=scale_of(a, role)).dequantize().astype(np.float64)
            for a, role in zip(batch, (Role.ACTIVATION, Role.WEIGHT, Role.GRADIENT), strict=True)
        )
        for got, a, b in ((y, xq, wq), (dx, dyq, wq.T), (dw, dyq.T, xq.T)):
            assert_is_product(got, a, b, front.result_roundings, front.operand_rounding(recipe))
    for role, tensors in zip((Role.ACTIVATION, Role.WEIGHT, Role.GRADIENT), zip(*batches, strict=True), strict=True):
        assert_bits_equal(amaxes[role], reference.amax(np.stack(tensors)), str(role))
    assert_updated(after, states, amaxes, recipe)


@every_recipe
@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_updates(front, recipe, algorithm):
    """One-element tensors give any amax: zero, the smallest, the largest, infinity and NaN."""
    recipe = dataclasses.replace(recipe, history=3, margin=1, algorithm=algorithm)
    states, rng = fresh(recipe), np.random.default_rng(0)
    for _ in range(10):
        one = rng.choice(np.array([0, 0.5, 3, 1e-45, 3e38, np.inf, np.nan, 7], np.float32), (3, 1, 1))
        _, amaxes, after = front.delayed_step([tuple(one)], recipe, states)
        for role, value in zip((Role.ACTIVATION, Role.WEIGHT, Role.GRADIENT), one, strict=True):
            assert_bits_equal(amaxes[role], reference.amax(value), str(role))
        assert_updated(after, states, amaxes, recipe)
        states = after


@every_recipe
def test_a_tensor_of_zeros_changes_nothing(front, recipe):
    states = {role: (np.float32(3), history) for role, (_, history) in fresh(recipe).items()}
    _, _, after = front.delayed_step([tuple(np.zeros((3, 2, 2), np.float32))], recipe, states)
    for role in Role:
        for got, want in zip(after[role], states[role], strict=True):
            assert_bits_equal(got, want)
