"""Modules that `convert` changes in place stay instances of the class that their user has given them."""

from __future__ import annotations

import copyreg
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T", bound="Extends")


class Extends(nn.Module):
    """What `convert` makes of modules of a class of PyTorch's, and of subclasses of it that keep its `forward`.

    Attributes:
      _of: the class of PyTorch's.
      _extends: of classes that `extended` has made: that of the user.
    """

    _of: type[nn.Module]
    _extends: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """The classes that `extended` makes travel as those that they extend."""
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if "_extends" not in vars(type(self)) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        kind = next(base for base in type(self).__mro__ if "_of" in vars(base))
        return (_new, (kind, type(self)._extends, *reduced[1][1:]), *reduced[2:])


_EXTENDED: dict[tuple[type, type], type] = {}


def extended(kind: type[T], base: type[nn.Module]) -> type[T]:
    """`kind` for modules of `base`, which they stay instances of.

    Raises:
      TypeError: Python cannot make such a class, or make modules of `base` into modules of it.
    """
    if base is kind._of:
        return kind
    if issubclass(base, kind):
        return base
    if (kind, base) in _EXTENDED:
        return _EXTENDED[kind, base]
    if copyreg._slotnames(base):  # type: ignore[attr-defined]
        raise TypeError(f"{base.__name__} has __slots__")
    name = f"Quantized{base.__name__}"
    made = type(name, (kind, base), {"_extends": base, "__module__": base.__module__, "__doc__": base.__doc__})
    object.__new__(base).__class__ = made
    _EXTENDED[kind, base] = made
    return made


def _new(kind: type[Extends], base: type[nn.Module], *given: Any) -> Extends:
    made = extended(kind, base)
    return made.__new__(made, *given)
