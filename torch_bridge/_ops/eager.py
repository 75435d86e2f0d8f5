"""Checks of the execution mode: traced by a compiler, captured in a CUDA graph, or eager.

All other modules use these checks instead of torch's.

    is_compiling               the graph gets ops of `torch.ops.qshard` and functional collectives
    is_exporting               the graph runs without autograd nodes of Python
    is_capturing               no host synchronization, and no reads of memory from before the capture
    may_skip_dispatcher        an op calls its handler directly (`bind.py`), recorded steps are one call (`programs.py`)
    are_plain                  layers may use qshard's kernels instead of PyTorch's
    may_reuse                  a later call may use the results of this one
    autocast_dtype             the dtype that torch.autocast gives to products, if it is on
    without_autocast           a context that turns autocast off
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling

from qshard.torch_bridge._torch_internals import in_functorch, is_observed

__all__ = [
    "are_plain",
    "autocast_dtype",
    "is_capturing",
    "is_compiling",
    "is_exporting",
    "may_reuse",
    "may_skip_dispatcher",
    "without_autocast",
]

_PLAIN = frozenset((Tensor, torch.nn.Parameter))


def is_exporting() -> bool:
    """Return True while `torch.export` traces. False under Dynamo, which could not trace the check."""
    return is_compiling() and not is_dynamo_compiling() and torch.compiler.is_exporting()


def is_capturing(device: torch.device) -> bool:
    """Return True if work on a device is being captured in a CUDA graph, so that it does not run now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def may_skip_dispatcher(tensors: Sequence[Tensor]) -> bool:
    """Return True if a call on these tensors may bypass torch's dispatcher.

    It may not while a compiler or `torch.jit` traces, a profiler records, a dispatch mode, function mode or functorch
    transform is active, nor on tensor subclasses. Autograd does not matter, because ops have no derivatives. Only the
    device of the first tensor counts: ops check that all tensors are on one device.

    >>> x = torch.ones(1)
    >>> may_skip_dispatcher([x, torch.nn.Parameter(x)]), may_skip_dispatcher([x.to("meta")])
    (True, False)
    """
    if is_compiling() or is_observed() or not _PLAIN.issuperset(map(type, tensors)):
        return False
    return not tensors or tensors[0].is_cpu or tensors[0].is_cuda


def are_plain(*tensors: Tensor) -> bool:
    """Return True for plain tensors in memory, if no compiler or functorch transform is active."""
    if is_compiling() or in_functorch():
        return False
    return all(type(x) in _PLAIN and (x.is_cuda or x.is_cpu) for x in tensors)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast gives to products on a device; None if it is off, as always on meta."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):  # PyTorch raises for meta.
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[None]:
    """Return a context that turns autocast off on a device, so that products keep the dtype of their operands."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)


def may_reuse(tensor: Tensor) -> bool:
    """Return True if a result computed from `tensor` may be cached for a later call.

    A compiler merges equal ops itself, and a captured graph must not read memory that was written before the capture.
    """
    return not is_compiling() and not is_capturing(tensor.device)
