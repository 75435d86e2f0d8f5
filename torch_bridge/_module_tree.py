"""Fast listing of the modules and parameters of a model, for calls in every step.

`model.modules()` and `model.parameters()` pass each item through one generator per level of nesting.
"""

from __future__ import annotations

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
