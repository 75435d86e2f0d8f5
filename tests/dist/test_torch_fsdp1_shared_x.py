"""FSDP1 around layers that share x: ranks with the same x keep parts of its codes."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn

from qshard.torch_bridge import (
    convert,
    prepare_modules_for_fsdp1,
    scaling_state,
    update_scales,
)
from support import torch_ranks
from support.pairs import turns
from support.torch_models import batch, model_of, resident
from support.torch_ranks import on_ranks
from support.torch_wrapped import ORIG, RECIPES, device, in_fsdp1, sgd, values


class Shared(nn.Module):
    """Layers that take the same x, and one whose x autograd keeps anyway."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(inputs, outputs, bias=False) for _ in range(3))
        self.last = nn.Linear(outputs, inputs, bias=False)

    def forward(self, x):
        return self.last(torch.relu(self.q(x) + self.k(x) + self.v(x)))


@turns(1, recipe=list(RECIPES), world=[3, 2, 1])
@on_ranks()
def test_ranks_with_the_same_x_keep_parts_of_its_codes(recipe):
    """The bits of keeping all, and of x, for three layers, one part of so many."""
    recipe, rows = RECIPES[recipe], 1024
    inputs, outputs = (64, 32) if recipe.weight.scaling.whole_blocks else (35, 21)
    x, made, held = torch.randn(rows, inputs, device=device()), [], []
    for group in (None, dist.group.WORLD):
        torch.manual_seed(0)
        model = convert(Shared(inputs, outputs).to(device()), recipe)
        prepare_modules_for_fsdp1(model, activation_group=group)
        for step in range(2):
            mine = (x + step).requires_grad_()
            moved = mine * 1  # Else nothing but the layers keeps x.
            before = resident() if step else 0
            y = model(moved)
            del moved
            if step:
                held.append(resident() - before)
            made.append([y.detach(), *torch.autograd.grad(y.sum(), [mine, *model.parameters()])])
            update_scales(model)
    assert all(torch.equal(a, b) for i in range(2) for a, b in zip(made[i], made[2 + i], strict=True))
    codes = rows * inputs // recipe.activation.element.codes_per_byte
    saved = held[0] - held[1]
    assert saved == pytest.approx(codes * (1 - 1 / dist.get_world_size()), abs=codes / 20), (held, codes)


@ORIG
@on_ranks((2, 2))
def test_parts_of_codes_beside_shards_of_weights(orig):
    """FSDP1 shards over pairs with other batches; those across have the same."""
    mesh, made = torch_ranks.mesh(), []
    shards, same = mesh["shard"].get_group(), mesh["replicate"].get_group()
    x = batch(mesh["shard"].get_local_rank())
    for group in (None, same):
        model = convert(model_of(bias=True), RECIPES["delayed"])
        model = in_fsdp1(prepare_modules_for_fsdp1(model, activation_group=group), orig, process_group=shards)
        optimizer = sgd(model)
        for _ in range(2):
            mine = x.clone().requires_grad_()
            model(mine).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            update_scales(model)
        made.append([mine.grad, *values(model).values(), *scaling_state(model).values()])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@on_ranks(2, 3)
def test_ranks_with_other_batches_do_not_keep_parts():
    """TransformerEngine cuts activations over the ranks of FSDP1, and gathers parts of other batches."""
    model = prepare_modules_for_fsdp1(convert(model_of(), "CurrentScaling"), activation_group=dist.group.WORLD)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^Linear: rank 1 has another x \(codes of .* tensor-paral"):
            model(batch(dist.get_rank()))
    with torch.no_grad():
        model(batch(dist.get_rank()))
    model(batch()).sum().backward()
    copy.deepcopy(model)(batch()).sum().backward()
    assert pickle.loads(pickle.dumps(model))[0].activation_group is None
