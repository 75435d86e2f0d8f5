"""`Conv1D`, the linear layer of GPT-2 in Hugging Face's transformers, with a weight of `[in, out]`.

This module does not import transformers: it recognizes a class by its name and by what its `forward` calls.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from qshard.torch_bridge._nn.linear import WeightLayer


class Conv1D(WeightLayer):
    """`y = x @ weight + bias` with quantized products. The weight lies, is gathered and is saved as `[in, out]`."""

    weight_layout = "KN"
    _of = nn.Module


def is_conv1d(module: nn.Module) -> bool:
    """Whether `module` is a `Conv1D` of transformers, converted or not.

    >>> is_conv1d(nn.Conv1d(4, 4, 1))
    False
    """
    return isinstance(module, Conv1D) or conv1d_class(type(module)) is not None


def conv1d_class(kind: type[nn.Module]) -> Any:
    """The class `Conv1D` of transformers among the bases of `kind`; None without one.

    Its `forward` reads `nf` and calls `torch.addmm`. A convolution with the name `Conv1D` does neither.
    """
    for base in kind.__mro__:
        code = getattr(vars(base).get("forward"), "__code__", None)
        if base.__name__ == "Conv1D" and code is not None and {"addmm", "nf"} <= set(code.co_names):
            return base
    return None
