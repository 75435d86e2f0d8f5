"""Hooks of all-gathers for FSDP2, which inspects their signatures."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


class GatherHook:
    """A bound method with a precomputed signature. FSDP2 inspects the signature before each gather, which is slow."""

    __slots__ = ("__signature__", "_method")

    def __init__(self, method: Callable[..., Any], signature: inspect.Signature):
        self._method, self.__signature__ = method, signature

    def __call__(self, *args: Any) -> Any:
        return self._method(*args)


def hook_signature(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method once it is bound."""
    signature = inspect.signature(method)
    return signature.replace(parameters=[*signature.parameters.values()][1:])
