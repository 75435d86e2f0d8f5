"""Numbers of 64 bits as ops take them: pairs of int32 words, the low one first."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from qshard._core.flat_shards import word_pair
from qshard._core.validation import quote
from qshard.torch_bridge._ops.eager import is_capturing, may_skip_dispatcher

_WORDS = (torch.int32, torch.uint32)


def words(op: str, name: str, numbers: Any, device: torch.device, count: int | None = None) -> Tensor:
    """One number as `[2]`, or with `count` so many as `[count, 2]`.

    A CUDA graph can capture it for one int, which gets to the device without a copy from the host, and for tensors on
    the device.

    Numbers are ints, which go to `device`, or a tensor of words, int32 or uint32; with `count` also int64 `[count]`.
    Errors name them by `op` and `name`.

    >>> words("quantize", "seed", 2**32 + 5, torch.device("cpu"))
    tensor([5, 1], dtype=torch.int32)
    >>> words("cast_master", "starts", [-1], torch.device("cpu"), 1)
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
        if numbers.device.type == "cpu" and numbers.numel():  # On a GPU, to look would be to wait for it.
            word_pair(what, int(numbers.min()))
        numbers = numbers.contiguous().view(torch.int32).view(-1, 2)
    if numbers.dtype not in _WORDS:
        raise TypeError(
            f"{what} ({quote(given)}) is not int32 or uint32 {shape}, low half first; pass that, or a list of integers"
        )
    made: Tensor = numbers
    if tuple(made.shape) != shape:
        raise ValueError(
            f"{what} ({quote(given)}) does not have one entry for each of {count} weights; pass one per weight"
        )
    return made


def constant_words(number: int, device: torch.device) -> Tensor:
    """`words` of a number that never changes: made once for a device, not to be written.

    Not in a captured graph, which must not read what others made on another stream, nor where somebody looks on.
    """
    if not may_skip_dispatcher(()) or torch.is_inference_mode_enabled() or is_capturing(device):
        return words("words", "number", number, device)
    return _cached_words(number, device)


def xor_words(pairs: Tensor, number: int) -> Tensor:
    """Pairs of words XOR a number that never changes."""
    return pairs ^ constant_words(number, pairs.device)


@functools.lru_cache(maxsize=64)
def _cached_words(number: int, device: torch.device) -> Tensor:
    # Its copy is waited for, so that any stream may read it.
    return torch.tensor(_pair("words: number", number), dtype=torch.int32).to(device)


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
    """As int32, which has the bits of the words."""
    low, high = ((word ^ 2**31) - 2**31 for word in word_pair(what, number))
    return low, high
