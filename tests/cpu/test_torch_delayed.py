"""Delayed scaling in PyTorch: state in buffers, checkpoints and copies. Casts and updates are in test_delayed.py."""

import copy

import pytest
import torch
from torch import nn

from qshard.recipes import MXFP8, CurrentScaling, DelayedScaling
from qshard.torch_bridge import DelayedScale, convert, linear, update_scales
from support.fronts import TorchFront

FRONT = TorchFront("cpu")
RECIPE = DelayedScaling(history=3)
STATE = ("scale", "scale_inv", "amax", "amax_history")


def model(recipe=RECIPE):
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), recipe)


def states(module):
    return [m for m in module.modules() if isinstance(m, DelayedScale)]


def step(module, optimizer, seed):
    optimizer.zero_grad()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    loss = (module(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    update_scales(module)
    return loss.item()


def test_a_checkpoint_resumes_with_the_same_bits():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for seed in range(4):
        step(module, optimizer, seed)
    saved = copy.deepcopy(module.state_dict())
    assert {key.split(".")[-1] for key in saved if "delayed" in key} == set(STATE)
    other = model()
    other.load_state_dict(saved)
    for a, b in zip(states(module), states(other), strict=True):
        assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in STATE)
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    assert [step(module, optimizer, s) for s in (5, 6)] == [step(other, other_optimizer, s) for s in (5, 6)]


@pytest.mark.parametrize("recipe", [CurrentScaling(), MXFP8()], ids=lambda r: type(r).__name__)
def test_checkpoints_of_other_recipes(recipe):
    saved = model().state_dict()
    other = model(recipe)
    other.load_state_dict(saved)
    back = model()
    back.load_state_dict(other.state_dict())
    assert all(state.scale == 1 for state in states(back))


def test_moving_a_model_leaves_the_state_in_fp32():
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    step(module, optimizer, 0)
    before = [getattr(state, name).clone() for state in states(module) for name in STATE]
    module.to(torch.bfloat16)
    after = [getattr(state, name) for state in states(module) for name in STATE]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(before, after, strict=True))
    made = module.to("meta").to_empty(device="cpu")
    assert all(state.scale == 1 and not state.amax_history.any() for state in states(made))


def test_copies_and_tied_weights():
    module = model()
    module.add_module("again", nn.Linear(64, 32))
    module.again.weight = module[2].weight
    convert(module, RECIPE)
    assert module.again.delayed["weight"] is module[2].delayed["weight"]
    assert len(states(module)) == 8
    other = copy.deepcopy(module)
    assert other.again.delayed["weight"] is other[2].delayed["weight"] is other[2].weight.scale_state.delayed
    other[2].delayed["weight"].scale.fill_(3)
    assert module[2].delayed["weight"].scale == 1
    convert(module, CurrentScaling())
    assert not states(module)


@pytest.mark.filterwarnings("ignore:.* should not be instantiated:DeprecationWarning")
def test_compiled_steps_give_the_same_bits():
    torch._dynamo.reset()
    eager, compiled = model(), model()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for seed in range(3):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
        for module, call in ((eager, eager), (compiled, run)):
            module.zero_grad()
            call(x).square().mean().backward()
            update_scales(module)
    for a, b in zip([*states(eager), *eager.parameters()], [*states(compiled), *compiled.parameters()], strict=True):
        if isinstance(a, DelayedScale):
            assert all(torch.equal(getattr(a, name), getattr(b, name)) for name in STATE)
        else:
            assert torch.equal(a.grad, b.grad)


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"linear: DelayedScaling needs the state of each tensor"):
        linear(torch.ones(2, 4), torch.ones(3, 4), None, RECIPE)
