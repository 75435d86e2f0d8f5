"""`Conv1D`: the quantized form of GPT-2's linear layer in Hugging Face's transformers, with a weight `[in, out]`.

This module does not import transformers. It recognizes the class by its name and by the code of its `forward`.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from qshard.torch_bridge._nn.linear import WeightLayer


class Conv1D(WeightLayer):
    """Linear layer `y = x @ weight + bias` with quantized operands and a weight that is stored as `[in, out]`."""

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

    Its `forward` reads `nf` and calls `torch.addmm`. A convolution named `Conv1D` does neither.
    """
    for base in kind.__mro__:
        code = getattr(vars(base).get("forward"), "__code__", None)
        if base.__name__ == "Conv1D" and code is not None and {"addmm", "nf"} <= set(code.co_names):
            return base
    return None
