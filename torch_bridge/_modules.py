"""Modules of a model: fast listings for calls in every step, and subclasses for modules that change in place.

`model.modules()` and `model.parameters()` pass each item through one generator per level of nesting. Modules that
`convert` changes stay instances of their original class.
"""

from __future__ import annotations

import copyreg
import functools
from typing import Any, TypeVar, cast

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `model.modules()` yields, in the same order.

    >>> model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh()))
    >>> modules_of(model) == list(model.modules())
    True
    """
    found: dict[int, nn.Module] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if id(module) not in found:
            found[id(module)] = module
            if module._modules:
                waiting += [child for child in reversed(module._modules.values()) if child is not None]
    return [*found.values()]


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that `model.parameters()` yields, in the same order.

    >>> layer = nn.Linear(2, 2)
    >>> [id(p) for p in parameters_of(nn.Sequential(layer, layer))] == [id(layer.weight), id(layer.bias)]
    True
    """
    found: dict[int, nn.Parameter] = {}
    for module in modules_of(model):
        if module._parameters:
            for parameter in module._parameters.values():
                if parameter is not None:
                    found[id(parameter)] = parameter
    return [*found.values()]


T = TypeVar("T", bound="Extends")


class Extends(nn.Module):
    """Base class of modules that replace a PyTorch class, `_of`, or a subclass of it that does not override `forward`.

    `_extends` is the original class, in subclasses that `extend_class` creates.
    """

    _of: type[nn.Module]
    _prefix = "Quantized"  # of the names of subclasses that `extend_class` creates
    _extends: type[nn.Module]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the original class instead of the subclass that `extend_class` creates."""
        reduced = super().__reduce_ex__(max(int(protocol), 2))
        if "_extends" not in vars(type(self)) or reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return reduced
        kind = next(base for base in type(self).__mro__ if "_of" in vars(base))
        return (_new, (kind, type(self)._extends, *reduced[1][1:]), *reduced[2:])


def extend_class(kind: type[T], base: type[nn.Module]) -> type[T]:
    """Return a subclass of `kind` and `base`, which is `kind._of` or a subclass of it; cached for each pair.

    The result is `kind` if `base` is `kind._of`, and `base` if it is a subclass of `kind` already. TypeError if `base`
    has `__slots__`, or Python rejects the class or the change of `__class__`.
    """
    if base is kind._of:
        return kind
    if issubclass(base, kind):
        return base
    subclass: type[T] = _subclass_of_both(cast(Any, kind), cast(Any, base))
    return subclass


@functools.cache
def _subclass_of_both(kind: Any, base: Any) -> Any:
    if copyreg._slotnames(base):  # type: ignore[attr-defined]
        raise TypeError(f"{base.__name__} has __slots__")
    name = f"{kind._prefix}{base.__name__}"
    subclass = type(name, (kind, base), {"_extends": base, "__module__": base.__module__, "__doc__": base.__doc__})
    object.__new__(base).__class__ = subclass
    return subclass


def _new(kind: type[Extends], base: type[nn.Module], *given: Any) -> Extends:
    subclass = extend_class(kind, base)
    return subclass.__new__(subclass, *given)
