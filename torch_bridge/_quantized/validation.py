"""Checks of tensors, dtypes, models and process groups passed by users, with one error text for each mistake."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qshard._core.validation import already_quantized, check_float, quote
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._quantized.tensor import FLOAT_DTYPES, QuantizedTensor


def check_tensor(op: str, name: str, x: Any, *, sharded: str = "") -> None:
    """Raise TypeError unless `x` is a plain, dense float tensor. `sharded` is advice for a DTensor.

    >>> check_tensor("quantize", "x", [1.0])
    Traceback (most recent call last):
    TypeError: quantize: x ([1.0]) is not a torch.Tensor; pass torch.tensor(x)
    """
    if not isinstance(x, Tensor):
        make = "tensor"
        if hasattr(x, "__dlpack__"):
            make = "from_numpy" if type(x).__module__ == "numpy" else "from_dlpack"
        raise TypeError(f"{op}: {name} ({quote(x)}) is not a torch.Tensor; pass torch.{make}({name})")
    if isinstance(x, DTensor):
        raise TypeError(f"{op}: {name} (DTensor) is not a plain tensor; {sharded or f'pass {name}.to_local()'}")
    if isinstance(x, QuantizedTensor):
        raise TypeError(already_quantized(op, name, x))
    if x.layout is not torch.strided:
        kind = str(x.layout).removeprefix("torch.")
        raise TypeError(f"{op}: {name} ({kind}) is not dense; pass {name}.to_dense(), or a padded tensor")
    check_dtype(op, name, x.dtype)


def check_dtype(op: str, name: str, dtype: torch.dtype) -> None:
    if dtype not in FLOAT_DTYPES:
        check_float(op, name, dtype_name(dtype))


def check_contiguous(op: str, name: str, x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError(f"{op}: {name} (strides {tuple(x.stride())}) is not contiguous; call .contiguous() on it")


def check_model(op: str, model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{op}: model ({quote(model)}) is not a torch.nn.Module; pass the module itself")


def check_group(op: str, group: Any) -> None:
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            f"{op}: group ({quote(group)}) is not a ProcessGroup; pass one of torch.distributed, or mesh.get_group()"
        )
