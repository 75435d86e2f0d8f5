"""Flat parameters of FSDP1, of which the weights of layers are views."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.fsdp import FlatParameter


def flat_of(weight: Tensor) -> Tensor | None:
    """The flat parameter that `weight` is a view of; None if it is not.

    FSDP1 frees the memory of such a view after a pass, and fills it again before the next one, or the backward pass,
    reads it. So autograd keeps the view, as that of a plain layer, and no codes of it.
    """
    if type(weight) is not Tensor or not weight._is_view():
        return None
    base = weight._base
    return base if isinstance(base, FlatParameter) else None
