"""Delayed scaling in PyTorch: state in buffers, noted in forward and backward, and one update for a whole model."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from qshard import reference
from qshard.recipes import MXFP8, CurrentScaling, DelayedScaling, Role
from qshard.torch_bridge import DelayedScale, Linear, convert, linear, update_delayed, update_scales
from support.fronts import TorchFront

FRONT = TorchFront("cpu")
RECIPE = DelayedScaling(history=3)
STATE = ("scale", "scale_inv", "amax", "amax_history")


def model(recipe=RECIPE):
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), recipe)


def states(module):
    return [m for m in module.modules() if isinstance(m, DelayedScale)]


def test_the_update_is_the_reference():
    """Of all tensors at once, in two formats; one without an amax, with a NaN, an infinity, or the least of numbers."""
    recipe = DelayedScaling(history=3, margin=1)
    module = nn.ModuleList([DelayedScale(recipe, role) for role in Role for _ in range(4)])
    roles = [role for role in Role for _ in range(4)]
    expected = [(np.float32(1), np.zeros(3, np.float32)) for _ in module]
    rng = np.random.default_rng(0)
    for step in range(6):
        amaxes = rng.choice(np.array([0, 0.5, 3, 1e-45, 3e38, np.inf, np.nan, 7], np.float32), len(module))
        for state, amax in zip(module, amaxes, strict=True):
            state.observe(torch.tensor(amax))
        update_delayed(module)
        for i, (state, role) in enumerate(zip(module, roles, strict=True)):
            expected[i] = reference.delayed_scale_update(*expected[i], amaxes[i], recipe.format(role).element, margin=1)
            got = [FRONT.numpy(state.scale), FRONT.numpy(state.amax_history)]
            for a, b in zip(got, expected[i], strict=True):
                assert a.tobytes() == np.asarray(b).tobytes(), f"step {step}, tensor {i}"
            assert state.scale_inv == 1 / state.scale
            assert state.amax == 0


def test_linear_uses_the_scales_it_has_and_notes_amaxes():
    """Those of microbatches are merged by a maximum, whatever their order."""
    layer = Linear(16, 48, False, RECIPE)
    values = {Role.WEIGHT: 500.0, Role.ACTIVATION: 32.0, Role.GRADIENT: 0.5}
    for role, value in values.items():
        layer.delayed[role.value].scale.fill_(value)
        layer.delayed[role.value].scale_inv.fill_(1 / value)
    for micro, factor in enumerate((1.0, 4.0, 2.0)):
        x, dy = torch.randn(5, 16) * factor, torch.randn(5, 48)
        tx = x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(tx)
        y.backward(dy)
        tensors = {Role.WEIGHT: layer.weight.shard.detach(), Role.ACTIVATION: x, Role.GRADIENT: dy}
        q = {
            role: reference.quantize(t.numpy(), RECIPE.format(role), scale=np.float32(values[role])).dequantize()
            for role, t in tensors.items()
        }
        x_q, w_q, dy_q = q[Role.ACTIVATION], q[Role.WEIGHT], q[Role.GRADIENT]
        for got, want in ((y, x_q @ w_q.T), (tx.grad, dy_q @ w_q), (layer.weight.grad, dy_q.T @ x_q)):
            np.testing.assert_allclose(got.detach().numpy(), want, rtol=1e-5, atol=1e-5)
        if micro == 0:
            largest = dict.fromkeys(Role, torch.zeros(()))
        largest = {role: torch.maximum(largest[role], t.abs().max()) for role, t in tensors.items()}
    for role in Role:
        assert layer.delayed[role.value].amax == largest[role]


def step(module, optimizer, seed):
    optimizer.zero_grad()
    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(seed))
    loss = (module(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    update_scales(module)
    return loss.item()


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_it_learns(algorithm):
    module = model(DelayedScaling(history=2, algorithm=algorithm))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = [step(module, optimizer, 0) for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


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
    with pytest.raises(ValueError, match=r"linear: delayed .None. is not what DelayedScaling needs; use Linear"):
        linear(torch.ones(2, 4), torch.ones(3, 4), None, RECIPE)
