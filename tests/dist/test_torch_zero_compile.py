"""ZeRO with `torch.compile`: hooks stay out of compiled code, and bits are those of eager."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._dynamo.utils import counters

from qshard.torch_bridge import ZeroOptimizer
from support.formats import ZEROED as RECIPES
from support.torch_ranks import on_ranks
from support.zero import OPTIONS, model_of, train


def begin():
    torch._dynamo.reset()
    counters.clear()
    # What dynamo of torch 2.13 does against torch 2.13's own advice.
    warnings.filterwarnings("ignore", ".* should not be instantiated", DeprecationWarning)
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf", UserWarning)


def compiled(model, way, backend="aot_eager"):
    """Units before they are units, what is in them, both without a break; by `Module.compile`; or the whole model."""
    if way == "units":
        for i in (1, 2):
            model[i] = torch.compile(model[i], backend=backend, fullgraph=True)
    elif way == "in place":
        for block in model[1:3]:
            block.compile(backend=backend)
    elif way == "layers":
        for block in model[1:3]:
            block.up = torch.compile(block.up, backend=backend, fullgraph=True)
    return model


def case(way, stage=True, recipe="CurrentScaling", marks=()):
    return pytest.param(way, stage, recipe, marks=marks, id=f"{way}-{stage}-{recipe}")


SLOW = [("layers", True), ("units", True), ("in place", True), ("model", True), ("model", False)]
CASES = [
    case("units", recipe="NVFP4"),
    *(case(*one, marks=pytest.mark.slow) for one in SLOW),
]


@on_ranks(2)
@pytest.mark.parametrize(("way", "stage", "recipe"), CASES)
def test_bits_of_eager(way, stage, recipe):
    begin()
    losses = []
    for compile in (False, True):
        model = model_of(RECIPES[recipe])
        model = compiled(model, way) if compile else model
        units = list(model) if way in ("units", "in place") else None
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage, units=units)
        whole = torch.compile(model, backend="aot_eager") if compile and way == "model" else model
        losses.append(train(whole, optimizer, range(3)))
        names = set(optimizer.full_weights())
    assert losses[1] == losses[0]
    assert counters["stats"]["unique_graphs"] >= 1, "something was compiled"
    assert counters["stats"]["unique_graphs"] <= 12, "and not anew in each step"
    assert "1.up.weight" in {name.replace("_orig_mod.", "") for name in names}
