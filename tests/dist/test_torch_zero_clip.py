"""Clipping under ZeRO: norms do not depend on the sharding, and `.grad` holds placeholders."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qshard.recipes import CurrentScaling
from qshard.torch_bridge import ZeroOptimizer, convert
from qshard.torch_bridge._zero.gradients import norm_over_ranks
from support import torch_ranks
from support.formats import ZEROED as RECIPES
from support.torch_models import Wire
from support.torch_ranks import on_ranks
from support.zero import OPTIONS, every_stage, in_one_process, loss_of, model_of, train, with_zero


@pytest.mark.each_value
@on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bits_of_one_process(dtype):
    """Losses and norms in both stages and for every choice of units; Python's exact sum adds the squares."""
    recipe, dtype = RECIPES["CurrentScaling"], getattr(torch, dtype)
    losses, weights = in_one_process(recipe, 3, dtype, clip=0.1)
    assert min(losses[1::2]) > 0.1, "all steps are clipped"
    for options in ({}, {"shard_weights": True}, {"shard_weights": True, "units": list}):
        own, own_weights = with_zero(recipe, 3, dtype, clip=0.1, **options)
        assert own == losses, options
        for name, weight in weights.items():
            assert torch.equal(own_weights[name], weight.detach()), (options, name)


@on_ranks(3)
@every_stage
def test_micro_batches(stage):
    """Gradients of several backward passes are clipped as one; unclipped gradients are unchanged."""
    recipe, clipped = RECIPES["CurrentScaling"], []
    for max_norm in (math.inf, 1e9, 0.05):
        model = model_of(recipe)
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
        for step in range(2):
            loss_of(model, step, dist.get_rank()).backward()
        with Wire() as wire:
            norm = optimizer.clip_grad_norm_(max_norm)
        assert [count for _, count in wire.of("allreduce")] == [1, 2]
        assert norm > 0.05
        again = optimizer.clip_grad_norm_(math.inf)
        assert again == norm if max_norm > 1 else abs(again - 0.05) < 1e-5
        with Wire() as wire:
            optimizer.step()
        assert not wire.of("alltoall"), "gradients have been reduced"
        clipped.append(optimizer.full_weights())
    others = ZeroOptimizer(model := model_of(recipe), **OPTIONS, shard_weights=stage)
    for step in range(2):
        loss_of(model, step, dist.get_rank()).backward()
    others.step()
    for name, weight in others.full_weights().items():
        assert torch.equal(clipped[0][name], weight)
        assert torch.equal(clipped[1][name], weight)
    assert any(not torch.equal(clipped[2][name], weight) for name, weight in others.full_weights().items())


@on_ranks(2)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_norms(norm_type, scale):
    """At any magnitude, also where squares overflow or underflow float32, and at any shard boundary."""
    device, rank = torch_ranks.device, dist.get_rank()
    whole = torch.randn(1000, generator=torch.Generator().manual_seed(0)).mul(scale).to(device)
    norms = []
    for cut in (0, 1, 333, 999):
        own = [whole[:cut], whole[cut:]][rank]
        norms.append(norm_over_ranks(list(own.split(100)) or [own], norm_type, dist.group.WORLD))
    assert len({norm.item() for norm in norms}) == 1
    want = torch.linalg.vector_norm(whole.double() / scale, norm_type) * scale
    torch.testing.assert_close(norms[0].double(), want, rtol=2e-7, atol=0.0)


@on_ranks(2)
@every_stage
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_norms_that_are_not_finite(bad, stage):
    """One rank has the value; all ranks see it, and raise if requested."""
    model = nn.Linear(4, 4).to(torch_ranks.device)
    optimizer = ZeroOptimizer(model, shard_weights=stage)
    x = torch.ones(1, 4, device=torch_ranks.device)
    x[0, 0] = bad if dist.get_rank() == 1 else 1.0
    model(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"norm \((inf|nan)\) of the gradients is not finite"):
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    norm = optimizer.clip_grad_norm_(1.0)
    assert torch.equal(norm.cpu(), torch.tensor(bad)) or norm.isnan() and math.isnan(bad)
    for wrong in (0, -1.0, "2", True):
        with pytest.raises(ValueError, match=r"norm_type \(.*\) is not a number above 0"):
            optimizer.clip_grad_norm_(1.0, wrong)
    optimizer.zero_grad()
    for wrong, error in ((-1.0, ValueError), (math.nan, ValueError), ("1", TypeError)):
        model(x).sum().backward()  # Gradients were not clipped, so another pass adds to them.
        with pytest.raises(error, match=r"max_norm \(.*\) must be a number of at least 0"):
            optimizer.clip_grad_norm_(wrong)


