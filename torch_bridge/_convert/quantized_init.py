"""`quantized_init`: models whose linear layers are quantized from the start."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from qshard._core.layer_recipes import RecipesLike, Rules, check_filter
from qshard.torch_bridge._convert.conv1d import is_conv1d
from qshard.torch_bridge._convert.convert import convert


@contextlib.contextmanager
def quantized_init(
    recipe: RecipesLike, filter: Callable[[Any, str], bool] | None = None, *, primary: bool = True
) -> Iterator[None]:
    """Models that are made in it are converted when it ends: `convert(model, recipe, filter, primary=primary)`.

    Args:
      recipe, filter, primary: as for `convert`. Primary weights by default.

    With models on meta no rank has a whole weight at any time: `fully_shard` cuts what has no memory, then
    `to_empty(device=)` makes each rank's shards, and `reset_parameters` or any initialization of yours, in `uniform_`,
    `normal_` and elementwise math, fills them with values that do not depend on the number of ranks, if all ranks have
    the same `torch.manual_seed`: those of a weight follow from that number and its name.

    A model that others are put into, in the block, is converted as a part of the outermost one.

    >>> with quantized_init("CurrentScaling", primary=False):
    ...     model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
    >>> type(model[0]).__module__
    'qshard.torch_bridge._nn.linear'
    """
    Rules.of(recipe, "quantized_init")
    check_filter("quantized_init", filter)
    parents: dict[int, nn.Module] = {}
    children: set[int] = set()

    def note(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        parents[id(parent)] = parent
        if child is not None:
            parents.setdefault(id(child), child)
            children.add(id(child))

    handle = register_module_module_registration_hook(note)
    try:
        yield
    finally:
        handle.remove()
    for key, module in parents.items():
        if key not in children and any(isinstance(m, nn.Linear) or is_conv1d(m) for m in module.modules()):
            convert(module, recipe, filter, primary=primary)
