"""Observation of calls inside the library, without replacing anything."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


class Call(NamedTuple):
    """Arguments of a call, by name, and its result."""

    arguments: dict[str, Any]
    result: Any


@contextlib.contextmanager
def calls_of(
    function: Callable[..., Any], on_return: Callable[[Call], object] = lambda _: None
) -> Iterator[list[Call]]:
    """Record the calls of a Python function in this thread, in the order in which they return.

    `on_return` gets each call before its caller does, which may change the result.
    PyTorch runs backward passes on GPUs in other threads, unless `torch.autograd.set_multithreading_enabled(False)`.
    """
    code = function.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    calls: list[Call] = []
    begun: list[dict[str, Any]] = []

    outer = sys.getprofile()

    def watch(frame: Any, event: str, result: object) -> None:
        if outer is not None:
            outer(frame, event, result)
        if frame.f_code is not code:
            return
        if event == "call":
            begun.append({name: frame.f_locals[name] for name in names})
        elif event == "return":
            calls.append(Call(begun.pop(), result))
            on_return(calls[-1])

    sys.setprofile(watch)
    try:
        yield calls
    finally:
        sys.setprofile(outer)