@on_ranks(2)
@every_stage
def test_gradients_are_not_there(stage):
    """Reading `.grad` raises and changes nothing."""
    model = model_of(RECIPES["CurrentScaling"])
    optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
    loss_of(model, 0, dist.get_rank()).backward()
    parameters = list(model.parameters())
    grad = parameters[0].grad
    assert grad.shape == parameters[0].shape
    assert "GradientPlaceholder(shape=(7, 32)" in repr(grad)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for read in (
        lambda: nn.utils.clip_grad_norm_(parameters, 1.0),
        lambda: nn.utils.clip_grad_value_(parameters, 1.0),
        lambda: nn.utils.get_total_norm([p.grad for p in parameters]),
        lambda: scaler.unscale_(optimizer),
        lambda: grad.norm(),
        lambda: grad * 2,
        lambda: grad.mul_(2),
        lambda: grad.numpy(),
        lambda: grad.__dlpack__(),
        lambda: grad.clone(),
        lambda: torch.save(grad, "/dev/null"),
        lambda: dist.all_reduce(grad),
    ):
        with pytest.raises(RuntimeError, match=r"grad of .* is not available.*\ncall clip_grad_norm_\(max_norm\)"):
            read()
    with pytest.raises(RuntimeError, match=r"ZeroOptimizer: 0.weight .* (is freed|is not available)|grad of 0.weight"):
        torch.optim.AdamW(parameters[:1], weight_decay=0.0).step()
    optimizer.step()
    trained = optimizer.full_weights()
    again = ZeroOptimizer(model := model_of(RECIPES["CurrentScaling"]), **OPTIONS, shard_weights=stage)
    train(model, again, range(1))
    assert all(torch.equal(trained[name], weight) for name, weight in again.full_weights().items())


@on_ranks(2)
@every_stage
def test_zero_grad_of_the_model(stage):
    """To None or to zeros; all parameters or some; with and without clipping."""
    recipe = RECIPES["CurrentScaling"]
    model = model_of(recipe)
    losses = train(model, ZeroOptimizer(model, **OPTIONS, shard_weights=stage), range(3), clip=0.1)
    for to_none in (True, False):
        model = model_of(recipe)
        optimizer = ZeroOptimizer(model, **OPTIONS, shard_weights=stage)
        optimizer.zero_grad = lambda model=model, to_none=to_none: model.zero_grad(to_none)
        assert train(model, optimizer, range(3), clip=0.1) == losses, to_none
    # One part only: its gradients are those of the second pass, the others' of both.
    parts = []
    for clear in (False, True):
        model = convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to(torch_ranks.device), CurrentScaling())
        optimizer = ZeroOptimizer(model, lr=0.1, betas=(0.0, 0.0), shard_weights=stage, units=[model])
        x = torch.ones(1, 8, device=torch_ranks.device)
        model(x).sum().backward()
        if clear:
            model[0].zero_grad()
        norm = optimizer.clip_grad_norm_(math.inf)
        parts.append(norm.item())
        if clear:
            with pytest.raises(RuntimeError, match="are already clipped, so no more can be accumulated; call"):
                model(x).sum().backward()
    assert parts[1] < parts[0]


@on_ranks(2)
@every_stage
def test_gradients_of_users(stage):
    """A gradient that the user assigns to `.grad` is used."""
    model = nn.Linear(2, 2, bias=False).to(torch_ranks.device)
    optimizer = ZeroOptimizer(model, lr=0.5, shard_weights=stage)
    before = optimizer.full_weights()["weight"]
    model.weight.grad = torch.full((2, 2), float(dist.get_rank()), device=torch_ranks.device)
    assert optimizer.clip_grad_norm_(math.inf) == 1.0  # The norm of 4 means of 0.5.
    optimizer.step()
    assert torch.allclose(optimizer.full_weights()["weight"], before - 0.5)
