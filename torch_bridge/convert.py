"""`convert`: the linear layers of a model become quantized ones."""

from __future__ import annotations

import copyreg
import warnings
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from qshard.names import shown
from qshard.recipes import Recipe, RecipeLike, as_recipe, check_weight_shape
from qshard.torch_bridge.arguments import check_dtype, check_model
from qshard.torch_bridge.calls import follow_calls
from qshard.torch_bridge.extend import extended
from qshard.torch_bridge.fsdp.weight import ShardedWeight
from qshard.torch_bridge.fused import RMSNorm
from qshard.torch_bridge.linear_cross_entropy import LinearCrossEntropy, QuantizedHead
from qshard.torch_bridge.nn import Linear, coded, put

_SHOWN = 3
"""How many layers a warning names."""


def convert(
    model: nn.Module,
    recipe: RecipeLike,
    filter: Callable[[nn.Linear, str], bool] | None = None,
    *,
    primary: bool = False,
    fuse: bool = False,
) -> nn.Module:
    """Turns every `nn.Linear` in `model` into a `Linear`, in place: same module objects, hooks, names and values.

    Modules above these layers get two hooks, which tell when a call of theirs begins and ends: during it, layers that
    take the same x share its codes. So pass modules that you build of `Linear` to `convert` too.

    Layers of a subclass that keeps the `forward` of `nn.Linear` stay instances of it, with its methods and attributes.
    Parameters stay the objects that they are: an optimizer that holds them trains them on. Weights that layers share
    stay shared. A `Linear` takes the new recipe, and a `LinearCrossEntropy` still gives the loss. `fully_shard` takes
    weights of square blocks, or of one scale a tensor; it refuses those of vectors, whose two planes are different
    numbers.

    What it cannot convert it leaves as it is, with a warning that says why, unless `filter` leaves it out: layers with
    a `forward` of their own, whose weight is computed (parametrized, pruned) or has no shape yet (lazy), or is used
    without a call of the layer (`nn.MultiheadAttention`), and weights that belong to another kind of module too, such
    as an embedding.

    Args:
      model: on any device, also meta. Before it is sharded or wrapped: `parallelize_module`, `fully_shard`,
        DistributedDataParallel.
      recipe: the format of each role, or the name of a recipe, such as "CurrentScaling".
      primary: whether weights are kept as codes. Then `fully_shard` must follow, on one rank too; `Adam`, or any
        optimizer in `WithMasters`, has the float32 masters, which start as the weights are now, and `state_dict` shows
        them. Codes are made once a step, and no gather casts.
      fuse: whether every `nn.RMSNorm` with a weight, of a subclass that keeps its `forward` too, becomes a `RMSNorm`.
        That takes the amax that the layer after it needs as it makes its result. Last bits of norms change: it adds in
        another order.
      filter: called with a layer and its qualified name; layers for which it is False stay as they are.

    Returns:
      `model`.

    Raises:
      TypeError: a weight is not float32, bfloat16 or float16, or an argument is not of its type.
      ValueError: there is nothing to convert; or a weight is sharded already, is held by a wrapper or by a graph of
        autograd, or is not whole blocks of the formats of the recipe. Nothing has been changed then.

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
    _check_not_wrapped(model)
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and (filter is None or filter(module, name))
    }
    why = {name: reason for name, layer in layers.items() if (reason := _unfit(layer, recipe)) is not None}
    why |= _tied(model, {name: layer for name, layer in layers.items() if name not in why})
    left = {name: why[name] for name in layers if name in why}
    chosen = {name: layer for name, layer in layers.items() if name not in why}
    if not chosen:
        kind = type(model).__name__
        if left:
            raise ValueError(f"convert: model ({kind}) has nothing to convert: {_listed(left)}; pass one that has")
        raise ValueError(f"convert: model ({kind}) has no nn.Linear that filter= keeps; pass one that has")
    for name, module in chosen.items():
        _check(_weight(name), module.weight, recipe)
    weights: dict[Tensor, nn.Parameter] = {}
    for name, module in chosen.items():
        if module.weight not in weights:
            weights[module.weight] = coded(module.weight, recipe, _weight(name), model, primary)
    if left:
        warnings.warn(
            f"convert: {len(left)} of {len(left) + len(chosen)} linear layers stay as they are: {_listed(left)}; leave "
            "them out with filter= to say that they should",
            stacklevel=2,
        )
    for weight, made in weights.items():
        put(cast(nn.Parameter, weight), made)
    for module in chosen.values():
        module.__class__ = extended(_kind_of(type(module)), type(module))
        cast(Linear, module).begin(recipe, cast(nn.Parameter, module.weight))
    for other in model.modules():
        if isinstance(other, nn.TransformerEncoderLayer) and {other.linear1, other.linear2} & {*chosen.values()}:
            other.activation_relu_or_gelu = 0  # Else where nothing trains it reads the weights, and calls no layer.
        if fuse and _is_plain_norm(other):
            other.__class__ = extended(RMSNorm, type(other))
    for other in model.modules():
        if any(isinstance(module, Linear | RMSNorm) and module is not other for module in other.modules()):
            follow_calls(other)
    return model


def _is_plain_norm(module: nn.Module) -> bool:
    """Whether it is an `nn.RMSNorm`, or of a subclass that keeps its `forward`, with a weight."""
    if not isinstance(module, nn.RMSNorm) or module.weight is None or "forward" in vars(module):
        return False
    return type(module).forward is nn.RMSNorm.forward and not copyreg._slotnames(type(module))  # type: ignore[attr-defined]


def _weight(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _listed(left: dict[str, str]) -> str:
    listed = [f"{name or 'it'} ({why})" for name, why in left.items()][:_SHOWN]
    return ", ".join(listed) + (f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else "")


def _check_not_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, DistributedDataParallel | FullyShardedDataParallel)
            or "_flat_param" in module._parameters
        ):
            kind = "FullyShardedDataParallel" if "_flat_param" in module._parameters else type(module).__name__
            raise ValueError(
                f"convert: {name or 'model'} ({kind}) has taken the weights of its layers; convert the model before it "
                "is wrapped"
            )


def _kind_of(kind: type[nn.Module]) -> type[Linear]:
    return QuantizedHead if issubclass(kind, LinearCrossEntropy) else Linear


def _unfit(layer: nn.Linear, recipe: Recipe) -> str | None:
    """Why a layer has to stay as it is."""
    kind, weight = type(layer), layer._parameters.get("weight")
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight"
    if kind.forward not in (nn.Linear.forward, Linear.forward, LinearCrossEntropy.forward, QuantizedHead.forward):
        return f"{kind.__name__} overrides forward"
    if issubclass(kind, LinearCrossEntropy) and recipe.stateful:
        return f"chunks of its rows have no scales of {type(recipe).__name__}"
    if "forward" in vars(layer):
        return "its forward was replaced"
    if weight is None or parametrize.is_parametrized(layer):
        return "its weight is computed"
    if isinstance(weight, nn.UninitializedParameter):
        return "lazy, without a shape before its first call"
    if not isinstance(weight, DTensor) and type(weight) not in (nn.Parameter, ShardedWeight):
        return f"its weight is a {type(weight).__name__}"
    try:
        extended(_kind_of(kind), kind)
    except TypeError as error:
        return f"cannot be extended: {error}"
    return None


def _tied(model: nn.Module, chosen: dict[str, nn.Linear]) -> dict[str, str]:
    """Of those chosen, the layers whose weight something else uses too, which would not know what to do with codes."""
    taken = set(map(id, chosen.values()))
    others: dict[int, str] = {}
    for name, module in model.named_modules():
        for kind, parameter in module._parameters.items():
            if id(module) not in taken or kind != "weight":
                others[id(parameter)] = f"{name}.{kind}" if name else kind
    return {name: f"tied to {others[id(layer.weight)]}" for name, layer in chosen.items() if id(layer.weight) in others}


def _check(name: str, weight: Tensor, recipe: Recipe) -> None:
    if isinstance(weight, DTensor):
        raise ValueError(f"convert: {name} (DTensor) is not a plain tensor; convert before sharding the model")
    held: Any = weight
    referred = weakref.getweakrefs(held) and not (isinstance(weight, ShardedWeight) and weight.scale_state.primary)
    if held._use_count() > 1 or referred or "_fsdp_flattened" in vars(held):
        raise ValueError(
            f"convert: {name} (held by DistributedDataParallel, FullyShardedDataParallel or an autograd graph) is not "
            "free to be replaced; convert before wrapping the model, and drop losses and views of before"
        )
    try:
        check_dtype("convert", name, weight.dtype)
        check_weight_shape("convert", name, recipe, tuple(weight.shape))
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error}, or leave the layer out with filter=") from None
