"""Whether anyone looks on while ops run: a compiler, a profiler, a mode, a transform, or the tensors themselves."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_modes, _function_modes = torch._C._len_torch_dispatch_stack, torch._C._len_torch_function_stack
_functorch_level, _jit_state = torch._C._functorch.maybe_current_level, torch._C._get_tracing_state
_profiler_is_on = torch._C._autograd._profiler_enabled
_PLAIN = (Tensor, torch.nn.Parameter)


def nobody_looks_on(tensors: Iterable[Tensor]) -> bool:
    """Whether a call on these tensors may go straight to handlers, past the dispatcher of torch.

    Not while a compiler or `torch.jit` traces, a profiler records, under a mode of dispatch or of functions, or in a
    transform of functorch; nor for tensors that stand for others. Autograd is not asked: no op has a derivative.

    >>> x = torch.ones(1)
    >>> nobody_looks_on([x, torch.nn.Parameter(x)]), nobody_looks_on([x, x.to("meta")])
    (True, False)
    """
    if torch.compiler.is_compiling() or _modes() or _function_modes():
        return False
    if _profiler_is_on() or _functorch_level() is not None or _jit_state() is not None:
        return False
    for x in tensors:  # noqa: SIM110, since a generator takes longer, and this is asked in every call.
        if type(x) not in _PLAIN or not (x.is_cuda or x.is_cpu):
            return False
    return True
