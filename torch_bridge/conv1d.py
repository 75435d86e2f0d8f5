"""`Conv1D`: the layer of GPT-2 in Hugging Face's transformers, a linear layer whose weight is `[in, out]`.

transformers is not imported: a class is known by its name, its attributes and what its `forward` calls.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from qshard.torch_bridge.nn import WeightLayer


class Conv1D(WeightLayer):
    """`y = x @ weight + bias` with quantized products. The weight lies, is gathered and is saved as `[in, out]`."""

    weight_layout = "KN"
    _of = nn.Module


def is_conv1d(module: nn.Module) -> bool:
    """Whether it is a `Conv1D` of transformers, of a subclass too, or what `convert` made of one.

    >>> is_conv1d(nn.Conv1d(4, 4, 1))
    False
    """
    return isinstance(module, Conv1D) or conv1d_class(type(module)) is not None


def conv1d_class(kind: type[nn.Module]) -> Any:
    """The `Conv1D` that `kind` is or extends; None if there is none.

    That of transformers has `nf` outputs, and calls `torch.addmm`. Convolutions of that name do neither.
    """
    for base in kind.__mro__:
        code = getattr(vars(base).get("forward"), "__code__", None)
        if base.__name__ == "Conv1D" and code is not None and {"addmm", "nf"} <= set(code.co_names):
            return base
    return None
