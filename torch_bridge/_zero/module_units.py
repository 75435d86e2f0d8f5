"""Which parameters ZeRO trains, as what each is gathered, and which are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from qshard.recipes import Role
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._nn.grouped_linear import GroupedLinear
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._quantized.tensor import QuantizedTensor
from qshard.torch_bridge._quantized.validation import check_contiguous, check_dtype
from qshard.torch_bridge._zero.hooks import is_trained
from qshard.torch_bridge._zero.weight import Weight

_CALL_NO_CHILD = (GroupedLinear, nn.MultiheadAttention)
"""Modules that use the weights of the modules in them, and call none of these."""


def weights_of(model: nn.Module) -> list[Weight]:
    """The parameters to train, each once, in the order of the model."""
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ValueError(
            f"ZeroOptimizer: model ({type(model).__name__}) sums gradients itself; pass its .module, and call that"
        )
    found: dict[int, Weight] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if not parameter.requires_grad:
                continue
            full = f"{prefix}.{name}" if prefix else name
            weight = found.setdefault(id(parameter), Weight(full, parameter, []))
            weight.owners.append((module, name))
    for weight in found.values():
        parameter, what = weight.parameter, f"ZeroOptimizer: {weight.name} {weight.shape}"
        if is_trained(parameter):
            raise ValueError(f"{what} is trained by another ZeroOptimizer; make one for a model, or another model")
        if isinstance(parameter, QuantizedTensor):
            raise ValueError(f"{what} (QuantizedTensor) has no float32 values; make the model anew and load them")
        if isinstance(parameter, DTensor):
            raise ValueError(f"{what} (DTensor) is not a plain tensor; give a model that is not sharded yet")
        check_contiguous("ZeroOptimizer", f"{weight.name} {weight.shape}", parameter)
        check_dtype("ZeroOptimizer", f"{weight.name} {weight.shape}", parameter.dtype)
        # A weight of quantized layers alone travels as codes, if its rowwise plane gives the other.
        formats = {
            m.recipe.format(Role.WEIGHT) if isinstance(m, WeightLayer) and n == "weight" else None
            for m, n in weight.owners
        }
        state = parameter.scale_state if isinstance(parameter, ShardedWeight) else None
        if state is not None and formats == {state.fmt} and state.refusal is None:
            weight.fmt, weight.delayed = state.fmt, state.delayed
    weights = list(found.values())
    if not weights:
        raise ValueError(
            f"ZeroOptimizer: model ({type(model).__name__}) has no parameter that requires grad; pass one that has"
        )
    devices = {weight.parameter.device for weight in weights if not weight.parameter.is_meta}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"ZeroOptimizer: model (on {names}) is not on one device; move it to one")
    return weights


def units_of(
    model: nn.Module, weights: Sequence[Weight], units: Sequence[nn.Module] | None
) -> list[tuple[nn.Module, list[Weight]]]:
    """Modules, and the weights that each gathers, in the order of the model."""
    modules = list(model.modules())
    # Forward hooks of a module that is never called never run: the module that uses its weight is the unit.
    users = {id(m): user for user in modules if isinstance(user, _CALL_NO_CHILD) for m in user.modules()}
    if units is None:
        # A compiled module stands for the one in it, so that hooks are outside of what is compiled.
        compiled = {id(m._modules["_orig_mod"]): m for m in modules if "_orig_mod" in m._modules}
        owners = (users.get(id(module), module) for weight in weights for module, _ in weight.owners)
        asked = {id(compiled.get(id(module), module)) for module in owners}
    else:
        asked = {id(module) for module in (*units, model)}
        if strays := [type(unit).__name__ for unit in units if not any(unit is module for module in modules)]:
            raise ValueError(f"ZeroOptimizer: units ({strays[0]}) is not a module of the model; give some that are")
        for unit in units:
            if (user := users.get(id(unit), unit)) is not unit:
                raise ValueError(
                    f"ZeroOptimizer: units ({type(unit).__name__}) is in a {type(user).__name__}, which uses its "
                    "weight without a call of it; give that module, or one that holds it"
                )
    chosen = [module for module in modules if id(module) in asked]
    innermost: dict[int, nn.Module] = {}
    for unit in chosen:  # Outer modules come first, so inner ones have the last word.
        innermost.update({id(module): unit for module in unit.modules()})
    of_unit: dict[int, list[Weight]] = {id(unit): [] for unit in chosen}
    for weight in weights:
        homes = {id(innermost[id(module)]) for module, _ in weight.owners}
        if len(homes) > 1:
            raise ValueError(
                f"ZeroOptimizer: {weight.name} (shared) is not in one unit; give units= with a module that has all of "
                "its owners"
            )
        of_unit[homes.pop()].append(weight)
    return [(unit, of_unit[id(unit)]) for unit in chosen if of_unit[id(unit)]]


def by_setting(
    weights: Sequence[Weight], settings: Callable[[str, nn.Parameter], dict[str, Any]] | None
) -> list[tuple[dict[str, Any], list[Weight]]]:
    """Weights with the same settings together, in order of appearance: the same groups on every rank."""
    groups: list[tuple[dict[str, Any], list[Weight]]] = []
    for weight in weights:
        given = settings(weight.name, weight.parameter) if settings else {}
        members = next((members for known, members in groups if known == given), None)
        if members is None:
            groups.append((given, members := []))
        members.append(weight)
    return groups
