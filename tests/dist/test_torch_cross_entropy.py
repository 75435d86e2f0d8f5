"""Cross entropy over equal class shards: the loss and the gradients of whole logits."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import qshard.torch_bridge as qt
from support.pairs import pairs
from support.torch_ranks import on_ranks

RULE = {"label_smoothing": 0.1, "z_loss": 1e-2}


@pairs(world=[1, 2, 3], reduction=["mean", "sum", "none"], dtype=["float32", "bfloat16"])
@on_ranks()
def test_classes_of_ranks(dtype, reduction):
    """One gather of 16 bytes a row; sums have another order, so the last bits may differ."""
    world, rank, columns = dist.get_world_size(), dist.get_rank(), 1030
    torch.manual_seed(0)
    logits = (3 * torch.randn(2, 3, world * columns)).to(getattr(torch, dtype))
    labels = torch.randint(world * columns, (2, 3))
    labels[0, 0], labels[1, 2] = -100, world * columns - 1
    given = {"reduction": reduction, **RULE}
    whole = logits.clone().requires_grad_()
    want = qt.cross_entropy(whole, labels, **given)
    grad = torch.full(want.shape, 0.25)
    want.backward(grad)
    part = logits[..., rank * columns : (rank + 1) * columns].clone().requires_grad_()
    loss = qt.cross_entropy(part, labels, group=dist.group.WORLD, **given)
    loss.backward(grad)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    mine = whole.grad[..., rank * columns : (rank + 1) * columns]
    torch.testing.assert_close(part.grad, mine, rtol=1e-2 if dtype == "bfloat16" else 1e-5, atol=1e-7)


@on_ranks(2)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_a_head_whose_classes_are_cut(reduction):
    world, rank, columns = dist.get_world_size(), dist.get_rank(), 40
    torch.manual_seed(0)
    x, w = torch.randn(7, 16), torch.randn(world * columns, 16) / 4
    labels = torch.randint(world * columns, (7,))
    leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
    want = qt.linear_cross_entropy(*leaves, labels, reduction=reduction, **RULE)
    of_x, of_w = torch.autograd.grad(want.sum(), leaves)
    own = [x.clone().requires_grad_(), w[rank * columns : (rank + 1) * columns].clone().requires_grad_()]
    given = {"reduction": reduction, "chunk": 3, "group": dist.group.WORLD, **RULE}
    loss = qt.linear_cross_entropy(*own, labels, **given)
    mine = torch.autograd.grad(loss.sum(), own)
    torch.testing.assert_close(loss, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mine[0], of_x, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(mine[1], of_w[rank * columns : (rank + 1) * columns], rtol=1e-4, atol=1e-6)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), qt.LinearCrossEntropy(64, 256, chunk=16)

    def forward(self, x, labels):
        return self.head(self.body(x).relu(), labels)


@on_ranks(2)
@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("recipe", [None, "CurrentScaling", "MXFP8"])
def test_a_head_that_fsdp2_gathers(recipe, primary):
    """All ranks have one batch, so averaged gradients are those of one rank; codes are those of the whole weight."""
    if primary and recipe is None:
        return
    torch.manual_seed(0)
    model, x, labels = Classifier(), torch.randn(40, 64), torch.randint(256, (40,))
    alone = Classifier()
    alone.load_state_dict(model.state_dict())
    if recipe is not None:
        qt.convert(alone, recipe)
        qt.convert(model, recipe, primary=primary)
    fully_shard(model)
    want, loss = alone(x, labels), model(x, labels)
    assert torch.equal(loss, want)
    if primary:
        loss.backward()
        return
    want.backward()
    loss.backward()
    for mine, other in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(mine.grad.full_tensor(), other.grad)


@on_ranks(2)
@pytest.mark.parametrize("shard_weights", [False, True])
@pytest.mark.parametrize("recipe", [None, "MXFP8"])
def test_a_head_that_zero_has(recipe, shard_weights):
    """As above, with a step: the next loss is that of Adam on one rank, up to rounding."""
    torch.manual_seed(0)
    model, x, labels = Classifier(), torch.randn(40, 64), torch.randint(256, (40,))
    alone = Classifier()
    alone.load_state_dict(model.state_dict())
    if recipe is not None:
        qt.convert(alone, recipe)
        qt.convert(model, recipe)
    optimizers = qt.ZeroOptimizer(model, shard_weights=shard_weights), qt.AdamW(alone.parameters())
    losses = []
    for each, optimizer in zip((model, alone), optimizers, strict=True):
        for group in optimizer.param_groups:
            group.update(lr=1e-3, weight_decay=0.0)
        loss = each(x, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item(), each(x, labels).item()])
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] == pytest.approx(losses[1][1], rel=1e-3)
    assert losses[0][1] < losses[0][0]
