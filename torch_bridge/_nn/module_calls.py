"""Running module calls, which limit how long cached codes, amaxes and factors of a tensor are valid.

PyTorch does not see every write to a tensor. NumPy, DLPack, `x.data` and foreign kernels change values without changing
the object or its version counter. So codes of a tensor are reused only during one call of a module, because only the
`forward` of that module writes to the tensor meanwhile. `convert` registers two hooks, which open and close a call, on
every module above a converted layer or a fused norm. Outside such calls nothing is reused.

    codes of x, shared by layers    valid in the outermost running module that received x, else in the innermost one
    amax of a kernel's result       valid in the innermost module that ran then; in a backward pass, in that pass
                                    (`cache_amax`)
    amaxes of rows between nodes    valid for the next node of the same layer, which takes them (`pass_row_amaxes`)
                                    (compiled code passes them as operands: `_experts/fusion.py`)
    factors of a product            valid in the innermost running module that did not receive the product

One case is not covered: the `forward` of a module, or a hook inside it, writes to a tensor without PyTorch's knowledge,
between two layers that receive this same tensor. Write through the tensor itself there, or pass `x.clone()`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from qshard.torch_bridge._ops.eager import is_capturing, is_compiling
from qshard.torch_bridge._torch_internals import (
    backward_id,
    has_module_hooks,
    next_node_number,
    node_number,
    set_hook_id,
    stream_of,
)


class ModuleCall:
    """A call of a module, running or finished.

    `codes` are planes of the last x of its layers (`saved_input.py`), and `backward` is the number of the enclosing
    backward pass, as under activation checkpointing. Autograd nodes of the call have numbers from `first_node` on.
    """

    __slots__ = ("_inputs", "backward", "codes", "first_node", "is_open", "module", "outer")

    def __init__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], outer: ModuleCall | None):
        self.module, self.outer, self.is_open = id(module), outer, True
        self._inputs = [id(x) for x in (*inputs, *keywords.values())]  # The call keeps them alive, so ids stay unique.
        self.first_node = next_node_number()
        self.backward = backward_id()
        self.codes: Any = None

    def received(self, x: Tensor) -> bool:
        return id(x) in self._inputs


_AMAX, _ROW_AMAXES = "_qshard_amax", "_qshard_row_amaxes"


class _Thread(threading.local):
    innermost: ModuleCall | None = None


_thread = _Thread()


def running() -> Iterator[ModuleCall]:
    call = _thread.innermost
    while call is not None:
        yield call
        call = call.outer


def call_that_shares(x: Tensor) -> ModuleCall | None:
    """Return the call during which layers may share codes of x."""
    found = _thread.innermost
    for call in running():
        if not call.received(x):
            break
        found = call
    return found


def call_that_made(x: Tensor) -> ModuleCall | None:
    """Return the innermost running call that did not receive x, if x was computed in it."""
    for call in running():
        if not call.received(x):
            node = x.grad_fn
            return None if node is None or node_number(node) < call.first_node else call
    return None


def current_scope() -> ModuleCall | int | None:
    """Return the call or the backward pass that this thread runs, or None."""
    call, backward = _thread.innermost, backward_id()
    if backward is not None and (call is None or call.backward != backward):
        return backward
    return call


def is_current(scope: ModuleCall | int) -> bool:
    return scope.is_open if isinstance(scope, ModuleCall) else scope == backward_id()


def cache_amax(x: Tensor, amax: Tensor) -> None:
    """Cache the amax `[]` of `x` as an attribute of `x`, with the version of `x`, so that a later write voids it."""
    when = current_scope()
    if when is not None and type(x) is Tensor and not x.is_inference():
        setattr(x, _AMAX, (x._version, _stream_of(x), when, amax))


def cached_amax(x: Tensor) -> Tensor | None:
    """Return the cached amax of this tensor object, or None.

    It is valid on the stream that computed it, while the same module call or backward pass runs, unless PyTorch saw a
    write to x. A captured CUDA graph does not use amaxes from before its capture.
    """
    if is_compiling():
        return None
    cached: Any = x.__dict__.get(_AMAX)
    if cached is None or cached[:2] != (x._version, _stream_of(x)) or not is_current(cached[2]):
        return None
    amax: Tensor = cached[3]
    return amax


def pass_row_amaxes(x: Tensor, amaxes: Tensor) -> None:
    """Attach the amaxes of the rows of `x`, fp32 `[rows]`, for the next node of the same layer, which receives `x`."""
    if not is_compiling() and type(x) is Tensor and not x.is_inference():
        setattr(x, _ROW_AMAXES, (x._version, _stream_of(x), amaxes))


def take_row_amaxes(x: Tensor) -> Tensor | None:
    """Detach and return the amaxes of the rows of this tensor object; None if unknown, or if PyTorch saw a write."""
    if is_compiling():
        return None
    found: Any = x.__dict__.pop(_ROW_AMAXES, None)
    if found is None or found[:2] != (x._version, _stream_of(x)):
        return None
    amaxes: Tensor = found[2]
    return amaxes


def _stream_of(x: Tensor) -> tuple[int, bool] | None:
    stream = stream_of(x)
    return None if stream is None else (stream, is_capturing(x.device))


_HOOK_ID = -1


def follow_calls(module: nn.Module) -> None:
    if not any(hook is _open_call for hook in module._forward_pre_hooks.values()):
        set_hook_id(module.register_forward_pre_hook(_open_call, with_kwargs=True), _HOOK_ID)
        set_hook_id(module.register_forward_hook(_close_call, always_call=True), _HOOK_ID)


def has_hooks(module: nn.Module) -> bool:
    """Return True if a module has hooks of others. They may read or change its arguments, results and gradients."""
    return has_module_hooks(module, (_open_call, _close_call))


def _open_call(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    if not is_compiling():
        _close(module)  # A KeyboardInterrupt skips the closing hook.
        _thread.innermost = ModuleCall(module, inputs, keywords, _thread.innermost)


def _close_call(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
    if not is_compiling():
        _close(module)


def _close(module: nn.Module) -> None:
    """Close the last running call of a module and all calls within it."""
    calls: list[ModuleCall] = []
    for call in running():
        calls.append(call)
        if call.module == id(module):
            for each in calls:
                each.is_open, each.codes = False, None
            _thread.innermost = call.outer
            return
