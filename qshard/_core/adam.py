"""What both front ends know of Adam: which states it has, and the settings of a step as the kernel takes them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from qshard._core.validation import join_names, quote

BLOCK = 128
"""Elements of a row that share a scale: kAdamBlock of core/adam.h."""

SCALED = ("float16", "float8_e4m3fn", "float8_e5m2")
"""The dtypes of states that have scales."""

STATES = ("float32", "bfloat16", *SCALED)


def check_setting(op: str, name: str, value: Any, *, is_beta: bool = False) -> None:
    """Raises unless a setting is a number that it may be. Arrays are not looked at: that would be to wait for a device.

    >>> check_setting("Adam", "lr", -1)
    Traceback (most recent call last):
    ValueError: Adam: lr (-1) must be a number of at least 0
    """
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        return
    text = f"{op}: {name} ({quote(value)}) must be a number of at least 0{' and below 1' if is_beta else ''}"
    if not isinstance(value, Real):
        raise TypeError(text)
    if not 0 <= float(value) < (1 if is_beta else math.inf):
        raise ValueError(text)


def check_state_dtype(op: str, name: str, given: Any, dtype: str, module: str = "") -> None:
    """`dtype`: what is given, by its name. `module`: what a framework puts before such names."""
    if dtype not in STATES:
        raise TypeError(
            f"{op}: {name} ({quote(given)}) is not {join_names(module + each for each in STATES)}; pass one of these"
        )


def settings(lr: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any, grad_scale: Any = 1.0) -> list[Any]:
    """The operand `hyper` of the op `adam_constants`, in its order.

    Each beta is two float32 numbers that add up to it: of 0.999, the nearest float32 alone would make 1 - beta wrong
    in the fifth digit. What is an array, of one number, stays that.

    >>> settings(0.5, 0.9, 0.5, 0.0, 0.0)
    [0.5, 0.8999999761581421, 2.384185793236071e-08, 0.5, 0.0, 0.0, 0.0, 1.0]
    """
    return [lr, *_as_two_floats(beta1), *_as_two_floats(beta2), eps, weight_decay, grad_scale]


def _as_two_floats(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, int | float):
        return value, 0.0
    nearest = float(np.float32(value))
    return nearest, value - nearest
