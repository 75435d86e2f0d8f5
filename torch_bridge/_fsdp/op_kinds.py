"""Kinds of ATen ops: which ones write, return views, keep a weight sharded, or read no values of it."""

from __future__ import annotations

import functools
from typing import Any

import torch

aten = torch.ops.aten

STAYS_SHARDED = {
    aten.new_zeros.default,
    aten.new_empty.default,
    aten.empty_like.default,
    aten._to_copy.default,
    aten._pin_memory.default,
    aten.where.self,  # `trunc_normal_` fills its result again.
}
"""Ops that return a sharded weight, besides views: FSDP2 pads and moves with them, `to_empty` and `.to` call them.

All other ops return plain tensors.
"""

MAKES_PLAIN = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
}
"""Ops that read no values, so that they run on a sealed weight. They create gradients and optimizer states."""


@functools.cache
def is_mutable(func: Any) -> bool:
    """Return True if the op writes to an argument."""
    return bool(func._schema.is_mutable)


@functools.cache
def is_view(func: Any) -> bool:
    """Return True if a result aliases an argument, so that writes to it are writes to the weight."""
    return any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
