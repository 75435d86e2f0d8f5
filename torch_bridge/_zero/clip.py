"""Norms of gradients of which each rank has a part, that no cut changes, and the clipping by them.

Floating-point sums depend on their order, so on the cut. So powers are added as integers:

    r = |g| / 2^e, with 2^e > max |g|       r < 1, exact in float64; the maximum is over all ranks
    t = r^p = high 2^-30 + low 2^-60        high, low < 2^30, rounded once, element by element
    norm = 2^e (sum of t)^(1/p)             sums of integers, exact in any order, of up to 2^33 elements

Two reductions of one number and of two numbers, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from qshard.torch_bridge._ops.collectives import max_over_ranks

_CHUNK = 1 << 22  # Elements: the sum of as many integers of 30 bits is exact in float64.
_ONE = 2.0**30


@torch.no_grad()
def norm_over_ranks(parts: Sequence[Tensor], norm_type: float, group: dist.ProcessGroup | None) -> Tensor:
    """The norm of all elements of all ranks, float32 `[]`, the same bits on every rank. Collective.

    Infinite or NaN if an element is.
    """
    device = parts[0].device
    largest = torch.zeros((), dtype=torch.float32, device=device)
    for part in parts:
        if part.numel():
            largest = torch.maximum(largest, part.abs().amax())  # NaN passes through both.
    if group is not None:
        largest = max_over_ranks(largest.view(1), group).view(())
    if norm_type == float("inf"):
        return largest
    finite = largest.isfinite()
    exponent = torch.frexp(torch.where(finite, largest, 0.0))[1].to(torch.int64)
    down, up = _power_of_two(-exponent), _power_of_two(exponent)
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for part in parts:
        for chunk in part.split(_CHUNK) if part.numel() else ():
            ratio = chunk.double().abs_() * down
            powers = (ratio * ratio if norm_type == 2.0 else ratio.pow_(norm_type)).mul_(_ONE)
            high = powers.floor()
            low = powers.sub_(high).mul_(_ONE).round_()
            sums += torch.stack([high.sum(), low.sum()]).nan_to_num_(0.0, 0.0, 0.0).to(torch.int64)
    if group is not None:
        dist.all_reduce(sums, group=group)
    total = (sums[0].double() + sums[1].double() / _ONE) / _ONE
    root = total.sqrt() if norm_type == 2.0 else total ** (1.0 / norm_type)
    return torch.where(finite, (root * up).float(), largest)


def _power_of_two(exponent: Tensor) -> Tensor:
    """By its bits: no library's `pow` is asked."""
    return ((exponent + 1023) << 52).view(torch.float64)


@torch.no_grad()
def clip_by_norm(parts: Sequence[Tensor], norm: Tensor, max_norm: float | Tensor) -> None:
    """As `torch.nn.utils.clip_grads_with_norm_`, in place: by `min(1, max_norm / (norm + 1e-6))`."""
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for part in parts:
        part.mul_(factor)
