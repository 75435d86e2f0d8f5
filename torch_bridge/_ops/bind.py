"""Every op of the library as `torch.ops.qshard.<op>`, bound from the rows of `ops.def`.

Code runs an op in one of three ways:

    ops.<op>(...)               allocates the results, in a C++ kernel of torch's dispatcher
    into(*outputs).<op>(...)    writes to the given tensors, bypassing the dispatcher, for code that owns its buffers
    Steps (`programs.py`)       runs several ops in one host call, planned once

All of them fill the results with the XLA FFI handler, the same as for JAX.

An op on lists of tensors is one call, with a constant number of launches, for a whole model. Eager calls bypass the
dispatcher. The op writes in place to the operands that `ops.def` names as results. Its schema declares the writes, so
`torch.compile` and graph capture see them. Optional lists may be empty, as the attributes of the op specify; all others
have one length.

Codes and one-byte scales are uint8 here, because Inductor and gloo do not support every 8-bit float; `Plane` views them
in their own dtype. Ops have no derivatives: gradients go through `Linear`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard import _ffi
from qshard._core.validation import quote
from qshard.formats import ELEMENTS
from qshard.op_table import OpSpec, multi_table, table
from qshard.torch_bridge._ops.eager import is_compiling, may_skip_dispatcher
from qshard.torch_bridge._ops.flops import register_flops
from qshard.torch_bridge._ops.padded_rows import gather_rows, philox_of_rows, values_of_strips
from qshard.torch_bridge._torch_internals import TORCH_LIBRARY

__all__ = ["bind", "dtype_name", "into", "ops", "traced_size"]

_LIBRARY = torch.library.Library("qshard", "DEF")
_ffi.follow_num_threads(torch.get_num_threads)
_ffi.define_torch_kernels(TORCH_LIBRARY, Tensor)
# For kernels in C++: PyTorch's C functions do not tell whether a tensor requires grad.
_LIBRARY.define("_requires_grad(Tensor x) -> bool")
_LIBRARY.impl("_requires_grad", lambda x: x.requires_grad, "CompositeExplicitAutograd")


def by_lists(spec: OpSpec, operands: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return all tensors of an op on lists, in order, and the tensors that it writes."""
    every: list[Any] = []
    written: list[Any] = []
    for operand, given in zip(spec.inputs, operands, strict=True):
        tensors = given if operand.many else (given,)
        if not isinstance(tensors, list | tuple):
            _check_tensors(spec, operands)
        every += tensors
        if operand.name in spec.written:
            written += tensors
    return every, written


