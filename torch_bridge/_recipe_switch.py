"""`switch_recipe`: changes the recipes of a converted model between two steps, in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from qshard._core.layer_recipes import RecipesLike, Rules, check_each, list_layers
from qshard._core.operands import check_weight_format, check_weight_shape
from qshard.recipes import Recipe
from qshard.torch_bridge._convert.convert import unfit_layer
from qshard.torch_bridge._convert.experts import weight_names
from qshard.torch_bridge._distributed.dtensor import local_of
from qshard.torch_bridge._distributed.fsdp1 import is_flattened_model
from qshard.torch_bridge._distributed.scaling_state import plain_name
from qshard.torch_bridge._distributed.tensor_shards import check_sharding
from qshard.torch_bridge._experts.layer import GroupedLinear, unfit_grouped_layers
from qshard.torch_bridge._experts.stacked_experts import Experts
from qshard.torch_bridge._experts.stacked_layer import StackedExperts
from qshard.torch_bridge._fsdp.code_gather import device_of
from qshard.torch_bridge._fsdp.refresh import sharded_params
from qshard.torch_bridge._fsdp.scale_state import ScaleState, Status
from qshard.torch_bridge._modules import modules_of
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._nn.weight_module import WeightModule
from qshard.torch_bridge._ops.collectives import unlike_ranks
from qshard.torch_bridge._ops.eager import is_capturing
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_model
from qshard.torch_bridge._torch_internals import backward_id, forget_buffers, forget_gathered, has_unreduced_gradient
from qshard.torch_bridge._zero.placeholders import has_optimizer

OP = "switch_recipe"


def switch_recipe(model: nn.Module, recipe: RecipesLike | None) -> nn.Module:
    """Change the recipes of a converted model between two steps, in place.

    The model stays as it is wrapped, sharded and compiled, and its optimizer keeps its parameters, masters and states:

        for step, batch in enumerate(data):
            if step == first_step_of_tail:
                switch_recipe(model, "MXFP8")
            train(model, batch)

    A model that was converted with the new recipe and has the same values, masters and optimizer states computes the
    same codes, losses and gradients from then on, bit for bit.

    Args:
      model: after `convert`, also after `fully_shard`, `parallelize_module`, `torch.compile` or
        DistributedDataParallel.
      recipe: the new recipe of all converted layers, or its name; None: layers multiply values, as without `convert`,
        and FSDP2 gathers values. Or a mapping from name patterns to recipes or None, as for `convert`; layers without
        a pattern keep their recipe. Layers that `convert` left in high precision stay so.

    Returns:
      `model`.

    Raises:
      TypeError: an argument has the wrong type.
      ValueError: no layer is converted; a pattern matches none; a layer cannot have the recipe; or ranks differ.
        The model is then unchanged, on every rank.
      RuntimeError: a pass is running, gradients were not reduced yet, or a CUDA graph is being captured.
      NotImplementedError: a `ZeroOptimizer` trains the model, or FSDP1 shards it; or FSDP2 cannot gather the format.

    Collective if weights are DTensors: call it on all ranks. Call it after `optimizer.step`, and finish the backward
    pass of every earlier loss first; under FSDP2 a later one raises. `torch.compile` compiles once more. A captured
    CUDA graph replays the old recipe: capture a new one.

    Seeds of stochastic rounding stay if both recipes use them; otherwise new ones are drawn, the same on all ranks of
    a mesh. Amax histories begin anew. A state dict that `torch.save` wrote after a switch, and `scaling_state`, know
    the recipe: loading them into a model with the first recipe raises, so a resumed run must call `switch_recipe`
    first. With `torch.distributed.checkpoint`, pass it `RecipeSavePlanner` and `RecipeLoadPlanner`.

    >>> from qshard.torch_bridge import convert
    >>> model = convert(nn.Sequential(nn.Linear(32, 32)), "NVFP4")
    >>> switch_recipe(model, "MXFP8")
    Sequential(
      (0): Linear(in_features=32, out_features=32, bias=True, recipe=MXFP8())
    )
    """
    check_model(OP, model)
    problem: Exception | None = None
    changes: list[_Change] = []
    try:
        changes = _changes(model, recipe)
        _check_idle(model, changes)
        check_each({change.name: change.check for change in changes})
    except (TypeError, ValueError, RuntimeError) as error:  # NotImplementedError is a RuntimeError.
        problem = error
    _agree(model, changes, problem)
    states = {id(state) for change in changes for state in change.module._states().values()}
    for module in modules_of(model):
        if states and isinstance(module, FSDPModule):
            module.reshard()
    for _, param, state in sharded_params(model):
        if id(state) in states:
            forget_gathered(param)
    draws = any(change.recipe is not None and change.recipe.stochastic for change in changes)
    generator = _generator(model) if draws else None
    for change in changes:
        change.module.switch(change.recipe, generator)
    for module in modules_of(model):
        if isinstance(module, DistributedDataParallel):
            forget_buffers(module)
    return model


class _Change(NamedTuple):
    """A new recipe of a layer, or of experts in 3-D parameters, and its name."""

    name: str
    module: WeightModule
    recipe: Recipe | None

    def check(self) -> None:
        """Raise unless the weights fit the recipe, as they are sharded."""
        for own in [*self.module._states()] or ["weight"]:
            weight, name = self.module._parameters.get(own), f"{self.name}.{own}" if self.name else own
            if weight is None:
                continue
            local = local_of(weight)
            if isinstance(local, QuantizedTensor):
                self._check_codes(name, local)
            elif self.recipe is not None:
                self._check_shape(name, weight)
            state: ScaleState | None = getattr(local, "scale_state", None)
            if state is not None and state.gathers:
                state.check_recipe(self.recipe if isinstance(self.module, WeightLayer) else None, weight)

    def _check_codes(self, name: str, codes: QuantizedTensor) -> None:
        if self.recipe is None:
            raise ValueError(
                f"{OP}: {name} ({codes.format}) has only codes, and recipe is None; load values, or give its layer "
                "another recipe by a pattern"
            )
        check_weight_format(OP, name, codes.format, self.recipe, frozen=True)

    def _check_shape(self, name: str, weight: nn.Parameter) -> None:
        assert self.recipe is not None
        transposed = getattr(self.module, "weight_layout", "NK") == "KN"
        shape = tuple(weight.shape[-2:])
        check_weight_shape(OP, f"{name}.T" if transposed else name, self.recipe, shape[::-1] if transposed else shape)
        part = getattr(getattr(local_of(weight), "scale_state", None), "part", None)
        if part is not None and len(part.shape) == 2:
            check_sharding(OP, name, self.recipe, part.shape, part.mesh, part.placements)


def _changes(model: nn.Module, recipe: Any) -> list[_Change]:
    """Return the layers that get another recipe, in the order of the model."""
    modules = {".".join(plain_name(model, name)): module for name, module in model.named_modules()}
    layers = {name: module for name, module in modules.items() if isinstance(module, WeightModule)}
    if not layers:
        raise ValueError(f"{OP}: model ({type(model).__name__}) has no converted layer; call convert first")
    _check_owners(model)
    rules = Rules.of(recipe, OP, modules, may_be_none=True)
    names = {name: (name, *_weights_of(name, module)) for name, module in layers.items()}
    rules.check_used(names.values())
    given = {name: pattern for name in layers if (pattern := rules.pattern_of(*names[name])) is not None}
    new = {name: rules.recipes[pattern] for name, pattern in given.items()}
    of_experts = unfit_grouped_layers(model, {layers[name]: own for name, own in new.items()})
    whys = {name: _unfit(layers[name], own) or of_experts.get(layers[name]) for name, own in new.items()}
    reasons = {name: why for name, why in whys.items() if why is not None}
    if reasons:
        raise ValueError(
            f"{OP}: {len(reasons)} of {len(new)} layers cannot have the recipe: {list_layers(reasons)}; leave them out "
            "by patterns"
        )
    after = {name: new.get(name, module.recipe) for name, module in layers.items()}
    _check_shared(modules, layers, after)
    return [_Change(name, module, after[name]) for name, module in layers.items() if module.recipe != after[name]]


def _weights_of(name: str, module: nn.Module) -> list[str]:
    weights = weight_names(module) if isinstance(module, Experts) else ["weight"]
    return [f"{name}.{own}" if name else own for own in weights]


def _unfit(module: WeightModule, recipe: Recipe | None) -> str | None:
    """Return the reason why a layer cannot have a recipe, or None."""
    if recipe is not None:
        return None if _has_codes(module) else unfit_layer(module, recipe)
    if parametrize.is_parametrized(module):
        return "its weight is computed"
    if isinstance(module, StackedExperts):
        return "experts of GroupedLinear have no products of values"
    if isinstance(module, Experts) and module.ep_group is not None:
        return "expert parallelism has no products of values"
    return None


def _has_codes(module: WeightModule) -> bool:
    return any(isinstance(local_of(each), QuantizedTensor) for each in module._parameters.values() if each is not None)


def _check_owners(model: nn.Module) -> None:
    """Raise if FSDP1 or a `ZeroOptimizer` owns the weights."""
    if is_flattened_model(model):
        raise NotImplementedError(
            f"{OP}: model ({type(model).__name__}) is sharded by FullyShardedDataParallel, which owns its weights; use "
            "fully_shard, or save a checkpoint and convert with the new recipe"
        )
    if any(has_optimizer(parameter) for parameter in model.parameters()):
        raise NotImplementedError(
            f"{OP}: model ({type(model).__name__}) is trained by a ZeroOptimizer, whose buffers have the size of one "
            "format; load the results of get_state_dict into a new model and optimizer with the new recipe"
        )


def _check_shared(
    modules: Mapping[str, nn.Module], layers: Mapping[str, WeightModule], recipes: Mapping[str, Recipe | None]
) -> None:
    """Raise if layers with one weight, or experts of one `GroupedLinear`, would have two recipes."""
    first: dict[int, str] = {}
    for name, module in layers.items():
        for state in module._states().values():
            other = first.setdefault(id(state), name)
            if recipes[other] != recipes[name]:
                raise ValueError(
                    f"{OP}: {name} ({recipes[name]}) shares its weight with {other} ({recipes[other]}), but a weight "
                    "has one recipe; match both with one pattern"
                )
    names = {id(module): name for name, module in layers.items()}
    for name, grouped in modules.items():
        if not isinstance(grouped, GroupedLinear) or isinstance(grouped.experts, StackedExperts):
            continue
        of_experts = {recipes[names[id(each)]] for each in grouped.experts if id(each) in names}
        if len(of_experts) > 1:
            raise ValueError(
                f"{OP}: experts of {name} would have {len(of_experts)} recipes; match all with one pattern"
            )
        if None in of_experts:
            raise ValueError(
                f"{OP}: {name or 'the model'} (GroupedLinear) has no products of values; pass a recipe for its experts"
            )


def _check_idle(model: nn.Module, changes: list[_Change]) -> None:
    """Raise if a pass is running, or FSDP2 still needs gathered weights or has gradients of them."""
    states = [state for change in changes for state in change.module._states().values()]
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    if is_capturing(device):
        raise RuntimeError(f"{OP}: a CUDA graph is being captured; call it between two steps, then capture a new graph")
    is_gathering = any(state.status is Status.GATHERING for state in states)
    if backward_id() is not None or is_gathering or any(state.passes.now() is not None for state in states):
        raise RuntimeError(f"{OP}: a pass is running; call it between two steps, after optimizer.step")
    known = {id(state) for _, _, state in sharded_params(model)}
    for change in changes:
        for own, state in change.module._states().items():
            weight = cast(Any, change.module._parameters[own])
            if isinstance(weight, DTensor) and state.gathers and id(state) not in known:
                raise ValueError(
                    f"{OP}: {state.name} is sharded by a fully_shard of a module around model; pass that module"
                )
    chosen = {id(state) for state in states}
    for _, param, state in sharded_params(model):
        if id(state) in chosen and has_unreduced_gradient(param):
            raise RuntimeError(
                f"{OP}: {state.name} has a gradient of a micro-batch that is not reduced; call it after optimizer.step"
            )


def _groups_of(model: nn.Module) -> list[tuple[list[dist.ProcessGroup], torch.device]]:
    """Return the groups of each mesh of the model, with the device that sends there; the largest mesh is last."""
    meshes = {each.device_mesh: device_of(each) for each in model.parameters() if isinstance(each, DTensor)}
    pairs = sorted(meshes.items(), key=lambda pair: pair[0].size())
    return [([mesh.get_group(axis) for axis in range(mesh.ndim)], device) for mesh, device in pairs]


def _generator(model: nn.Module) -> torch.Generator:
    """Return a random number generator that draws the same seeds on all ranks of the model."""
    number = torch.randint(2**62, (1,))
    for groups, device in _groups_of(model):
        for group in groups:
            sent = number.to(device)
            dist.broadcast(sent, group=group, group_src=0)
            number = sent.cpu()
    return torch.Generator().manual_seed(int(number))


def _agree(model: nn.Module, changes: list[_Change], problem: Exception | None) -> None:
    """Raise on all ranks if one has a problem, or if ranks change other layers. Collective if weights are DTensors."""
    facts = repr([str(problem), *((change.name, change.recipe) for change in changes)]).encode()
    others: list[int] = []
    for groups, device in _groups_of(model):
        others += unlike_ranks(facts, groups, device)
    if problem is not None:
        raise problem
    if others:
        raise ValueError(
            f"{OP}: rank {others[0]} passes another recipe than this rank, or raises; call it alike on every rank"
        )
