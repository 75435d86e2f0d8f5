"""`convert`: replaces the linear layers of a model by quantized layers, in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from qshard._core.layer_recipes import NO_PATTERN, RecipesLike, Rules, check_chosen, check_function, warn_of_rest
from qshard.recipes import NO_PRODUCTS, Recipe
from qshard.torch_bridge._convert.experts import convert_experts, is_experts, unfit_experts, weights_of_experts
from qshard.torch_bridge._convert.fusion import fuse_module
from qshard.torch_bridge._convert.survey import Candidate, Conv1D, conv1d_class, survey
from qshard.torch_bridge._convert.weight_checks import ChosenWeight, check_weights
from qshard.torch_bridge._distributed.fsdp1 import wrapper_of
from qshard.torch_bridge._experts.layer import unfit_grouped_layers
from qshard.torch_bridge._fsdp.weight import ShardedWeight
from qshard.torch_bridge._losses.heads import LinearCrossEntropy, QuantizedHead
from qshard.torch_bridge._modules import extend_class
from qshard.torch_bridge._nn.fused_modules import FusedRMSNorm, RMSNorm
from qshard.torch_bridge._nn.linear import Linear, WeightLayer
from qshard.torch_bridge._nn.module_calls import follow_calls
from qshard.torch_bridge._nn.weight_module import check_not_sealed, replace_parameter, wrap_weight
from qshard.torch_bridge._quantized.device_moves import guard_moves
from qshard.torch_bridge._quantized.validation import check_model


def convert(
    model: nn.Module,
    recipe: RecipesLike,
    filter: Callable[[Any, str], bool] | None = None,
    *,
    primary: bool = False,
    fuse: bool = False,
) -> nn.Module:
    """Turn every `nn.Linear` of `model` into a `Linear`, in place: module objects, hooks, names and values stay.

    `Conv1D` layers of Hugging Face's GPT-2 are converted too, and their weights stay `[in, out]`. So are experts in 3-D
    parameters, of transformers 5 (Mixtral, Qwen3-MoE, gpt-oss and others) and of torchtitan: their products run through
    `grouped_linear`, and FSDP2 and ZeRO gather their codes. Every module above a converted layer gets two hooks that
    mark the beginning and end of its calls. During a call, layers that receive the same x share its codes. Therefore
    also call `convert` on a model that is built from `Linear` directly.

    Layers of a subclass that does not override `nn.Linear.forward` stay instances of it, with its methods and
    attributes. Parameters stay the same objects, so existing optimizers keep training them. Weights shared by several
    layers stay shared. A `Linear` gets the new recipe, and a `LinearCrossEntropy` still returns the loss. `fully_shard`
    accepts weights with 2-D blocks or per-tensor scales. It rejects 1-D blocks, because then the columnwise plane has
    other numbers than the rowwise plane.

    One warning names all weights that stay in high precision, with the reason and what to do, unless `filter` or a
    pattern excludes them. A linear layer is not converted if it overrides `forward`, if its weight is computed
    (parametrized, pruned), has no shape yet (lazy), or also belongs to another kind of module, such as an embedding.
    Experts in 3-D parameters are not converted if their class is unknown or the recipe is `DelayedScaling`. The warning
    also names other modules with a floating-point parameter of two axes or more: `nn.MultiheadAttention`, convolutions,
    recurrent layers. It does not name embeddings and norms.

    Args:
      model: on any device, also meta. Call `convert` before `parallelize_module`, `fully_shard` or
        DistributedDataParallel.
      recipe: the format of each role, or the name of a recipe, such as "CurrentScaling". Or a mapping from name
        patterns to recipes, such as `{"*.experts.*": "BlockScaling", "layers[-15%:].*": None, "*": "MXFP8"}`, where
        None keeps layers in high precision. docs/quickstart.md has the patterns.
      filter: called with each module with weights and its qualified name. If it returns False, the module is not
        converted and not named in the warning. `filter=lambda layer, name: "lora_" not in name` excludes the adapters
        of peft.
      primary: keep weights as codes. Then `fully_shard` must follow, also on one rank. `Adam`, or any optimizer in
        `WithMasters`, has the float32 masters, initialized from the current weights, and `state_dict` returns their
        values. Weights are quantized once a step, and gathers do not cast.
      fuse: also run norms and MLPs in fused kernels, which compute the amax for the next layer along with their
        result: `nn.RMSNorm` with a weight, and modules of other libraries that compute an RMSNorm or
        `down(silu(gate(x)) * up(x))`, such as `LlamaRMSNorm` and `LlamaMLP` of transformers. They stay instances of
        their class. The last bits of norms change, because sums have another order.

    Returns:
      `model`.

    Raises:
      TypeError: a weight is not float32, bfloat16 or float16, or an argument has the wrong type.
      ValueError: there is nothing to convert; a weight is already sharded, held by a wrapper or by an autograd graph,
        not whole blocks of the recipe's formats, or shared by layers with two recipes; or a pattern matches no layer,
        or only layers that an earlier pattern matches, or has None for a converted layer. The model is then unchanged.

    >>> from qshard.recipes import CurrentScaling
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> convert(model, CurrentScaling(), filter=lambda layer, name: name != "2")
    Sequential(
      (0): Linear(in_features=4, out_features=8, bias=True, recipe=CurrentScaling())
      (1): ReLU()
      (2): Linear(in_features=8, out_features=2, bias=True)
    )
    """
    check_model("convert", model)
    every = [name for name, _ in model.named_modules()]
    rules = Rules.of(recipe, "convert", every)
    if filter is not None:
        check_function("convert", "filter", filter)
    _check_not_wrapped(model)
    candidates = survey(model)
    rules.check_used([each.names for each in candidates.values()], every)
    converted = {name: each for name, each in candidates.items() if getattr(each.module, "recipe", None) is not None}
    rules.check_kept({name: (cast(Any, each.module).recipe, each.names) for name, each in converted.items()})
    recipes: dict[str, Recipe] = {}  # Recipes of convertible layers.
    reasons: dict[str, str] = {}
    modules = {name: (each.module, each.names, _is_linear(each)) for name, each in candidates.items()}
    for name, own in rules.choose(modules, filter):
        reason = candidates[name].why or (NO_PATTERN if own is None else unfit_layer(candidates[name].module, own))
        if reason is not None:
            reasons[name] = reason
        elif own is not None:
            recipes[name] = own
    unfit = unfit_grouped_layers(model, {candidates[name].module: own for name, own in recipes.items()})
    for name in [name for name in recipes if candidates[name].module in unfit]:
        del recipes[name]
        reasons[name] = unfit[candidates[name].module]
    experts = {name: candidates[name].module for name in recipes if is_experts(candidates[name].module)}
    linears = {name: candidates[name].module for name in recipes if name not in experts}
    tied = _find_tied(model, linears)
    reasons = {name: reason for name in candidates if (reason := tied.get(name, reasons.get(name))) is not None}
    chosen = {name: cast(nn.Linear, layer) for name, layer in linears.items() if name not in tied}
    check_chosen("convert", model, {*chosen, *experts}, reasons, "nn.Linear")
    check_weights(_weights_of(chosen, experts, recipes))
    _check_shared(chosen, recipes)
    weights: dict[Tensor, nn.Parameter] = {}
    for name, module in chosen.items():
        if module.weight not in weights:
            weights[module.weight] = wrap_weight(module.weight, recipes[name], _weight(name), model, primary)
    warn_of_rest("convert", {*chosen, *experts}, reasons)
    for weight, wrapped in weights.items():
        replace_parameter(cast(nn.Parameter, weight), wrapped)
    for name, module in chosen.items():
        cast(Any, module).__class__ = extend_class(_kind_of(type(module)), type(module))
        cast(WeightLayer, module).begin(recipes[name], cast(nn.Parameter, module.weight))
    for name, other in experts.items():
        convert_experts(name, other, recipes[name], model, primary)
    for other in model.modules():
        if isinstance(other, nn.TransformerEncoderLayer) and {other.linear1, other.linear2} & {*chosen.values()}:
            # Its inference fast path would read the weights without calling the layers.
            other.activation_relu_or_gelu = 0
        if fuse:
            fuse_module(other)
    for other in model.modules():
        if any(isinstance(module, _FOLLOWED) and module is not other for module in other.modules()):
            follow_calls(other)
    if primary:
        guard_moves(model, check_not_sealed)
    return model


_FOLLOWED = (WeightLayer, RMSNorm, FusedRMSNorm)
"""Modules that cache codes or amaxes, which are valid during the calls of the modules above them."""


def _is_linear(candidate: Candidate) -> bool:
    return candidate.why is None and not is_experts(candidate.module)


def _weight(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _check_not_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (wrapper := wrapper_of(module)) is not None:
            raise ValueError(
                f"convert: {name or 'model'} ({wrapper}) has already taken the weights of its layers; convert the "
                "model before wrapping it"
            )


def _kind_of(kind: type[nn.Module]) -> type[WeightLayer]:
    if not issubclass(kind, nn.Linear):
        return Conv1D
    return QuantizedHead if issubclass(kind, LinearCrossEntropy) else Linear


def unfit_layer(layer: nn.Module, recipe: Recipe) -> str | None:
    """Return the reason why a linear layer, or known experts, cannot have a recipe, or None."""
    if is_experts(layer):
        return unfit_experts(layer, recipe)
    kind, weight = type(layer), layer._parameters.get("weight")
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "nn.MultiheadAttention reads its weight"
    known: list[Any] = [nn.Linear.forward, Linear.forward, LinearCrossEntropy.forward, QuantizedHead.forward]
    if not isinstance(layer, nn.Linear):
        known = [Conv1D.forward, getattr(conv1d_class(kind), "forward", None)]
    if kind.forward not in known:
        return f"{kind.__name__} overrides forward"
    if issubclass(kind, LinearCrossEntropy) and recipe.by_product:
        return f"{recipe} {NO_PRODUCTS}"
    if issubclass(kind, LinearCrossEntropy) and recipe.stateful:
        return f"{type(recipe).__name__} has no scales for chunks of its rows"
    if "forward" in vars(layer):
        return "its forward was replaced"
    if weight is None or parametrize.is_parametrized(layer):
        return "its weight is computed"
    if isinstance(weight, nn.UninitializedParameter):
        return "lazy, with no shape before its first call"
    if not isinstance(weight, DTensor) and type(weight) not in (nn.Parameter, ShardedWeight):
        return f"its weight is a {type(weight).__name__}"
    try:
        extend_class(_kind_of(kind), kind)
    except TypeError as error:
        return f"cannot be extended: {error}"
    return None


def _find_tied(model: nn.Module, chosen: dict[str, nn.Module]) -> dict[str, str]:
    """Return the layers that share a weight with another module, which cannot use codes, and the reason."""
    taken = set(map(id, chosen.values()))
    others: dict[int, str] = {}
    for name, module in model.named_modules():
        for kind, parameter in module._parameters.items():
            if id(module) not in taken or kind != "weight":
                others[id(parameter)] = f"{name}.{kind}" if name else kind
    return {name: f"tied to {others[id(layer.weight)]}" for name, layer in chosen.items() if id(layer.weight) in others}


def _weights_of(
    linears: Mapping[str, nn.Linear], experts: Mapping[str, nn.Module], recipes: Mapping[str, Recipe]
) -> Iterator[ChosenWeight]:
    for name, layer in linears.items():
        is_kn, shape = _layout(layer) == "KN", tuple(layer.weight.shape)
        yield ChosenWeight(
            _weight(name), layer.weight, shape[::-1] if is_kn else shape, recipes[name], is_transposed=is_kn
        )
    for name, module in experts.items():
        yield from weights_of_experts(name, module, recipes[name])


def _check_shared(chosen: dict[str, nn.Linear], recipes: dict[str, Recipe]) -> None:
    first: dict[Tensor, str] = {}
    for name, layer in chosen.items():
        other = first.setdefault(layer.weight, name)
        if recipes[other] != recipes[name] or _layout(chosen[other]) != _layout(layer):
            raise ValueError(
                f"convert: {_weight(name)} ({type(recipes[name]).__name__}) is also {_weight(other)} "
                f"({type(recipes[other]).__name__}), but a weight has one recipe; match both with one pattern"
            )


def _layout(layer: nn.Module) -> str:
    return _kind_of(type(layer)).weight_layout
