"""Planners of `torch.distributed.checkpoint` that save the recipes of a model and check them before a load.

`torch.distributed.checkpoint` drops the metadata of state dicts, and a load returns only the names in the loading state
dict. If a converted model added a name for its recipe, checkpoints without this name would not load. Planners write to
the metadata of the checkpoint, and read it before any tensor: every rank raises if one does.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan

from qshard._files.recipe_records import KEY, check_same, text_of
from qshard.recipes import Recipe
from qshard.torch_bridge._distributed.scaling_state import plain_name
from qshard.torch_bridge._quantized.validation import check_model

_EXPERT = re.compile(r"((?:.*\.)?experts)\.\d+")
"""One expert of a list. `GroupedLinear` may be a list or a stack, whose experts have one recipe."""


class RecipeSavePlanner(DefaultSavePlanner):
    """Planner for `torch.distributed.checkpoint.save` that also saves the recipe of each layer of a model.

        dcp.save(state, checkpoint_id=path, planner=RecipeSavePlanner(model))

    Recipes are part of the metadata of the checkpoint, not of a tensor. Loads without `RecipeLoadPlanner`, and without
    qshard, ignore them.

    Args:
      model: the model in the state: the same module, or a wrapper of it, as in `RecipeLoadPlanner`. With pipeline
        parallelism, this rank's stage. Its recipes are read now for the first save, and again for each later one.
      options: as for `DefaultSavePlanner`.

    Raises:
      TypeError: `model` is not a module.

    Sharded models: all ranks save the recipes of their layers, without communication of their own.

    >>> import qshard.torch_bridge as qt
    >>> model = qt.convert(nn.Sequential(nn.Linear(32, 32)), "MXFP8")
    >>> planner = RecipeSavePlanner(model)
    >>> planner.set_up_planner(model.state_dict(), is_coordinator=True)  # DCP calls these
    >>> _, metadata = planner.create_global_plan([planner.create_local_plan()])
    >>> list(metadata.planner_data["qshard.recipes"])
    ['0']
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        check_model("RecipeSavePlanner", model)
        super().__init__(**options)
        self._model: nn.Module | None = model
        # `async_save` plans in the background, when `switch_recipe` may already have changed the model.
        self._next: dict[str, str | None] | None = _texts(model)
        self._records: dict[str, str | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the model out: `async_save` may send the planner to another process."""
        return {**self.__dict__, "_model": None, "_next": self._taken()}

    def _taken(self) -> dict[str, str | None]:
        if self._next is not None:
            return self._next
        return self._records if self._model is None else _texts(self._model)

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Read the recipes, and plan as `DefaultSavePlanner`."""
        self._records, self._next = self._taken(), None
        super().set_up_planner(state_dict, storage_meta, is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """Add the recipes to this rank's plan, also to one that says that nothing but them may have changed."""
        plan = super().create_local_plan()
        return dataclasses.replace(plan, planner_data={**(plan.planner_data or {}), KEY: self._records})

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Merge the recipes of all ranks into the metadata of the checkpoint."""
        merged: dict[str, str | None] = {}
        for plan in all_plans:
            merged |= plan.planner_data[KEY]
        plans, metadata = super().create_global_plan(all_plans)
        return plans, dataclasses.replace(metadata, planner_data={**(metadata.planner_data or {}), KEY: merged})


class RecipeLoadPlanner(DefaultLoadPlanner):
    """Planner for `torch.distributed.checkpoint.load` that raises if a layer was saved with another recipe.

        dcp.load(state, checkpoint_id=path, planner=RecipeLoadPlanner(model))

    The error is a ValueError in DCP's `CheckpointException`. It comes before any tensor is read, and all ranks raise if
    one rank does.

    It compares layers that checkpoint and model both have, by name, and recipes by value; None is a recipe too.
    Checkpoints that `RecipeSavePlanner` has not written load into every model, and so do checkpoints of models that
    were not converted.

    Args:
      model: into which the state is loaded, after `convert`, and after `switch_recipe` if the run that saved called it.
      options: as for `DefaultLoadPlanner`.

    Raises:
      TypeError: `model` is not a module.

    To go on with another recipe, load first and call `switch_recipe` then, or load without this planner.

    >>> import qshard.torch_bridge as qt
    >>> one, other = (qt.convert(nn.Sequential(nn.Linear(32, 32)), recipe) for recipe in ("MXFP8", "NVFP4"))
    >>> planner = RecipeSavePlanner(one)
    >>> planner.set_up_planner(one.state_dict(), is_coordinator=True)  # DCP calls these
    >>> _, metadata = planner.create_global_plan([planner.create_local_plan()])
    >>> RecipeLoadPlanner(one).set_up_planner(one.state_dict(), metadata)
    >>> RecipeLoadPlanner(other).set_up_planner(other.state_dict(), metadata)
    Traceback (most recent call last):
    ValueError: RecipeLoadPlanner: 0 was saved with MXFP8(), but here it has NVFP4() (1 layer differs); use ...
    """

    def __init__(self, model: nn.Module, **options: Any) -> None:
        check_model("RecipeLoadPlanner", model)
        super().__init__(**options)
        self._model = model

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        """Compare the recipes, and plan as `DefaultLoadPlanner`."""
        data = getattr(metadata, "planner_data", None)
        saved = data.get(KEY) if isinstance(data, dict) else None
        if saved is not None and any(text is not None for text in saved.values()):
            texts = {name: text or text_of(None) for name, text in saved.items()}
            check_same("RecipeLoadPlanner", texts, _recipes_of(self._model), "load without this planner")
        super().set_up_planner(state_dict, metadata, is_coordinator)


def _layers_of(model: nn.Module) -> dict[str, Any]:
    """Return the modules with parameters, by qualified name, and all converted layers."""
    return {
        _EXPERT.sub(r"\1", ".".join(plain_name(model, name))): module
        for name, module in model.named_modules()
        if _is_converted(module) or any(own is not None for own in module._parameters.values())
    }


def _is_converted(module: nn.Module) -> bool:
    return isinstance(getattr(module, "converted", None), tuple)  # `WeightModule` is in a package above this one.


def _recipes_of(model: nn.Module) -> dict[str, Recipe | None]:
    return {name: each.recipe if _is_converted(each) else None for name, each in _layers_of(model).items()}


def _texts(model: nn.Module) -> dict[str, str | None]:
    """Return the text of the recipe of each layer, also after `switch_recipe(model, None)`; None if not converted."""
    return {name: text_of(each.recipe) if _is_converted(each) else None for name, each in _layers_of(model).items()}
