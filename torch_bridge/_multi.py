"""Every op on lists of tensors as `torch.ops.qshard.<op>`: one call, and a constant number of launches, for a model.

Such an op returns nothing. It changes operands in place, those that `ffi/ops.def` names as its results, and its schema
says which: `torch.compile` and graph capture see what is written. Optional lists may be empty, as the op's attributes
say; all others have one length.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qshard import _ffi
from qshard.ops import OpSpec, multi_table
from qshard.torch_bridge._ops import dtype_name, seen_size

__all__ = ["bind", "call_in_place", "ops"]

_LIBRARY = torch.library.Library("qshard", "FRAGMENT")
_HANDLERS = {"CPU": _ffi.handlers("cpu"), "CUDA": _ffi.handlers("cuda")}


def call_in_place(op: str, operands: Sequence[Tensor | Sequence[Tensor]], attributes: Mapping[str, Any]) -> None:
    """Runs an op on lists of tensors, on the current stream.

    Args:
      op: a name in `qshard.ops.multi_table()`.
      operands: a tensor, or a list of them, for each operand; plain and contiguous, on one device.
      attributes: exactly those of the op.

    Raises:
      ValueError, TypeError: the handler does not take these tensors; nothing was written.

    No autograd, no tracing.
    """
    spec = multi_table()[op]
    inputs, outputs = _flat(spec, operands)
    if not outputs:
        return
    handlers = _HANDLERS["CUDA" if outputs[0].is_cuda else "CPU"]
    if not outputs[0].is_cuda:
        _ffi.follow_num_threads(torch.get_num_threads())
    if not handlers:
        raise NotImplementedError(
            f"{op}: device ({outputs[0].device}) is not one that this build of qshard has kernels for; "
            "build it where nvcc is found, or move the tensors to the CPU"
        )
    try:
        _ffi.call(handlers[op], inputs, outputs, attributes)
    except ValueError as error:
        raise _named(spec, operands, error) from None
    torch.autograd.graph.increment_version([t for t in outputs if not t.is_inference()])


def _flat(spec: OpSpec, operands: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """All tensors in order, and those that are written."""
    written = {operand.name for operand in spec.outputs}
    lists = [
        (operand.name in written, tensors if operand.many else (tensors,))
        for operand, tensors in zip(spec.inputs, operands, strict=True)
    ]
    return [t for _, tensors in lists for t in tensors], [t for is_written, ts in lists if is_written for t in ts]


def bind(spec: OpSpec) -> Callable[..., None]:
    """Makes the torch op of `spec`: a mutating schema, a fake implementation that checks operands, and the handler.

    Arguments are the operands, then by keyword the attributes.

    Args:
      spec: a row of `qshard.ops.multi_table()`.

    Returns:
      `torch.ops.qshard.<name>`, which returns None.
    """
    names = sorted(spec.attributes)

    def run(*operands: Any, **attributes: Any) -> None:
        for operand, tensors in zip(spec.inputs, operands, strict=True):
            for t in tensors if operand.many else (tensors,):
                if t.requires_grad and torch.is_grad_enabled():
                    raise ValueError(
                        f"{spec.name}: {operand.name} (requires grad) is not data alone, and the op has no derivative; "
                        "pass .detach(), or call it under torch.no_grad()"
                    )
        call_in_place(spec.name, operands, {name: attributes[name] for name in names})

    def fake(*operands: Any, **attributes: Any) -> None:
        inputs, outputs = _flat(spec, operands)
        if outputs:
            spec.results(
                [tuple(map(seen_size, t.shape)) for t in inputs], [dtype_name(t.dtype) for t in inputs], attributes
            )

    _LIBRARY.define(_schema(spec), tags=[torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag])
    for device in _HANDLERS:
        _LIBRARY.impl(spec.name, run, device)
    torch.library.register_fake(f"qshard::{spec.name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.qshard, spec.name)  # type: ignore[no-any-return]


def _schema(spec: OpSpec) -> str:
    written = {operand.name for operand in spec.outputs}
    aliases = iter("abcdefgh")
    operands = []
    for operand in spec.inputs:
        kind = f"Tensor({next(aliases)}!)" if operand.name in written else "Tensor"
        operands.append(f"{kind}{'[]' if operand.many else ''} {operand.name}")
    keywords = [f"{kind} {name}" for name, kind in spec.attributes.items()]
    return f"{spec.name}({', '.join(operands)}{', *, ' if keywords else ''}{', '.join(keywords)}) -> ()"


def _named(spec: OpSpec, operands: Sequence[Any], error: ValueError) -> ValueError:
    """The host counts operands in a row; this says which one does not fit."""
    flat = itertools.chain.from_iterable(
        [(f"{o.name}[{i}]", t) for i, t in enumerate(tensors)] if o.many else [(o.name, tensors)]
        for o, tensors in zip(spec.inputs, operands, strict=True)
    )
    first: Tensor | None = None
    for name, t in flat:
        first = t if first is None else first
        if not t.is_contiguous():
            strides = tuple(t.stride())
            return ValueError(f"{spec.name}: {name} (strides {strides}) is not contiguous; call .contiguous() on it")
        if t.device != first.device:
            return ValueError(f"{spec.name}: {name} ({t.device}) is not on {first.device}; move them to one device")
    return error


ops: dict[str, Callable[..., None]] = {_spec.name: bind(_spec) for _spec in multi_table().values()}
