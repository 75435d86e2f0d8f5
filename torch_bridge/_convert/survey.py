"""Survey of a model: the layers that `convert` can convert, and the weights that it leaves in high precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize

from qshard._core.layer_recipes import is_name_of_table
from qshard.torch_bridge._convert.experts import is_experts, weight_names
from qshard.torch_bridge._moe.router import Router
from qshard.torch_bridge._nn.linear import WeightLayer
from qshard.torch_bridge._torch_internals import BatchNormBase, ConvolutionBase


class Conv1D(WeightLayer):
    """Quantized form of GPT-2's linear layer in transformers: `y = x @ weight + bias`, with a weight `[in, out]`."""

    weight_layout = "KN"
    _of = nn.Module


def is_conv1d(module: nn.Module) -> bool:
    """Return True if `module` is a `Conv1D` of transformers, converted or not.

    >>> is_conv1d(nn.Conv1d(4, 4, 1))
    False
    """
    return isinstance(module, Conv1D) or conv1d_class(type(module)) is not None


def conv1d_class(kind: type[nn.Module]) -> Any:
    """Return the class `Conv1D` of transformers among the bases of `kind`, or None.

    Transformers is not imported. The `forward` of that class reads `nf` and calls `torch.addmm`; a convolution named
    `Conv1D` does neither.
    """
    for base in kind.__mro__:
        code = getattr(vars(base).get("forward"), "__code__", None)
        if base.__name__ == "Conv1D" and code is not None and {"addmm", "nf"} <= set(code.co_names):
            return base
    return None


_TABLES_AND_NORMS = (nn.Embedding, nn.EmbeddingBag, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, BatchNormBase)


class Candidate(NamedTuple):
    """A module with weights, its qualified name and the names of its weights. A pattern may match any of these `names`.

    `why` is the reason to leave the module, and what to do; None for a linear layer, and for known experts.
    """

    module: nn.Module
    names: tuple[str, ...]
    why: str | None


def survey(model: nn.Module) -> dict[str, Candidate]:
    """Return the modules with GEMM weights by qualified name, in the order of the model.

    A weight is a floating-point parameter with at least two axes longer than 1. Embeddings, norms and the router of
    `MoE` do not count. Whether a module multiplies by its weight cannot be detected.

    >>> model = nn.ModuleDict({"embed": nn.Embedding(8, 4), "conv": nn.Conv1d(4, 4, 3), "head": nn.Linear(4, 8)})
    >>> for name, (_, names, why) in survey(model).items():
    ...     print(name, names[1:], why)
    conv ('conv.weight',) convolutions are not supported
    head ('head.weight',) None
    """
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    of_attention = {id(attention.out_proj) for attention in attentions}  # Reported with in_proj_weight.
    tables = {id(p) for module in model.modules() if _is_table_or_norm(module) for p in module._parameters.values()}
    found: dict[str, Candidate] = {}
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, nn.Linear) or is_conv1d(module):
            if id(module) not in of_attention:
                found[name] = Candidate(module, (name, f"{prefix}weight"), None)
            continue
        if is_experts(module):
            found[name] = Candidate(module, (name, *(prefix + each for each in weight_names(module))), None)
            continue
        if _is_table_or_norm(module) or isinstance(module, parametrize.ParametrizationList | Router):
            continue
        own = name.rpartition(".")[2]
        weights = {
            each: parameter
            for each, parameter in _parameters_of(module)
            if id(parameter) not in tables and _is_weight(parameter) and not is_name_of_table(own, each)
        }
        if weights:
            found[name] = Candidate(module, (name, *(prefix + each for each in weights)), _why(module, weights))
    return found


def _parameters_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of a module itself, and the originals of its parametrized ones."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    if parametrize.is_parametrized(module):
        for name, steps in module.parametrizations.items():  # type: ignore[union-attr, operator]
            yield from ((name, parameter) for parameter in steps.parameters(recurse=False))


def _is_weight(parameter: Tensor) -> bool:
    if isinstance(parameter, UninitializedParameter):
        return True
    return parameter.is_floating_point() and sum(size > 1 for size in parameter.shape) > 1


def _is_table_or_norm(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return isinstance(module, _TABLES_AND_NORMS) or "embed" in kind or "norm" in kind


def _why(module: nn.Module, weights: Mapping[str, Tensor]) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return f"it multiplies {', '.join(weights)} (q, k, v) and out_proj itself; use nn.Linear for each"
    if isinstance(module, ConvolutionBase):
        return "convolutions are not supported"
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return "recurrent layers are not supported"
    if isinstance(module, nn.Bilinear):
        return "bilinear layers are not supported"
    names = ", ".join(weights)
    if any(not isinstance(w, UninitializedParameter) and w.ndim > 2 for w in weights.values()):
        return f"{names} with 3 axes, a weight per expert; use grouped_linear, or a GroupedLinear of nn.Linear layers"
    return f"{type(module).__name__} has its own {names}; for the weight of a product use nn.Linear"
