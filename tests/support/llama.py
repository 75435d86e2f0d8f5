"""A standard Llama 3 block, and an exact count of the bytes that a run allocates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

HEADS = 4


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        heads = [layer(x).view(*x.shape[:-1], HEADS, -1) for layer in (self.wq, self.wk, self.wv)]
        q, k, v = (t.transpose(1, 2) for t in (rotary(heads[0], turns), rotary(heads[1], turns), heads[2]))
        del heads
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(x.shape))


class FeedForward(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.w1, self.w3 = (nn.Linear(width, 4 * width, bias=False) for _ in range(2))
        self.w2 = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attention, self.attention_norm = Attention(width), nn.RMSNorm(width)
        self.feed_forward, self.ffn_norm = FeedForward(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


class Llama(nn.Module):
    """Blocks alone."""

    def __init__(self, width: int, blocks: int):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor, turns: Tensor, recompute: bool = False) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, turns, use_reentrant=False) if recompute else block(x, turns)
        return x


def rotary(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[:, None]).flatten(3).type_as(x)


def turns_of(length: int, width: int, device: Any = None) -> Tensor:
    """Of one head."""
    size = width // HEADS
    angles = torch.outer(torch.arange(length), 10000.0 ** -(torch.arange(0, size, 2) / size))
    return torch.polar(torch.ones_like(angles), angles).to(device)


class Held(TorchDispatchMode):
    """Counts the bytes that ops allocate in this mode: the current total and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self.ops: list[str] = []
        self._memory: dict[int, tuple[StorageWeakRef, int]] = {}

    def now(self) -> int:
        self._memory = {key: held for key, held in self._memory.items() if not held[0].expired()}
        return sum(size for _, size in self._memory.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            t.untyped_storage()._cdata for t in pytree.tree_leaves((args, kwargs)) if type(t) in (Tensor, nn.Parameter)
        }
        out = func(*args, **(kwargs or {}))
        for t in pytree.tree_leaves(out):
            if type(t) is Tensor:
                memory = t.untyped_storage()
                if memory._cdata not in given:  # Not that of a parameter: it was there before.
                    self._memory[memory._cdata] = (StorageWeakRef(memory), memory.nbytes())
                del memory
        self.ops.append(str(func))
        self.most = max(self.most, self.now())
        return out
