"""Base class of quantized containers: arithmetic raises an error with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

_BINARY = {
    **{"add": "+", "sub": "-", "mul": "*", "matmul": "@", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"},
    **{"and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>"},
}
_UNARY = {"neg": "-", "pos": "+", "abs": "abs", "invert": "~"}
_OTHERS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "getitem": "indexing"}


class NoArithmetic:
    """Operators that raise TypeError with the operator and a remedy.

    Without them Python says "unsupported operand type(s)", and NumPy builds an array of objects.
    """

    _REMEDY: ClassVar[str] = "supported on codes; call .dequantize() and use the result"
    __array_ufunc__ = None  # NumPy's operators then defer to ours.

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(f"{type(self).__name__}: {what} is not {self._REMEDY}")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        self._refuse("conversion to an array")


def _method(symbol: str) -> Callable[..., NoReturn]:
    return lambda self, *others: self._refuse(symbol)


for _name, _symbol in _BINARY.items():
    for _form in (f"__{_name}__", f"__r{_name}__"):
        setattr(NoArithmetic, _form, _method(_symbol))
for _name, _symbol in (_UNARY | _OTHERS).items():
    setattr(NoArithmetic, f"__{_name}__", _method(_symbol))
