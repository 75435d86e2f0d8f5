"""Checks of the weights that `convert` replaces. One error names all weights that do not fit their recipe."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.name_patterns import without_numbers
from qshard._core.operands import check_weight_shape
from qshard.recipes import Recipe
from qshard.torch_bridge._nn.weight_module import check_alone
from qshard.torch_bridge._quantized.validation import check_dtype

_NAMED = 4  # names in an error


class ChosenWeight(NamedTuple):
    """A weight to replace.

    Attributes:
      shape: the shape `[N, K]` of the weight, or of one expert in it.
      is_local: True for the experts of this rank; the weight may then be a DTensor.
      is_transposed: `weight` is `[K, N]`; the error says so.
    """

    name: str
    weight: Tensor
    shape: tuple[int, ...]
    recipe: Recipe
    is_local: bool = False
    is_transposed: bool = False


def check_weights(weights: Iterable[ChosenWeight]) -> None:
    """Raise unless all weights are plain tensors that nothing else holds, and have whole blocks of their recipes."""
    misfits: dict[str, TypeError | ValueError] = {}
    for name, weight, shape, recipe, is_local, is_transposed in weights:
        if isinstance(weight, DTensor) and not is_local:
            raise ValueError(f"convert: {name} (DTensor) is not a plain tensor; convert before sharding the model")
        check_alone(name, weight)
        try:
            check_dtype("convert", name, weight.dtype)
            check_weight_shape("convert", f"{name}.T" if is_transposed else name, recipe, shape)
        except (TypeError, ValueError) as error:
            misfits[name] = error
    if misfits:
        raise _error_of(misfits)


def _error_of(misfits: dict[str, TypeError | ValueError]) -> TypeError | ValueError:
    """Return the error of the first weight, with the names of all; of many, one of those that differ in numbers."""
    alike: dict[str, str] = {}
    for name in misfits:
        alike.setdefault(without_numbers(name), name)
    names = [*misfits] if len(misfits) <= _NAMED else [*alike.values()][:_NAMED]
    first = next(iter(misfits.values()))
    text = f"{first}, or exclude the layer with filter="
    if len(misfits) > 1:
        text += f"; {len(misfits)} weights do not fit: {', '.join(names)}"
    if len(names) < len(misfits):
        text += " and alike"
    return type(first)(text)
