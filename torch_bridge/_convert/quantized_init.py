"""`quantized_init`: a context that converts models built inside it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from qshard._core.layer_recipes import RecipesLike, Rules, check_function
from qshard.torch_bridge._convert.convert import convert
from qshard.torch_bridge._convert.experts import is_experts
from qshard.torch_bridge._convert.survey import is_conv1d


@contextlib.contextmanager
def quantized_init(
    recipe: RecipesLike, filter: Callable[[Any, str], bool] | None = None, *, primary: bool = True
) -> Iterator[None]:
    """Convert all models built in this context when it ends: `convert(model, recipe, filter, primary=primary)`.

    A model that becomes part of another model in the context is converted as a part of the outermost one.

    With models on meta, no rank ever has a whole weight. `fully_shard` shards parameters without memory, then
    `to_empty(device=)` allocates each rank's shards. `reset_parameters`, or your own initialization with `uniform_`,
    `normal_` and elementwise ops, fills them with values that do not depend on the number of ranks, if all ranks have
    the same `torch.manual_seed`: the values of a weight depend on that seed and on its name.

    Args:
      recipe: as for `convert`.
      filter: as for `convert`.
      primary: as for `convert`, but True by default.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: the recipe has an unknown name; or, when the context ends, as for `convert`.

    >>> with quantized_init("CurrentScaling", primary=False):
    ...     model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> type(model[0]).__module__
    'qshard.torch_bridge._nn.linear'
    """
    Rules.of(recipe, "quantized_init", [])
    if filter is not None:
        check_function("quantized_init", "filter", filter)
    parents: dict[int, nn.Module] = {}
    children: set[int] = set()

    def record(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        parents[id(parent)] = parent
        if child is not None:
            parents.setdefault(id(child), child)
            children.add(id(child))

    handle = register_module_module_registration_hook(record)
    try:
        yield
    finally:
        handle.remove()
    for key, module in parents.items():
        if key not in children and any(map(_is_convertible, module.modules())):
            convert(module, recipe, filter, primary=primary)


def _is_convertible(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_conv1d(module) or is_experts(module)
