"""uint64 operands of ops: int32 tensors with two words each, low word first."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qshard._core.validation import quote, uint32_pair
from qshard.torch_bridge._ops.eager import is_capturing, may_skip_dispatcher

_WORDS = (torch.int32, torch.uint32)


def as_uint64(op: str, name: str, numbers: Any, device: torch.device, count: int | None = None) -> Tensor:
    """Convert one number to `[2]`, or `count` numbers to `[count, 2]`.

    `numbers` is an int, or a list of ints with `count`; or a tensor of words, int32 or uint32; with `count` also int64
    `[count]`. Tensors are not moved to `device`. Errors name the caller `op` and its argument `name`.

    A CUDA graph can capture the call for one int, which is written without a copy from the host, and for tensors on the
    device.

    >>> as_uint64("quantize", "seed", 2**32 + 5, torch.device("cpu"))
    tensor([5, 1], dtype=torch.int32)
    >>> as_uint64("cast_master", "starts", [-1], torch.device("cpu"), 1)
    Traceback (most recent call last):
    ValueError: cast_master: starts (-1) is not in [0, 2**64); pass an integer in that range
    """
    what = f"{op}: {name}"
    if count is None:
        return _one(what, numbers, device)
    shape = (count, 2)
    if not isinstance(numbers, Tensor):
        if isinstance(numbers, str) or not isinstance(numbers, Iterable):
            raise TypeError(
                f"{what} ({quote(numbers)}) is not a list of integers; pass one for each of {count} weights"
            )
        pairs = [_pair(what, number) for number in numbers]
        if len(pairs) != count:
            raise ValueError(f"{what} has {len(pairs)} entries for {count} weights; pass one per weight")
        return torch.tensor(pairs, dtype=torch.int32).view(shape).to(device)
    given = numbers
    if numbers.dtype == torch.int64 and numbers.ndim == 1:
        # On a GPU this check would wait for the device.
        if numbers.device.type == "cpu" and numbers.numel():
            uint32_pair(what, int(numbers.min()))
        numbers = numbers.contiguous().view(torch.int32).view(-1, 2)
    if numbers.dtype not in _WORDS:
        raise TypeError(
            f"{what} ({quote(given)}) is not int32 or uint32 {shape}, low half first; pass that, or a list of integers"
        )
    result: Tensor = numbers
    if tuple(result.shape) != shape:
        raise ValueError(
            f"{what} ({quote(given)}) does not have one entry for each of {count} weights; pass one per weight"
        )
    return result


def constant_uint64(number: int, device: torch.device) -> Tensor:
    """Return `as_uint64` of a constant, cached per device. Do not write to it.

    It is not cached in a captured graph, which must not read memory written on another stream, nor while a mode, hook
    or tracer is active.
    """
    if not may_skip_dispatcher(()) or torch.is_inference_mode_enabled() or is_capturing(device):
        return as_uint64("as_uint64", "number", number, device)
    return _cached_uint64(number, device)


def xor_uint64(pairs: Tensor, number: int) -> Tensor:
    return pairs ^ constant_uint64(number, pairs.device)


@functools.lru_cache(maxsize=64)
def _cached_uint64(number: int, device: torch.device) -> Tensor:
    # The copy is synchronous, so any stream may read the result.
    return torch.tensor(_pair("as_uint64: number", number), dtype=torch.int32).to(device)


def _one(what: str, number: Any, device: torch.device) -> Tensor:
    if isinstance(number, Tensor):
        if number.dtype in _WORDS and tuple(number.shape) == (2,):
            return number
    elif hasattr(number, "__index__"):
        low, high = _pair(what, number)
        pair = torch.full((2,), low, dtype=torch.int32, device=device)
        pair[1].fill_(high)
        return pair
    raise TypeError(f"{what} ({quote(number)}) is not an integer, or int32 or uint32 of shape (2,); pass one of these")


def _pair(what: str, number: int) -> tuple[int, int]:
    low, high = ((word ^ 2**31) - 2**31 for word in uint32_pair(what, number))
    return low, high
