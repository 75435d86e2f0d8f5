"""Layers and models under tensor parallelism, their quantized operands, and the local shards of a rank."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from qshard.recipes import Role
from qshard.torch_bridge import convert, tensor_parallel
from qshard.torch_bridge._nn.operands import LayerQuantizer
from qshard.torch_bridge._quantized.target_gpu import multiply_for, target_of
from support import torch_ranks
from support.observe import calls_of


def mesh_of(*names, shape=None):
    """Return a mesh of all ranks of the case, in the case's shape unless `shape` is given."""
    _clear_sharding_prop_cache()  # It caches meshes of earlier process groups.
    return init_device_mesh(torch_ranks.device, shape or torch_ranks.shape, mesh_dim_names=names)


def unit_of(recipe):
    """Return the row alignment at which shards split no blocks of any role."""
    return 128 if any(recipe.format(role).block and 128 in recipe.format(role).block for role in Role) else 32


@contextlib.contextmanager
def quantized():
    """Record the planes that layers quantize, by role. Layers run op by op, also on GPUs."""
    found, target = {}, target_of(torch.ones((), device=torch_ranks.device).device)

    def record(call):
        planes = {usage: operand.parts for usage, operand in call.result[0].items()}
        found.setdefault(call.arguments["role"], {}).update(planes)

    with contextlib.ExitStack() as stack:
        if target is not None:
            stack.enter_context(multiply_for(target._replace(large=0)))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(calls_of(LayerQuantizer.quantize, record))
        yield found


def assert_part(local, whole, rank, world, cut):
    """Assert that `local` has the bits of the shard of `whole` on `rank`: replicated, or an even part of an axis."""
    assert set(local) == set(whole)
    for usage, plane in local.items():
        for mine, expected in zip(plane, whole[usage], strict=True):
            if mine is None:
                assert expected is None
                continue
            if mine.shape == expected.shape:
                assert not cut or mine.ndim == 0
            else:
                (axis,) = [i for i in range(mine.ndim) if mine.shape[i] != expected.shape[i]]
                size = mine.shape[axis]
                assert cut
                assert size * world == expected.shape[axis]
                expected = expected.narrow(axis, rank * size, size)
            assert torch.equal(*(t.contiguous().view(-1).view(torch.uint8) for t in (mine, expected)))


class Attention(nn.Module):
    def __init__(self, width, head):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.head = head

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention, self.mlp = Attention(width, width // 4), MLP(width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(width, width), nn.Sequential(Block(width), Block(width))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, width)

    def forward(self, tokens, targets):
        logits = self.head(self.norm(self.blocks(self.embedding(tokens))))
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def llama(recipe, seed=0):
    torch.manual_seed(seed)
    return convert(Llama(2 * unit_of(recipe)), recipe).to(torch_ranks.device)


def parallelized(model, tp, overlap=None):
    """Parallelize a model as torchtitan does, with sequence sharding between layers.

    If `overlap` is not None, use qshard's styles, which send codes; it says whether communication overlaps GEMMs.
    """
    colwise, rowwise, desired = ColwiseParallel(), RowwiseParallel(output_layouts=Shard(1)), Replicate()
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    if overlap is not None:
        cut: Any = {"input_layouts": Shard(1), "overlap": overlap}
        colwise, desired = tensor_parallel.ColwiseParallel(**cut), Shard(1)
        rowwise = tensor_parallel.RowwiseParallel(output_layouts=Shard(1), overlap=overlap)
        head = tensor_parallel.ColwiseParallel(output_layouts=Replicate(), **cut)
    into = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=desired)
    for block in model.blocks:
        plan = {
            "norm1": SequenceParallel(),
            "attention": into,
            **{f"attention.{name}": colwise for name in "qkv"},
            "attention.o": rowwise,
            "norm2": SequenceParallel(),
            "mlp": into,
            "mlp.gate": colwise,
            "mlp.up": colwise,
            "mlp.down": RowwiseParallel(output_layouts=Replicate(), use_local_output=False),
        }
        if overlap is not None:
            plan["mlp.down"] = rowwise
        parallelize_module(block, tp, plan)
        if overlap is None:  # Takes the whole tensor and shards it again.
            out = PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1))
            parallelize_module(block.mlp, tp, out)
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": head,
    }
    return parallelize_module(model, tp, plan)
