"""`convert`: the linear layers of a model become quantized ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard.names import shown
from qshard.recipes import RecipeLike, as_recipe
from qshard.torch_bridge.arguments import check_dtype, check_model
from qshard.torch_bridge.linear import check_shape
from qshard.torch_bridge.nn import Linear, coded


def convert(
    model: nn.Module,
    recipe: RecipeLike,
    filter: Callable[[nn.Linear, str], bool] | None = None,
    *,
    primary: bool = False,
) -> nn.Module:
    """Turns every `nn.Linear` in `model` into a `Linear`, in place: same module objects, hooks, names and values.

    Weights that layers share stay shared. A `Linear` takes the new recipe; other subclasses of `nn.Linear` are left
    as they are. `fully_shard` takes weights of square blocks, or of one scale a tensor; it refuses those of vectors,
    whose two planes are different numbers.

    Args:
      model: on any device, also meta. Before `parallelize_module`, `fully_shard`, and before the optimizer is made, as
        they hold on to parameters.
      recipe: the format of each role, or the name of a recipe, such as "CurrentScaling".
      primary: whether weights are kept as codes. Then `fully_shard` must follow, on one rank too; `Adam`, or any
        optimizer in `WithMasters`, has the float32 masters, which start as the weights are now, and `state_dict` shows
        them. Codes are made once a step, and no gather casts.
      filter: called with a layer and its qualified name; layers for which it is False stay as they are.

    Returns:
      `model`.

    Raises:
      TypeError: a weight is not float32, bfloat16 or float16, or an argument is not of its type.
      ValueError: there is nothing to convert; or a weight is sharded already, also belongs to another kind of module,
        or is not whole blocks of the formats of the recipe.

    >>> from qshard.recipes import CurrentScaling
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> convert(model, CurrentScaling(), filter=lambda layer, name: name != "2")
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True, weight=FP8_E4M3[nonfinite=nan], \
activation=FP8_E4M3[nonfinite=nan], gradient=FP8_E5M2[nonfinite=nan])
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    check_model("convert", model)
    recipe = as_recipe(recipe, "convert")
    if filter is not None and not callable(filter):
        raise TypeError(f"convert: filter ({shown(filter)}) is not a function; pass one of a layer and its name")
    chosen: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear) or not (filter is None or filter(module, name)):
            continue
        weight = f"{name}.weight" if name else "weight"
        if isinstance(module.weight, DTensor):
            raise ValueError(f"convert: {weight} (DTensor) is not a plain tensor; convert before sharding the model")
        if type(module) not in (nn.Linear, Linear):
            continue
        try:
            check_dtype("convert", weight, module.weight.dtype)
            check_shape("convert", weight, recipe, tuple(module.weight.shape))
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}, or leave the layer out with filter=") from None
        chosen[name] = module
    if not chosen:
        raise ValueError(
            f"convert: model ({type(model).__name__}) has no nn.Linear that filter= keeps, subclasses aside; pass one "
            "that has"
        )
    _check(model, chosen)
    weights: dict[Tensor, nn.Parameter] = {}
    for name, module in chosen.items():
        old = module.weight
        if old not in weights:
            weights[old] = coded(old, recipe, f"{name}.weight" if name else "weight", model, primary)
        module.__class__ = Linear
        cast(Linear, module).begin(recipe, weights[old])
    return model


def _check(model: nn.Module, chosen: dict[str, nn.Linear]) -> None:
    """Nothing is changed unless everything can be."""
    weights = {id(module.weight): name for name, module in chosen.items()}
    taken = set(map(id, chosen.values()))
    for other_name, other in model.named_modules():
        for parameter_name, parameter in other._parameters.items():
            shared = weights.get(id(parameter))
            if shared is not None and (id(other) not in taken or parameter_name != "weight"):
                raise ValueError(
                    f"convert: {shared}.weight ({other_name}.{parameter_name} too) is not of linear layers alone; "
                    "leave the layer out with filter="
                )
