"""Formats whose numbers are constants to a compiler."""

from __future__ import annotations

from typing import Any, cast

import torch

from qshard.formats import Format

# Under `torch.compile(dynamic=True)` floats of an object become symbols. Dynamo of torch 2.13 fails on one in an
# autograd.Function, unless it is told that it is a constant; that of 2.11 cannot be told, and does not fail.
_NUMBERS_ARE_SYMBOLS = torch.__version__ >= "2.13"  # Compares versions, not strings.


class _Constant:
    """A format, or its scaling, some of whose attributes are constants to a compiler."""

    def __init__(self, real: Any, **constants: Any):
        self._real = real
        for name, value in constants.items():
            setattr(self, name, value)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def as_constant(fmt: Format) -> Format:
    """The format; while a graph is traced, one whose numbers do not become symbols."""
    if not (_NUMBERS_ARE_SYMBOLS and torch.compiler.is_compiling()):
        return fmt
    eps, scale_max = _numbers(fmt)
    return cast(Format, _Constant(fmt, scaling=_Constant(fmt.scaling, eps=eps, scale_max=scale_max)))


@torch.compiler.assume_constant_result
def _numbers(fmt: Format) -> tuple[float, float]:
    return fmt.scaling.eps, fmt.scaling.scale_max
