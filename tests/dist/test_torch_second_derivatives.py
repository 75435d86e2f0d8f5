"""Sharded models: second derivatives raise on every rank, and writes that PyTorch does not see make no codes stale."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from qshard.torch_bridge import SwiGLU, ZeroOptimizer, convert
from qshard.torch_bridge.tensor_parallel import ColwiseParallel, RowwiseParallel
from support import torch_ranks
from support.torch_parallel import mesh_of
from support.torch_ranks import on_ranks

WIDTH = 256


class Block(nn.Module):
    """Without PyTorch's own norm: FSDP2 frees its weight, and its second derivative would read that memory."""

    def __init__(self, norm):
        super().__init__()
        self.norm, self.act = nn.RMSNorm(WIDTH) if norm else nn.Identity(), SwiGLU()
        self.gate, self.up, self.down = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        h = self.norm(x)
        return self.down(self.act(self.gate(h), self.up(h)))


def block(recipe, fuse=False, **options):
    torch.manual_seed(0)
    return convert(Block(norm=fuse).to(torch_ranks.device), recipe, fuse=fuse, **options)


def fsdp2(recipe, **options):
    return fully_shard(block(recipe, **options), mesh=mesh_of("data"))


def tensor_parallel(recipe):
    styles = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    return parallelize_module(block(recipe), mesh_of("tp"), styles)


def zero(shard_weights):
    def make(recipe):
        model = block(recipe)
        model.optimizer = ZeroOptimizer(model, shard_weights=shard_weights)
        return model

    return make


MODELS = {
    "FSDP2": fsdp2,
    "FSDP2, fused": lambda recipe: fsdp2(recipe, fuse=True),
    "FSDP2, primary": lambda recipe: fsdp2(recipe, primary=True),
    "tensor parallel": tensor_parallel,
    "ZeRO-2": zero(shard_weights=False),
    "ZeRO-3": zero(shard_weights=True),
    "unsharded": block,
}
every_model = pytest.mark.parametrize("kind", MODELS)


def batch(seed, rows=64):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).to(torch_ranks.device)


@on_ranks(2)
@every_model
def test_a_gradient_penalty_raises_on_all_ranks(kind):
    model, x = MODELS[kind]("CurrentScaling"), batch(0).requires_grad_()

    def differentiate_penalty():
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)  # DTensors before torch 2.13 raise here.
        assert grad.requires_grad
        grad.square().sum().backward()

    with pytest.raises(NotImplementedError, match=r"^(linear|swiglu|rms_norm): second derivatives"):
        differentiate_penalty()
    dist.barrier()


@on_ranks(2)
@every_model
def test_a_batch_that_numpy_writes_is_quantized_anew(kind):
    """The same memory for all batches, and two models one after the other."""
    models, x = [MODELS[kind]("CurrentScaling") for _ in range(2)], batch(0)
    with torch.no_grad():
        for model in models:
            for seed in range(3):
                x.numpy()[:] = batch(seed).numpy()
                got = model(x).clone()
                assert torch.equal(got, model(batch(seed))), seed
