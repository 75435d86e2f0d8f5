"""Short `repr` of frozen dataclasses."""

from __future__ import annotations

import dataclasses
from typing import Any


def constructor_call(value: Any) -> str:
    """Format a dataclass as a call of its constructor, without arguments that equal their defaults.

    >>> from qshard.formats import FloatScaling
    >>> constructor_call(FloatScaling(pow2=True)), constructor_call(FloatScaling())
    ('FloatScaling(pow2=True)', 'FloatScaling()')
    """
    values = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    arguments = [f"{name}={given!r}" for name, given, default in values if given != default]
    return f"{type(value).__name__}({', '.join(arguments)})"
