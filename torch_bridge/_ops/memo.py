"""Results that are kept for the arguments they were made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")

_BY_VALUE = frozenset((type(None), bool, int, float, str, tuple, torch.Size, torch.dtype, torch.device))


class Kept(Generic[T]):
    """A function whose results are kept, at most `most` of them; one more, and all are forgotten.

    As `functools.lru_cache`, but formats, recipes and what else is no plain value are told apart as objects: to hash
    them takes longer than the call that they are for. A result keeps its arguments alive, so none takes their place.

    >>> double = Kept(lambda text: text * 2)
    >>> double("ab"), double("ab"), len(double)
    ('abab', 'abab', 1)
    """

    def __init__(self, function: Callable[..., T], most: int = 1024):
        self._function, self._most = function, most
        self._found: dict[tuple[Any, ...], tuple[tuple[Any, ...], T]] = {}

    def __call__(self, *args: Any) -> T:
        key = tuple([arg if type(arg) in _BY_VALUE else id(arg) for arg in args])
        found = self._found.get(key)
        if found is None:
            result = self._function(*args)
            if len(self._found) >= self._most:
                self._found.clear()
            found = self._found[key] = (args, result)
        return found[1]

    def __len__(self) -> int:
        return len(self._found)

    def clear(self) -> None:
        self._found.clear()
