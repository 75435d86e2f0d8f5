"""The path of a weight through the library: the modules in which a function gets the weight as an argument."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import qshard

ROOT = Path(qshard.__file__).parent


def path_of(sizes: set[int], run: Callable[[], object]) -> set[str]:
    """Return the modules that an array of one of these sizes enters while `run` runs, as paths below `qshard`.

    Sizes are the numbers of elements of the weight and of its shard, which no other array has. Arguments count alone,
    and in lists, tuples and dicts; also in threads that `run` starts.
    """
    found: set[str] = set()

    def is_weight(value: Any) -> bool:
        if isinstance(value, list | tuple):
            return any(map(is_weight, value))
        if isinstance(value, dict):
            return any(map(is_weight, value.values()))
        shape = value.shape if hasattr(value, "ndim") else None
        return isinstance(shape, tuple) and math.prod(shape) in sizes

    def enter(frame: Any, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(ROOT)):
            count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
            sys.setprofile(None)
            if any(is_weight(frame.f_locals.get(name)) for name in code.co_varnames[:count]):
                found.add(str(Path(code.co_filename).relative_to(ROOT)))
            sys.setprofile(enter)

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return found
