"""Amaxes that were taken of tensors as they were made, for whoever quantizes them next.

They are noted on the tensor itself, with its version: they die with it, and a write to it in place makes them void.
PyTorch does not see every write, so an amax is valid only during the call of a module, or the backward pass, that made
the tensor (`module_calls.py`). Another stream does not wait for them, and a CUDA graph does not read tensors of before.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qshard.torch_bridge._nn.module_calls import is_now, moment
from qshard.torch_bridge._ops.eager import is_capturing, is_compiling

_NAME = "_qshard_amax"


def cache_amax(x: Tensor, amax: Tensor) -> None:
    """Notes the largest magnitude in `x`, `[]`."""
    when = moment()
    if when is not None and type(x) is Tensor and not x.is_inference():
        setattr(x, _NAME, (x._version, _stream_of(x), when, amax))


def cached_amax(x: Tensor) -> Tensor | None:
    """The amax of this very tensor, if PyTorch saw no write to it since, and the call that made it still runs."""
    if is_compiling():
        return None
    noted: Any = x.__dict__.get(_NAME)
    if noted is None or noted[:2] != (x._version, _stream_of(x)) or not is_now(noted[2]):
        return None
    amax: Tensor = noted[3]
    return amax


def _stream_of(x: Tensor) -> tuple[int, bool] | None:
    """Where work on x goes now, and whether it is captured."""
    if not x.is_cuda:
        return None
    return torch.cuda.current_stream(x.device).cuda_stream, is_capturing(x.device)
