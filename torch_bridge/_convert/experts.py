"""Recognition of experts in 3-D parameters by their structure, without importing transformers or torchtitan.

- `RoutedExperts`: the decorator `use_experts_implementation` of transformers, with the parameters `gate_up_proj` or
  `up_proj`, and `down_proj`.
- `SortedExperts`: a method `_grouped_mm(self, *, A, B_t, offs)` that calls PyTorch's grouped product, as in the
  `GroupedExperts` of torchtitan, with any parameters `[E, N, K]`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from qshard.recipes import NO_PRODUCTS, Recipe
from qshard.torch_bridge._convert.weight_checks import ChosenWeight
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._experts.stacked_layer import StackedExperts
from qshard.torch_bridge._modules import extend_class
from qshard.torch_bridge._moe.experts import RoutedExperts, SortedExperts

_OPTIONS = {"has_bias", "has_gate", "has_post_expert_norm", "is_concatenated", "is_transposed"}
"""Options of transformers' decorator that `RoutedExperts` implements. `is_concatenated` only affects `_apply_gate`."""


def is_experts(module: nn.Module) -> bool:
    """Return True for experts in 3-D parameters that `convert` knows, converted or not.

    >>> is_experts(nn.Linear(4, 4))
    False
    """
    return kind_of(module) is not None and bool(weight_names(module))


def kind_of(module: nn.Module) -> type[Experts] | None:
    for kind in (SortedExperts, RoutedExperts, StackedExperts):
        if isinstance(module, kind):
            return kind
    if _dispatching_class(type(module)) is not None:
        return RoutedExperts
    return SortedExperts if _has_grouped_mm(type(module)) else None


def weight_names(module: nn.Module) -> list[str]:
    """Return the names of the 3-D weights, in the order of their use; empty if they have another form."""
    of_three_axes = [name for name, weight in module._parameters.items() if weight is not None and weight.ndim == 3]
    if kind_of(module) is not RoutedExperts:
        return of_three_axes
    known: list[str] = [name for name in ("gate_up_proj", "up_proj", "down_proj") if name in of_three_axes]
    return known if len(known) == len(of_three_axes) == 2 else []


def _dispatching_class(kind: type[nn.Module]) -> type[nn.Module] | None:
    """Return the base of `kind` with the `forward` of transformers' decorator; None if `kind` overrides it."""
    for base in kind.__mro__:
        if "forward" in vars(base):
            code = getattr(vars(base)["forward"], "__code__", None)
            return base if code is not None and "_experts_implementation" in code.co_names else None
    return None


def _has_grouped_mm(kind: type[nn.Module]) -> bool:
    """Return True if `_grouped_mm` of `kind` takes A, B_t and offs, and calls PyTorch's grouped product."""
    method: Any = getattr(kind, "_grouped_mm", None)
    code = getattr(method, "__code__", None)
    if code is None or not {"_grouped_mm", "grouped_mm"} & set(code.co_names):
        return False
    return {"A", "B_t", "offs"} <= set(inspect.signature(method).parameters)


def unfit_experts(module: nn.Module, recipe: Recipe) -> str | None:
    """Return the reason why known experts cannot be converted, or None."""
    kind, name = kind_of(module), type(module).__name__
    assert kind is not None
    if recipe.by_product:
        return f"{recipe} {NO_PRODUCTS}"
    if recipe.stateful and (not isinstance(module, StackedExperts) or module.ep_group is not None):
        return f"{type(recipe).__name__} has no scales by expert; match it with a pattern of another recipe"
    if parametrize.is_parametrized(module):
        return "its weights are computed"
    if "forward" in vars(module) or "_grouped_mm" in vars(module):
        return "its forward was replaced"
    base = _dispatching_class(type(module))
    if base is not None:
        options = set(getattr(vars(base).get("__init__"), "__code__", _dispatching_class.__code__).co_freevars)
        if unknown := sorted(options - _OPTIONS - {"original_init"}):
            return f"{name} uses {unknown[0]} of transformers, which convert does not know"
    try:
        extend_class(kind, type(module))
    except TypeError as error:
        return f"cannot be extended: {error}"
    return None


def weights_of_experts(prefix: str, module: nn.Module, recipe: Recipe) -> Iterator[ChosenWeight]:
    """Yield the weights of a module of experts, for `check_weights`."""
    is_local = isinstance(module, Experts) and module.has_local_experts
    for each in weight_names(module):
        weight, name = module._parameters[each], f"{prefix}.{each}" if prefix else each
        assert weight is not None
        transposed = kind_of(module) is RoutedExperts and getattr(module, "is_transposed", False)
        shape = tuple(weight.shape[:0:-1] if transposed else weight.shape[1:])
        yield ChosenWeight(name, weight, shape, recipe, is_local)


def convert_experts(prefix: str, module: nn.Module, recipe: Recipe, root: nn.Module, primary: bool) -> None:
    """Change the class of a module to the extension of its kind, give it the recipe, and wrap its weights."""
    kind = kind_of(module)
    assert kind is not None
    module.__class__ = extend_class(kind, type(module))
    assert isinstance(module, Experts)
    names = {own: f"{prefix}.{own}" if prefix else own for own in weight_names(module)}
    module.begin(recipe, names, root, primary)
