"""Decides how a call runs: traced by a compiler, captured in a CUDA graph, or eagerly, past the dispatcher or not.

No other module asks torch.

    is_compiling               the graph gets ops of `torch.ops.qshard` and functional collectives
    is_capturing               nothing waits for the device, and no memory of before the capture is read
    may_skip_dispatcher        an op calls its handler (`bind.py`), and recorded steps are one call (`programs.py`)
    are_plain                  layers may use kernels of qshard in place of PyTorch's
    may_reuse                  a later call may use the results of this one
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.compiler import is_compiling

from qshard.torch_bridge._torch_internals import in_functorch, is_observed

__all__ = ["are_plain", "is_capturing", "is_compiling", "may_reuse", "may_skip_dispatcher"]

_PLAIN = (Tensor, torch.nn.Parameter)


def is_capturing(device: torch.device) -> bool:
    """Returns True if work on a device is captured in a CUDA graph, and does not run now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def may_skip_dispatcher(tensors: Iterable[Tensor]) -> bool:
    """Returns True if a call on these tensors may go straight to handlers.

    Not while a compiler or `torch.jit` traces, a profiler records, under a mode of dispatch or of functions, or in a
    transform of functorch; nor for tensors that stand for others. Autograd has no part in it: no op has a derivative.

    >>> x = torch.ones(1)
    >>> may_skip_dispatcher([x, torch.nn.Parameter(x)]), may_skip_dispatcher([x, x.to("meta")])
    (True, False)
    """
    if is_compiling() or is_observed():
        return False
    for x in tensors:  # noqa: SIM110, since a generator takes longer, and this is asked in every call.
        if type(x) not in _PLAIN or not (x.is_cuda or x.is_cpu):
            return False
    return True


def are_plain(*tensors: Tensor) -> bool:
    """Returns True for plain tensors in memory, if no compiler or transform is at work."""
    if is_compiling() or in_functorch():
        return False
    return all(type(x) in _PLAIN and (x.is_cuda or x.is_cpu) for x in tensors)


def may_reuse(tensor: Tensor) -> bool:
    """Returns True if a result that was computed from `tensor` may be kept for a later call.

    A compiler merges equal ops itself, and a captured graph must not read memory that was written before the capture.
    """
    return not is_compiling() and not is_capturing(tensor.device)
