"""Delayed scaling in PyTorch on one device: who must call `update_scales`, and what the first step is."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from qshard.recipes import CurrentScaling, DelayedScaling
from qshard.torch_bridge import convert, load_scaling_state, scaling_state, update_scales

SECOND_STEP = r"DelayedScaling: the scales of 0\.weight were not updated after the last optimizer"


def model_of(layers=2, recipe=None, size=16):
    torch.manual_seed(0)
    return convert(
        nn.Sequential(*(nn.Linear(size, size, bias=False) for _ in range(layers))), recipe or DelayedScaling()
    )


def backward(model):
    model(torch.ones(4, 16)).square().mean().backward()


def train_step(model, *optimizers):
    backward(model)
    for optimizer in optimizers:
        optimizer.step()


def test_a_second_step_without_an_update_raises():
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        train_step(model, optimizer)
        update_scales(model)
    train_step(model, optimizer)
    before = model[0].weight.detach().clone()
    with pytest.raises(RuntimeError, match=SECOND_STEP):
        optimizer.step()
    assert torch.equal(model[0].weight.detach(), before)


def closures(model):
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)

    def closure():
        optimizer.zero_grad()
        backward(model)
        return torch.zeros(())

    optimizer.step(closure)
    update_scales(model)
    optimizer.step(closure)


def two_optimizers(model):
    train_step(model, *(torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model))


class Container(torch.optim.Optimizer):
    """Steps others, as torchtitan's does, with the same parameters."""

    def __init__(self, model):
        super().__init__(model.parameters(), {"lr": 0.1})
        self.inner = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]

    def step(self, closure=None):
        for optimizer in self.inner:
            optimizer.step()


def containers(model):
    """Update scales in a post-step hook of a container of optimizers."""
    optimizer = Container(model)
    optimizer.register_step_post_hook(lambda *_: update_scales(model))
    for _ in range(2):
        backward(model)
        optimizer.step()


def test_containers_are_told_too():
    model = model_of()
    optimizer = Container(model)
    backward(model)
    optimizer.step()
    with pytest.raises(RuntimeError, match=SECOND_STEP):
        optimizer.step()
    with pytest.raises(RuntimeError, match=SECOND_STEP):
        optimizer.inner[0].step()
    update_scales(model)
    optimizer.step()


def frozen_weights(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(4, 16))
        optimizer.step()


def states_for_a_checkpoint(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    get_optimizer_state_dict(model, optimizer)  # Steps with a rate of 0.
    train_step(model, optimizer)


def compiled(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    for _ in range(2):
        backward(model)
        step()


@pytest.mark.parametrize(
    "use", [closures, two_optimizers, containers, frozen_weights, states_for_a_checkpoint, compiled]
)
def test_what_needs_no_update(use):
    use(model_of())


def test_gradients_of_a_deep_model_are_there_at_once():
    """With an initial scale of 1 they would round to 0 in E5M2, and reach only one more layer each step."""
    models = [model_of(6, recipe) for recipe in (DelayedScaling(), CurrentScaling())]
    for model in models:
        (1e-4 * model(torch.ones(4, 16)).square().mean()).backward()
    for got, want in zip(*(model.parameters() for model in models), strict=True):
        assert want.grad.abs().max() > 0
        assert torch.equal(got.grad, want.grad)


def test_states_stay_new_or_go_on_through_a_checkpoint():
    model = model_of()
    fresh = copy.deepcopy(scaling_state(model))
    assert all(value == 0 for name, value in fresh.items() if name.endswith("scale"))
    backward(model)
    update_scales(model)
    other = model_of()
    load_scaling_state(other, scaling_state(model))
    assert other[0].delayed["weight"].scale == model[0].delayed["weight"].scale > 0
    load_scaling_state(other, fresh)
    x = 1e-3 * torch.randn(4, 16)
    assert torch.equal(other(x), model_of()(x))
