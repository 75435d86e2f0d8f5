"""Every op of the library as `torch.ops.qshard.<op>`, bound from the table in `ops.def`.

`bind` makes those on single tensors: a torch op allocates its results; the XLA FFI handler, the one that JAX calls too,
fills them. `call_into` is the same without the allocation: for code that owns its buffers, as the hooks of a sharded
weight do.

`bind_list` makes those on lists of tensors: one call, and a constant number of launches, for a model. Such an op
returns nothing. It changes operands in place, those that `ops.def` names as its results, and its schema says which:
`torch.compile` and graph capture see what is written. Optional lists may be empty, as the op's attributes say; all
others have one length. `call_in_place` is the same without torch's dispatcher.

Codes, and scales of one byte, are uint8 at this edge, since neither Inductor nor gloo knows every eight-bit float;
`Plane` shows them as what they are. Ops on blocks take matrices as they are: the attribute `split`, which is for XLA,
is always False here. No op has a derivative: gradients pass through `Linear`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard import _ffi
from qshard.formats import ELEMENTS
from qshard.ops import OpSpec, multi_table, table

__all__ = ["bind", "bind_list", "call_in_place", "call_into", "dtype_name", "into", "ops", "seen_size"]

_HANDLERS = {"CPU": _ffi.handlers("cpu"), "CUDA": _ffi.handlers("cuda")}
_LIBRARY = torch.library.Library("qshard", "DEF")
_MANY = 16384  # Elements that more than one thread may share; fewer are done before another wakes.
_SPLIT = frozenset(spec.name for spec in table().values() if "split" in spec.attributes)


def call_into(op: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], attributes: Mapping[str, Any]) -> None:
    """Runs an op and writes its results into `outputs`, on the current stream.

    Args:
      op: a name in `qshard.ops.table()`.
      inputs: plain, contiguous tensors on one device.
      outputs: likewise, of the shapes and dtypes that `torch.ops.qshard.<op>` returns; codes as uint8 or their
        own dtype.
      attributes: exactly those of the op, but for `split`.

    Raises:
      ValueError, TypeError: the handler does not take these tensors; nothing was written.
      RuntimeError: nor does PyTorch share them, as on meta.

    No autograd, no tracing. About 1 us on the host.

    >>> codes = torch.empty(3, dtype=torch.uint8)
    >>> call_into("cast_tensor", (torch.ones(3), torch.tensor(2.0)), (codes,), {"element": "float8_e4m3fn"})
    >>> codes.view(torch.float8_e4m3fn).float()
    tensor([2., 2., 2.])
    """
    if op in _SPLIT:
        attributes = {**attributes, "split": False}
    _ffi.call(_handler(op, outputs[0], inputs[0]), inputs, outputs, attributes, True)


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
    try:
        _ffi.call(_handler(op, outputs[0]), inputs, outputs, attributes)
    except ValueError:
        _check_lists(spec, operands)  # As in `bind`.
        raise
    torch.autograd.graph.increment_version([t for t in outputs if not t.is_inference()])


def _flat(spec: OpSpec, operands: Sequence[Any]) -> tuple[list[Tensor], list[Tensor]]:
    """All tensors in order, and those that are written."""
    written = {operand.name for operand in spec.outputs}
    lists = [
        (operand.name in written, tensors if operand.many else (tensors,))
        for operand, tensors in zip(spec.inputs, operands, strict=True)
    ]
    return [t for _, tensors in lists for t in tensors], [t for is_written, ts in lists if is_written for t in ts]


def _handler(op: str, output: Tensor, first: Tensor | None = None) -> Any:
    """The handler for the device of a result. Those of CPUs use as many threads as torch does.

    `first` is the operand whose size says how much work there is, if one alone does.
    """
    if output.is_cuda:
        handlers = _HANDLERS["CUDA"]
    else:
        handlers = _HANDLERS["CPU"]
        if first is None or first.numel() > _MANY:
            _ffi.follow_num_threads(torch.get_num_threads())
    if not handlers:
        raise _no_kernels(op, output.device)
    return handlers[op]


class into:
    """Ops that write into given tensors, to be passed for `ops` to a step of `qshard.pipeline`.

    >>> codes = torch.empty(3, dtype=torch.uint8)
    >>> into(codes).cast_tensor(torch.ones(3), torch.tensor(2.0), element="float8_e4m3fn") is codes
    True
    """

    def __init__(self, *outputs: Tensor):
        self._outputs = outputs

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def run(*inputs: Tensor, **attributes: Any) -> Any:
            if "lead" in attributes and "lead" not in table()[op].attributes:
                del attributes["lead"]  # Which the output's shape says.
            call_into(op, inputs, self._outputs, attributes)
            return self._outputs[0] if len(self._outputs) == 1 else self._outputs

        return run


def dtype_name(dtype: torch.dtype) -> str:
    """The name that qshard, ml_dtypes and JAX have for a torch dtype.

    >>> dtype_name(torch.float8_e4m3fn)
    'float8_e4m3fn'
    """
    return str(dtype).removeprefix("torch.")


class _Plan(NamedTuple):
    """What a call comes down to, once shapes, dtypes and attributes are checked."""

    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    attributes: dict[str, Any]


def bind(spec: OpSpec) -> Callable[..., Any]:
    """Makes the torch op of `spec`: schema, fake implementation, and one for each device that has kernels.

    Arguments are the operands, then by keyword the attributes, the number of axes of each `*name` that shapes leave
    open (default 0), and `dtype` where the op can give any float.

    Args:
      spec: a row of `qshard.ops.table()`.

    Returns:
      `torch.ops.qshard.<name>`. It returns one tensor, or a tuple of them.

    >>> torch.ops.qshard.amax_tensor(torch.tensor([[1.0, -3.0], [2.0, 0.0]]), lead=1)
    tensor([3., 2.])
    >>> torch.ops.qshard.cast_tensor(torch.ones(3), torch.ones(2), element="float8_e4m3fn")
    Traceback (most recent call last):
    ValueError: cast_tensor: scale (2,) is not the first axes of x (3,); give it one element for each run of x
    """
    plan = _planner(spec)
    cached_plan = functools.lru_cache(maxsize=4096)(plan)
    single = len(spec.outputs) == 1

    def fake(*inputs: Tensor, **keywords: Any) -> Any:
        _check_tensors(spec, inputs)
        shapes, dtypes = tuple(tuple(x.shape) for x in inputs), tuple(x.dtype for x in inputs)
        outputs = plan(shapes, dtypes, tuple(keywords.items())).outputs
        made = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in outputs)
        return made[0] if single else made

    def run(*inputs: Tensor, **keywords: Any) -> Any:
        x = inputs[0]
        if torch.is_grad_enabled():
            _check_no_grad(spec, inputs)
        outputs, attributes = cached_plan(
            tuple([t.shape for t in inputs]), tuple([t.dtype for t in inputs]), tuple(keywords.items())
        )
        made = [x.new_empty(shape, dtype=dtype) for shape, dtype in outputs]
        try:
            call_into(spec.name, inputs, made, attributes)
        except ValueError:
            _check_tensors(spec, inputs)  # The host names no operands. Looked at only now, to keep good calls short.
            raise
        return made[0] if single else tuple(made)

    _LIBRARY.define(_schema(spec), tags=[torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag])
    for device in _HANDLERS:
        _LIBRARY.impl(spec.name, run, device)
    torch.library.register_fake(f"qshard::{spec.name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.qshard, spec.name)  # type: ignore[no-any-return]


def bind_list(spec: OpSpec) -> Callable[..., None]:
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
        call_in_place(spec.name, operands, {name: attributes[name] for name in names if name in attributes})

    def fake(*operands: Any, **attributes: Any) -> None:
        inputs, outputs = _flat(spec, operands)
        if outputs:
            spec.results(
                [tuple(map(seen_size, t.shape)) for t in inputs], [dtype_name(t.dtype) for t in inputs], attributes
            )

    _LIBRARY.define(_list_schema(spec), tags=[torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag])
    for device in _HANDLERS:
        _LIBRARY.impl(spec.name, run, device)
    torch.library.register_fake(f"qshard::{spec.name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.qshard, spec.name)  # type: ignore[no-any-return]


def _planner(spec: OpSpec) -> Callable[..., _Plan]:
    codes = tuple(operand.dtype != "same" for operand in spec.outputs)

    def plan(
        shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], keywords: tuple[tuple[str, Any], ...]
    ) -> _Plan:
        given = {**dict.fromkeys(spec.open_axes, 0), **dict(keywords)}
        dtype = given.pop("dtype", None)
        sizes = [tuple(map(seen_size, shape)) for shape in shapes]
        names = [dtype_name(d) for d in dtypes]
        results = spec.results(sizes, names, given, None if dtype is None else dtype_name(dtype))
        made = [shape for shape, _ in results]
        if any(isinstance(size, torch.SymInt) for shape in shapes for size in shape):
            made = [tuple(_symbol(extent, shapes) for extent in extents) for extents in spec.row.extents(sizes, given)]
        kinds = (
            torch.uint8 if coded and name in ELEMENTS else getattr(torch, name)
            for coded, (_, name) in zip(codes, results, strict=True)
        )
        attributes = {name: given[name] for name in _attributes(spec) if name in given}
        return _Plan(tuple(zip(made, kinds, strict=True)), attributes)

    return plan


def seen_size(size: int | torch.SymInt) -> int:
    """An extent as a number. While shapes are symbols it is what the trace has seen; the op checks what comes later."""
    if isinstance(size, torch.SymInt) and (hint := size.node.hint) is not None:
        return int(hint)
    return int(size)


def _symbol(extent: tuple[int, ...], shapes: Sequence[Sequence[int]]) -> int:
    """An extent of a result, from those of operands."""
    operand, axis, times, run, size, per_byte = extent
    if operand < 0:
        return size // per_byte
    given = shapes[operand][axis]
    given = given if times == 1 else given * times
    given = given if run == 1 else -(-given // run)
    given = given if size == 1 else given * size
    return given if per_byte == 1 else given // per_byte


def _attributes(spec: OpSpec) -> list[str]:
    return [name for name in spec.attributes if name != "split"]


def _schema(spec: OpSpec) -> str:
    operands = ", ".join(f"Tensor {operand.name}" for operand in spec.inputs)
    named = [name for name in _attributes(spec) if name not in spec.open_axes]
    defaults = {name: f'="{value}"' for name, value in spec.row.optional_attributes.items()}
    keywords = [f"{spec.attributes[name]} {name}{defaults.get(name, '')}" for name in named]
    keywords += ["ScalarType dtype"] * any(operand.dtype == "float" for operand in spec.outputs)
    keywords += [f"int {name}=0" for name in spec.open_axes]
    results = "Tensor" if len(spec.outputs) == 1 else "(" + ", ".join("Tensor" for _ in spec.outputs) + ")"
    return f"{spec.name}({operands}{', *, ' if keywords else ''}{', '.join(keywords)}) -> {results}"


def _list_schema(spec: OpSpec) -> str:
    written = {operand.name for operand in spec.outputs}
    aliases = iter("abcdefgh")
    operands = []
    for operand in spec.inputs:
        kind = f"Tensor({next(aliases)}!)" if operand.name in written else "Tensor"
        operands.append(f"{kind}{'[]' if operand.many else ''} {operand.name}")
    defaults = {name: f'="{value}"' for name, value in spec.row.optional_attributes.items()}
    keywords = [f"{kind} {name}{defaults.get(name, '')}" for name, kind in spec.attributes.items()]
    return f"{spec.name}({', '.join(operands)}{', *, ' if keywords else ''}{', '.join(keywords)}) -> ()"


def _check_no_grad(spec: OpSpec, inputs: Sequence[Tensor]) -> None:
    for x, operand in zip(inputs, spec.inputs, strict=True):
        if x.requires_grad:
            raise ValueError(
                f"{spec.name}: {operand.name} (requires grad) is not data alone, and the op has no derivative; "
                "pass .detach(), or use qshard.torch_bridge.Linear"
            )


def _check_tensors(spec: OpSpec, inputs: Sequence[Tensor]) -> None:
    if torch.is_grad_enabled():
        _check_no_grad(spec, inputs)
    if any(x.device != inputs[0].device for x in inputs):
        devices = ", ".join(f"{operand.name} on {x.device}" for x, operand in zip(inputs, spec.inputs, strict=True))
        raise ValueError(f"{spec.name}: operands ({devices}) are not on one device; move them to one")
    for x, operand in zip(inputs, spec.inputs, strict=True):
        if not x.is_contiguous():
            strides = tuple(x.stride())
            raise ValueError(
                f"{spec.name}: {operand.name} (strides {strides}) is not contiguous; call .contiguous() on it"
            )


def _check_lists(spec: OpSpec, operands: Sequence[Any]) -> None:
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
            raise ValueError(f"{spec.name}: {name} (strides {strides}) is not contiguous; call .contiguous() on it")
        if t.device != first.device:
            raise ValueError(f"{spec.name}: {name} ({t.device}) is not on {first.device}; move them to one device")


def _no_kernels(op: str, device: torch.device) -> NotImplementedError:
    return NotImplementedError(
        f"{op}: device ({device}) is not one that this build of qshard has kernels for; "
        "build it where nvcc is found, or move the tensors to the CPU"
    )


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous()


def _transposed_squares(data: Tensor, scale_inv: Tensor, *, packed: bool) -> tuple[Tensor, Tensor]:
    """Codes and scales in one launch: scales are few, and a launch of their own takes longer than they do."""
    per_byte = 2 if packed else 1
    data_t = data.new_empty((*data.shape[:-2], data.shape[-1] * per_byte, data.shape[-2] // per_byte))
    scale_inv_t = scale_inv.new_empty((*scale_inv.shape[:-2], scale_inv.shape[-1], scale_inv.shape[-2]))
    torch.ops.qshard.transpose_each([data, scale_inv], [data_t, scale_inv_t])
    return data_t, scale_inv_t


# What `qshard.pipeline` asks of a front end: every op, and copies with the last two axes swapped.
ops = SimpleNamespace(
    **{_spec.name: bind(_spec).default for _spec in table().values()},  # type: ignore[attr-defined]
    transposed=_transposed,
    transposed_squares=_transposed_squares,
)

for _spec in multi_table().values():
    bind_list(_spec)
