"""Adam in both front ends: the dtypes of its states, and the hyperparameters as the kernel takes them."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np

from qshard._core.validation import join_names, quote

BLOCK = 128  # elements of a row that share a scale: kAdamBlock in core/adam.h

SCALED = ("float16", "float8_e4m3fn", "float8_e5m2")  # state dtypes that are stored with scales

STATES = ("float32", "bfloat16", *SCALED)


def check_setting(op: str, name: str, value: Any, *, is_beta: bool = False) -> None:
    """Raise unless a hyperparameter is a number in range. Arrays are not read, which would wait for the device."""
    if hasattr(value, "dtype") and not isinstance(value, np.generic):
        return
    text = f"{op}: {name} ({quote(value)}) must be a number of at least 0{' and below 1' if is_beta else ''}"
    if not isinstance(value, Real):
        raise TypeError(text)
    if not 0 <= float(value) < (1 if is_beta else math.inf):
        raise ValueError(text)


def check_state_dtype(op: str, name: str, given: Any, dtype: str, module: str = "") -> None:
    """Raise TypeError unless a state dtype is supported; `module` is the prefix of dtype names in the error."""
    if dtype not in STATES:
        raise TypeError(
            f"{op}: {name} ({quote(given)}) is not {join_names(module + each for each in STATES)}; pass one of these"
        )


def settings(lr: Any, beta1: Any, beta2: Any, eps: Any, weight_decay: Any, grad_scale: Any = 1.0) -> list[Any]:
    """Return the operand `hyper` of the op `adam_constants`, in its order.

    Each beta is split into two float32 terms: the nearest float32 of 0.999 alone would change 1 - beta in the fifth
    digit. Scalar arrays are passed through.

    >>> settings(0.5, 0.9, 0.5, 0.0, 0.0)
    [0.5, 0.8999999761581421, 2.384185793236071e-08, 0.5, 0.0, 0.0, 0.0, 1.0]
    """
    return [lr, *_as_two_floats(beta1), *_as_two_floats(beta2), eps, weight_decay, grad_scale]


def _as_two_floats(value: Any) -> tuple[Any, Any]:
    if not isinstance(value, int | float):
        return value, 0.0
    nearest = float(np.float32(value))
    return nearest, value - nearest
