"""The modules and parameters of a model, for what asks for them in every step.

PyTorch's own hand each of them up through all modules that it is in, by a generator each.
"""

from __future__ import annotations

from torch import nn


def modules_of(model: nn.Module) -> list[nn.Module]:
    """What `model.modules()` gives, in its order.

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
    """What `model.parameters()` gives, in its order.

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
