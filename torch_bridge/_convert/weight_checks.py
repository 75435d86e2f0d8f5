"""Checks of the weights that `convert` replaces, with one error for all weights that do not fit their recipe."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from qshard._core.layer_recipes import check_each
from qshard._core.operands import check_weight_shape
from qshard.recipes import Recipe
from qshard.torch_bridge._nn.weight_module import check_alone
from qshard.torch_bridge._quantized.validation import check_dtype


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
    chosen = [*weights]
    for name, weight, _, _, is_local, _ in chosen:
        if isinstance(weight, DTensor) and not is_local:
            raise ValueError(f"convert: {name} (DTensor) is not a plain tensor; convert before sharding the model")
        check_alone(name, weight)

    def check(each: ChosenWeight) -> None:
        check_dtype("convert", each.name, each.weight.dtype)
        check_weight_shape("convert", each.name + ".T" * each.is_transposed, each.recipe, each.shape)

    checks = {each.name: functools.partial(check, each) for each in chosen}
    check_each(checks, ", or exclude the layer with filter=")