class into:
    """Replacement for `ops` that writes the results of an op into given tensors, on the current stream.

    The call bypasses autograd and tracing, and takes about 1 us on the host. On meta it does nothing. Steps of
    `_core.quantize_steps` accept it as `ops`.

    Args:
      outputs: plain, contiguous tensors on the device of the operands, with the shapes and dtypes of the results; codes
        as uint8 or in their own dtype.

    Raises:
      ValueError: a shape, the memory of a tensor or the value of an attribute does not fit; nothing was written.
      TypeError: a dtype, or the name or type of an attribute, does not fit; nothing was written.
      RuntimeError: PyTorch cannot export a tensor.

    >>> codes = torch.empty(3, dtype=torch.uint8)
    >>> into(codes).cast_tensor(torch.ones(3), torch.tensor(2.0), element="float8_e4m3fn") is codes
    True
    >>> codes.view(torch.float8_e4m3fn).float()
    tensor([2., 2., 2.])
    """

    def __init__(self, *outputs: Tensor):
        self._outputs = outputs

    def __getattr__(self, op: str) -> Callable[..., Any]:
        def run(*inputs: Tensor, dtype: torch.dtype | None = None, **attributes: Any) -> Any:
            # `dtype` is not used: the outputs have the dtypes of the results.
            if not self._outputs[0].is_meta:
                _ffi.call(op, inputs, self._outputs, attributes, True)
            return self._outputs[0] if len(self._outputs) == 1 else self._outputs

        return run


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype in qshard, ml_dtypes and JAX.

    >>> dtype_name(torch.float8_e4m3fn)
    'float8_e4m3fn'
    """
    return str(dtype).removeprefix("torch.")


class _Plan(NamedTuple):
    """Shapes and dtypes of the results, and attributes, of a checked call."""

    outputs: list[tuple[tuple[int, ...], torch.dtype]]
    attributes: dict[str, Any]


def bind(spec: OpSpec) -> Callable[..., Any]:
    """Create the torch op of `spec`: schema, fake implementation, and implementations for CPU and CUDA.

    Its arguments are the operands, then the attributes by keyword, and `dtype` if the result may have any float dtype.

    >>> torch.ops.qshard.amax_tensor(torch.tensor([[1.0, -3.0], [2.0, 0.0]]), lead=1)
    tensor([3., 2.])
    >>> torch.ops.qshard.cast_tensor(torch.ones(3), torch.ones(2), element="float8_e4m3fn")
    Traceback (most recent call last):
    ValueError: cast_tensor: scale (2,) does not match the leading axes of x (3,); pass one element for each run of x
    """
    _LIBRARY.define(_schema(spec), tags=[torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag])
    torch.library.register_fake(f"qshard::{spec.name}", functools.partial(_run_fake, spec), lib=_LIBRARY)
    register_flops(spec)
    return (_bind_lists if spec.many else _bind_tensors)(spec, getattr(torch.ops.qshard, spec.name).default)


def _bind_tensors(spec: OpSpec, op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that calls an op on single tensors. Its kernels are in C++ (`host/torch_kernels.cc`)."""

    def call(*operands: Any, **keywords: Any) -> Any:
        if is_compiling():
            return op(*operands, **keywords)
        try:
            if not torch.is_grad_enabled():
                return op(*operands, **keywords)
            _check_no_grad(spec, operands)
            with torch.no_grad():
                return op(*operands, **keywords)
        except (AttributeError, RuntimeError, ValueError):
            _raise_precise_error(spec, operands, keywords)
            raise

    return call


def _raise_precise_error(spec: OpSpec, operands: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Raise the precise error of a call that a C++ kernel refused: kernels know few types of errors, and name less."""
    _check_tensors(spec, operands)
    _check_no_grad(spec, operands)
    shapes, dtypes = tuple(x.shape for x in operands), tuple(x.dtype for x in operands)
    outputs = plan_call(spec, shapes, dtypes, tuple(keywords.items())).outputs
    _check_memory(spec, operands)
    for shape, dtype in outputs:
        operands[0].new_empty(shape, dtype=dtype)  # torch.OutOfMemoryError


def _bind_lists(spec: OpSpec, op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that calls an op on lists of tensors. Its kernels are in Python: it runs once for a model."""
    run = _run_on_lists(spec)

    def kernel(*operands: Any, **attributes: Any) -> None:
        _check_tensors(spec, operands)
        run(*by_lists(spec, operands), operands, attributes)

    for device in ("CPU", "CUDA"):
        _LIBRARY.impl(spec.name, kernel, device)

    def call(*operands: Any, **attributes: Any) -> Any:
        inputs, outputs = by_lists(spec, operands)
        if may_skip_dispatcher(inputs):
            run(inputs, outputs, operands, attributes)
        else:
            if not is_compiling():
                _check_tensors(spec, operands)
            op(*operands, **attributes)
        written = [x for x, operand in zip(operands, spec.inputs, strict=True) if operand.name in spec.written]
        return written[0] if len(written) == 1 else tuple(written)

    return call


def _run_on_lists(spec: OpSpec) -> Callable[..., Any]:
    """Return the function that runs an op on lists. `inputs` and `outputs` are `by_lists` of the operands."""

    def run(
        inputs: Sequence[Tensor], outputs: Sequence[Tensor], operands: Sequence[Any], attributes: Mapping[str, Any]
    ) -> None:
        if torch.is_grad_enabled():
            _check_no_grad(spec, operands)
        try:
            _ffi.call(spec.name, inputs, outputs, attributes)
        except (ValueError, RuntimeError):
            _check_memory(spec, operands)  # The error of the host names no operands.
            raise
        torch.autograd.graph.increment_version([t for t in outputs if not t.is_inference()])

    return run


def _run_fake(spec: OpSpec, *operands: Any, **keywords: Any) -> Any:
    """Return results without memory, for compilers."""
    _check_no_grad(spec, operands)
    _check_memory(spec, operands)
    inputs = [x for _, x in _operands_by_name(spec, operands)]
    shapes, dtypes = tuple(x.shape for x in inputs), tuple(x.dtype for x in inputs)
    outputs = plan_call(spec, shapes, dtypes, tuple(keywords.items())).outputs
    results = tuple(inputs[0].new_empty(shape, dtype=dtype) for shape, dtype in outputs)
    return None if spec.many else results[0] if len(spec.outputs) == 1 else results


def plan_call(
    spec: OpSpec,
    shapes: tuple[tuple[int, ...], ...],
    dtypes: tuple[torch.dtype, ...],
    keywords: tuple[tuple[str, Any], ...],
) -> _Plan:
    """Match a call with its row, and return the results to allocate. Raises if it does not fit.

    `shapes` lists the tensors of list operands one after another. Ops on lists have no results to allocate.
    """
    given = dict(keywords)
    dtype = given.pop("dtype", None)
    sizes = [tuple(map(traced_size, shape)) for shape in shapes]
    attributes = {name: traced_size(v) if isinstance(v, torch.SymInt) else v for name, v in given.items()}
    names = [dtype_name(d) for d in dtypes]
    results, axes, _ = spec.match(sizes, names, attributes, None if dtype is None else dtype_name(dtype))
    result_shapes = [shape for shape, _ in results]
    if any(isinstance(size, torch.SymInt) for sizes in (*shapes, given.values()) for size in sizes):
        result_shapes = _symbolic(axes, shapes, given)
    kinds = (
        torch.uint8 if operand.dtype != "same" and name in ELEMENTS else getattr(torch, name)
        # The results of ops on lists are operands.
        for operand, (_, name) in zip(spec.outputs, results, strict=False)
    )
    return _Plan(list(zip(result_shapes, kinds, strict=True)), attributes)


def traced_size(size: int | torch.SymInt) -> int:
    """Return an extent as an int. A symbolic size gives its traced size; the op checks later sizes at run time."""
    if isinstance(size, torch.SymInt) and (hint := size.node.hint) is not None:
        return int(hint)
    return int(size)


def _symbolic(axes: Sequence[Any], shapes: Sequence[Sequence[int]], given: Mapping[str, Any]) -> list[tuple[int, ...]]:
    """Compute the shapes of results from symbolic shapes and attributes.

    `axes` are the factors of the axes of all operands and results, from `Row.match`.
    """
    sizes: dict[tuple[str, ...], Any] = {(name,): v for name, v in given.items() if isinstance(v, torch.SymInt)}
    known = itertools.chain.from_iterable(zip(*pair, strict=True) for pair in zip(axes, shapes, strict=False))
    for axis, size in known:
        codes = size if axis[-1][2] == 1 else size * axis[-1][2]
        sizes.setdefault(tuple(name for name, *_ in axis), codes)
        if len(axis) > 1:
            run = axis[1][1]
            sizes.setdefault((axis[0][0],), codes if run == 1 else -(-codes // run))

    def extent(axis: Sequence[tuple[str, int, int]]) -> int:
        whole = sizes.get(tuple(name for name, *_ in axis))
        codes: int = math.prod(sizes.get((name,), size) for name, size, _ in axis) if whole is None else whole
        return codes if axis[-1][2] == 1 else codes // axis[-1][2]

    return [tuple(map(extent, result)) for result in axes[len(shapes) :]]


def _schema(spec: OpSpec) -> str:
    aliases = iter("abcdefgh")
    operands = [
        f"Tensor{f'({next(aliases)}!)' if operand.name in spec.written else ''}{'[]' * operand.many} {operand.name}"
        for operand in spec.inputs
    ]

    def default(left_out: Any) -> str:
        return "" if left_out is None else f'="{left_out}"' if isinstance(left_out, str) else f"={left_out}"

    # A size computed from shapes may be symbolic.
    kinds = {name: "SymInt" if kind == "int" else kind for name, (kind, *_) in spec.attributes.items()}
    keywords = [f"{kinds[name]} {name}{default(left_out)}" for name, (*_, left_out) in spec.attributes.items()]
    results = [] if spec.many else spec.outputs
    keywords += ["ScalarType dtype"] * any(operand.dtype == "float" for operand in results)
    returns = "Tensor" if len(results) == 1 else f"({', '.join('Tensor' for _ in results)})"
    return f"{spec.name}({', '.join(operands)}{', *, ' if keywords else ''}{', '.join(keywords)}) -> {returns}"


def _operands_by_name(spec: OpSpec, operands: Sequence[Any]) -> Iterator[tuple[str, Tensor]]:
    for operand, given in zip(spec.inputs, operands, strict=False):  # Torch reports missing or extra operands.
        if operand.many:
            yield from ((f"{operand.name}[{i}]", x) for i, x in enumerate(given))
        else:
            yield operand.name, given


def _check_tensors(spec: OpSpec, operands: Sequence[Any]) -> None:
    """Raise TypeError unless operands are tensors and lists of tensors. Torch passes None on as an undefined tensor."""
    for operand, given in zip(spec.inputs, operands, strict=False):
        if operand.many and not isinstance(given, list | tuple):
            raise TypeError(f"{spec.name}: {operand.name} ({quote(given)}) is not a list of torch.Tensor; pass one")
    for name, x in _operands_by_name(spec, operands):
        if not isinstance(x, Tensor):
            raise TypeError(f"{spec.name}: {name} ({quote(x)}) is not a torch.Tensor; pass one")


def _check_no_grad(spec: OpSpec, operands: Sequence[Any]) -> None:
    for name, x in _operands_by_name(spec, operands):
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{spec.name}: {name} requires grad, but the op has no derivative; pass .detach(), or use "
                "qshard.torch_bridge.Linear"
            )


def _check_memory(spec: OpSpec, operands: Sequence[Any]) -> None:
    tensors = list(_operands_by_name(spec, operands))
    for name, x in tensors:
        first, device = tensors[0][0], tensors[0][1].device
        if x.device != device:
            raise ValueError(
                f"{spec.name}: operands ({first} on {device}, {name} on {x.device}) are not on one device; "
                "move them to one"
            )
        if not x.is_contiguous():
            strides = tuple(x.stride())
            raise ValueError(f"{spec.name}: {name} (strides {strides}) is not contiguous; call .contiguous() on it")


def _transpose(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous()


def transposed_squares(ops: Any, data: Any, scale_inv: Any, *, packed: bool) -> tuple[Any, Any]:
    """Transpose codes and scales of 2-D blocks in one launch: scales are few, and a second launch would cost more."""
    per_byte = 2 if packed else 1
    data_t = data.new_empty((*data.shape[:-2], data.shape[-1] * per_byte, data.shape[-2] // per_byte))
    scale_inv_t = scale_inv.new_empty((*scale_inv.shape[:-2], scale_inv.shape[-1], scale_inv.shape[-2]))
    ops.transpose_each([data, scale_inv], [data_t, scale_inv_t])
    return data_t, scale_inv_t


# The argument `ops` of `quantize_steps`, `flat_shards` and `operands`: every op, transposing copies, and padded rows.
ops: Any = SimpleNamespace(
    **{_spec.name: bind(_spec) for _spec in (*table().values(), *multi_table().values())},
    philox_of_rows=philox_of_rows,
    gather_rows=gather_rows,
    swap_last_axes=_transpose,
    transposed_squares=lambda data, scale_inv, *, packed: transposed_squares(ops, data, scale_inv, packed=packed),
    values_of_strips=values_of_strips,
)
