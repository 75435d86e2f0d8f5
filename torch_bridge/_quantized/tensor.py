"""`QuantizedTensor`: a tensor subclass that stores codes and scales instead of values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.utils.hooks import warn_if_has_hooks

from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description, flat, parse_metadata, text_of
from qshard._core.validation import as_plane, join_names, quote
from qshard.formats import FLOATS, Format, Usage
from qshard.torch_bridge._ops.bind import dtype_name
from qshard.torch_bridge._ops.programs import first_equal
from qshard.torch_bridge._quantized.plane_programs import NO_PLANE, dequantize
from qshard.torch_bridge._torch_internals import is_traceable_wrapper_subclass, make_wrapper

aten = torch.ops.aten
FLOAT_DTYPES = tuple(getattr(torch, name) for name in FLOATS)
_FORMATS: dict[int, Format] = {}
"""Formats of codes, by `id`."""


def format_of(codes: QuantizedTensor) -> Format:
    """Return `codes.format`, which Dynamo itself cannot read from an intermediate result."""
    return _FORMATS[codes.format_id]


class QuantizedTensor(Tensor):
    """Tensor of shape `shape` and dtype `dtype` stored in `fmt`: `value = fl(code * scale_inv)`, rounded to `dtype`.

    It is a container: it can be moved, copied, saved, shared and dequantized. All other ops raise, because each would
    have to choose between values and codes, and values cost the memory that the format saved. It has no gradient,
    except as the weight of `Linear`, where it represents a parameter of dtype `dtype`. Moving such a model to another
    float dtype changes only `dtype`: codes and scales stay. Under FSDP2 a sharded weight is a `QuantizedTensor` between
    gather and reshard, and its codes are the gathered bytes.

    Args:
      fmt: the format of the codes.
      shape: of the values.
      dtype: of the values: float32, bfloat16 or float16.
      rowwise: the plane with blocks along the last axis, as bytes.
      columnwise: the plane with blocks along the first axis, as bytes.
      columnwise_is_stale: as the attribute.

    Attributes:
      format: the format of the codes.
      rowwise: the `Plane` with blocks along the last axis; None if absent.
      columnwise: the `Plane` with blocks along the first axis; None if absent or stale.
      global_scale_inv: the global scale of the rowwise plane, or else of the columnwise plane; None if the format has
        none.
      columnwise_is_stale: the columnwise plane has older codes than the rowwise plane. It counts as absent, and its
        memory is kept for `update_columnwise`.

    Raises:
      ValueError: both planes are None.

    Codes and scales are saved and sent as bytes, bit for bit, by `torch.save`, `pickle`, `copy`, and the queues and
    shared memory of `torch.multiprocessing`. `torch.load(weights_only=True)` accepts it once `qshard.torch_bridge` is
    imported. Use `to_plain` for files that programs without qshard read, and for `torch.distributed.checkpoint`.

    >>> from qshard.formats import FP8_E4M3, Usage
    >>> from qshard.torch_bridge import quantize
    >>> q = quantize(torch.tensor([[1.0, 0.5]]), FP8_E4M3, usage=Usage.BOTH)
    >>> q.rowwise.data.dtype, tuple(q.columnwise.data.shape), q.dequantize()
    (torch.float8_e4m3fn, (2, 1), tensor([[1.0000, 0.5000]]))
    >>> q + 1
    Traceback (most recent call last):
    NotImplementedError: QuantizedTensor: aten.add.Tensor is not supported on codes; call .dequantize() and use ...
    """

    format: Format
    format_id: int  # A key of `_FORMATS`.
    columnwise_is_stale: bool

    # Each part is an attribute, because `__tensor_flatten__` returns attribute names.
    _rowwise_data: Tensor | None
    _rowwise_scale_inv: Tensor | None
    _rowwise_global_scale_inv: Tensor | None
    _columnwise_data: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _columnwise_global_scale_inv: Tensor | None
    _PLANES: ClassVar = {
        usage: tuple(f"_{usage.name.lower()}_{part}" for part in Plane._fields)  # type: ignore[union-attr]
        for usage in Usage.BOTH.planes
    }
    _NAMES: ClassVar = tuple(name for names in _PLANES.values() for name in names)

    @staticmethod
    def __new__(
        cls,
        fmt: Format,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rowwise: Plane | None = None,
        columnwise: Plane | None = None,
        columnwise_is_stale: bool = False,
    ) -> QuantizedTensor:
        """Wrap existing planes: codes and one-byte scales as uint8, in the shapes of `layout.plane`."""
        either = rowwise or columnwise
        if either is None:
            raise ValueError(
                "QuantizedTensor: rowwise and columnwise are both None; use quantize, or pass at least one plane"
            )
        self: QuantizedTensor = make_wrapper(cls, shape, dtype=dtype, device=either.data.device)
        if id(fmt) not in _FORMATS:
            fmt = first_equal(fmt)
            _FORMATS[id(fmt)] = fmt
        self.format, self.format_id, self.columnwise_is_stale = fmt, id(fmt), columnwise_is_stale
        # Written out: a loop over _NAMES takes three times as long, in each call of `quantize`.
        self._rowwise_data, self._rowwise_scale_inv, self._rowwise_global_scale_inv = rowwise or NO_PLANE
        self._columnwise_data, self._columnwise_scale_inv, self._columnwise_global_scale_inv = columnwise or NO_PLANE
        return self

    def set(self, usage: Usage, parts: Plane | None) -> None:
        """Replace a plane by `parts`, and mark it as current."""
        for name, part in zip(self._PLANES[usage], parts or NO_PLANE, strict=True):
            setattr(self, name, part)
        if usage is Usage.COLUMNWISE:
            self.columnwise_is_stale = False

    def parts(self, usage: Usage, *, stale: bool = False) -> Plane | None:
        """Return a plane as bytes, or None if it is absent. A stale plane counts as absent unless `stale` is True."""
        if usage is Usage.COLUMNWISE and self.columnwise_is_stale and not stale:
            return None
        names = self._PLANES[usage]
        data = getattr(self, names[0])
        return None if data is None else Plane(data, getattr(self, names[1]), getattr(self, names[2]))

    @classmethod
    def lists_of_parts(cls, tensors: Sequence[QuantizedTensor], usage: Usage) -> Plane | None:
        """Return the planes of tensors of one format, as lists of parts; None if a plane is absent or stale.

        Calls `parts` for none of them: layers of many experts run this in each pass.
        """
        if usage is Usage.COLUMNWISE and any([tensor.columnwise_is_stale for tensor in tensors]):  # noqa: C419
            return None
        lists = [[*map(attrgetter(name), tensors)] for name in cls._PLANES[usage]]
        if any([part is None for part in lists[0]]):  # noqa: C419
            return None
        return Plane(*(None if parts[0] is None else parts for parts in lists))

    def _typed_plane(self, usage: Usage) -> Plane | None:
        parts = self.parts(usage)
        if parts is None:
            return None
        data = parts.data.view(getattr(torch, self.format.data_dtype))
        return parts._replace(data=data, scale_inv=parts.scale_inv.view(getattr(torch, self.format.scale_dtype)))

    @property
    def rowwise(self) -> Plane | None:
        """The `Plane` with blocks along the last axis; None if absent."""
        return self._typed_plane(Usage.ROWWISE)

    @property
    def columnwise(self) -> Plane | None:
        """The `Plane` with blocks along the first axis; None if absent or stale."""
        return self._typed_plane(Usage.COLUMNWISE)

    @property
    def global_scale_inv(self) -> Tensor | None:
        """The global scale of the rowwise plane, or else of the columnwise plane; None if the format has none."""
        either = self.parts(Usage.ROWWISE) or self.parts(Usage.COLUMNWISE)
        return None if either is None else either.global_scale_inv

    def dequantize(self, dtype: torch.dtype | None = None, *, usage: Usage | None = None) -> Tensor:
        """Compute the values, `fl(code * scale_inv)`, rounded once to `dtype`.

        Args:
          dtype: float32, bfloat16 or float16; the default is `self.dtype`.
          usage: the plane to read; the default is the rowwise plane if present, else the columnwise plane.

        Returns:
          A plain tensor of `self.shape`. Both planes give the same bits if the format has 2-D blocks or no blocks. A
          columnwise plane with a Hadamard rotation gives the values of the rotated tensor.

        Raises:
          TypeError: `dtype` is not supported.
          ValueError: the plane is absent.

        >>> from qshard.torch_bridge import quantize
        >>> quantize(torch.tensor([[1.0, 0.5]]), "FP8_E4M3").dequantize(torch.bfloat16)
        tensor([[1.0000, 0.5000]], dtype=torch.bfloat16)
        """
        planes = [(one, self.parts(one)) for one in Usage.BOTH.planes]
        there = {one: parts for one, parts in planes if parts is not None}
        usage = as_plane(next(iter(there), Usage.ROWWISE) if usage is None else usage, "dequantize", there)
        return dequantize(there[usage], self.format, usage, self._dequantized_dtype(dtype), tuple(self.shape))

    def _dequantized_dtype(self, dtype: torch.dtype | None) -> torch.dtype:
        """Return the dtype of `dequantize`, or raise TypeError."""
        if dtype is not None and dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"dequantize: dtype ({quote(dtype)}) is not {join_names(map(str, FLOAT_DTYPES))}; pass one of these"
            )
        return dtype or self.dtype

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedTensor({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype, bool]]:
        context = (self.format, self.dtype, self.columnwise_is_stale)
        return [name for name in self._NAMES if getattr(self, name) is not None], context

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], context: tuple[Format, torch.dtype, bool], shape: tuple[int, ...], stride: Any
    ) -> QuantizedTensor:
        fmt, dtype, stale = context
        planes = [Plane(*map(inner.get, names)) if names[0] in inner else None for names in cls._PLANES.values()]
        return cls(fmt, shape, dtype, rowwise=planes[0], columnwise=planes[1], columnwise_is_stale=stale)

    def describe(self, *, stale: bool = False) -> tuple[Description, dict[Usage, Plane]]:
        """Return the description for `_core.serialization`, and the planes as bytes.

        Raises if their memory is freed.
        """
        there = {usage: self.parts(usage, stale=stale) for usage in Usage.BOTH.planes}
        planes = {usage: parts for usage, parts in there.items() if parts is not None}
        self.check_memory()
        shape, dtype = tuple(self.shape), dtype_name(self.dtype)
        return Description(format=self.format, shape=shape, dtype=dtype, planes=tuple(planes)), planes

    def check_memory(self) -> None:
        """Raise RuntimeError if the memory of a part is freed."""
        for name in self.__tensor_flatten__()[0]:
            part = getattr(self, name)
            if part.untyped_storage().nbytes() < (part.storage_offset() + part.numel()) * part.itemsize:
                raise RuntimeError(
                    f"QuantizedTensor: {self!r} has no memory now, as sharded weights are freed between uses; use "
                    "ZeroOptimizer.full_weights() to save or copy it"
                )

    def _foreign_attributes(self) -> dict[str, Any]:
        """Return attributes set by others: by `nn.Parameter` and by users."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the tensors and metadata of `to_plain`, rebuilt by `_rebuild`. A stale plane stays stale.

        A part that is a view of larger memory, such as the buffer of a `ZeroOptimizer`, is cloned unless it is in
        shared memory: `torch.save` would write all of that memory, and rejects memory with several dtypes.
        """
        warn_if_has_hooks(self)
        description, planes = self.describe(stale=True)
        parts = {name: part if _is_all_of_its_memory(part) else part.clone() for name, part in flat(planes).items()}
        text = text_of({"": description})
        return _rebuild, (text, parts, self.columnwise_is_stale, self.requires_grad, self._foreign_attributes())

    @property
    def data(self) -> Tensor:
        return super().data

    @data.setter
    def data(self, value: Tensor) -> None:
        """Take the planes of `value`, codes of the same format and shape. Raise for values: PyTorch ignores them."""
        given: Any = value
        is_codes = isinstance(given, QuantizedTensor)
        if not is_codes or (given.format, given.shape, given.device) != (self.format, self.shape, self.device):
            what = f"{given.format}, {tuple(given.shape)}, on {given.device}" if is_codes else type(given).__name__
            raise ValueError(
                f"QuantizedTensor: data ({what}) is not codes of {self.format}, {tuple(self.shape)}, on {self.device}; "
                "pass quantize(values, tensor.format), or replace the parameter"
            )
        for usage in Usage.BOTH.planes:
            self.set(usage, given.parts(usage, stale=True))
        self.columnwise_is_stale = given.columnwise_is_stale

    def __copy__(self) -> QuantizedTensor:
        copied = self._of_planes(lambda part: part)
        copied.requires_grad_(self.requires_grad)
        copied.__dict__.update(self._foreign_attributes())
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> QuantizedTensor:
        """Deep-copy the planes. Planes that share memory also share it in the copy, as with plain tensors."""
        if not self.is_leaf:
            return cast(QuantizedTensor, super().__deepcopy__(memo))  # Raises, as for any non-leaf tensor.
        if id(self) not in memo:
            self.check_memory()
            copied = self._of_planes(lambda part: copy.deepcopy(part, memo))
            copied.requires_grad_(self.requires_grad)
            memo[id(self)] = copied
            copied.__dict__.update(copy.deepcopy(self._foreign_attributes(), memo))
            copied.grad = copy.deepcopy(self.grad, memo)
        found: QuantizedTensor = memo[id(self)]
        return found

    def __create_write_items__(self, name: str, _: Any) -> Any:
        """Raise: `torch.distributed.checkpoint` calls this method to save."""
        raise NotImplementedError(
            f"torch.distributed.checkpoint: {name} (QuantizedTensor) is not a plain tensor; save, and load into, "
            "to_plain(state_dict), which shares its memory"
        )

    def __create_chunk_list__(self) -> Any:
        """Raise: `torch.distributed.checkpoint` calls this method to load."""
        return self.__create_write_items__("tensor", self)

    def share_memory_(self) -> QuantizedTensor:
        self.check_memory()
        for name in self.__tensor_flatten__()[0]:
            getattr(self, name).share_memory_()
        return self

    def is_shared(self) -> bool:
        self.check_memory()
        return all(getattr(self, name).is_shared() for name in self.__tensor_flatten__()[0])

    def _of_planes(self, change: Any, dtype: torch.dtype | None = None) -> QuantizedTensor:
        names, (fmt, own_dtype, stale) = self.__tensor_flatten__()
        planes = {name: change(getattr(self, name)) for name in names}
        context = fmt, dtype or own_dtype, stale
        return self.__tensor_unflatten__(planes, context, self.shape, self.stride())

    def move_to(self, device: torch.device, dtype: torch.dtype) -> QuantizedTensor:
        """Copy the codes to a device; from meta, uninitialized. A `dtype` not in `FLOAT_DTYPES` is ignored."""

        def move(plane: Tensor) -> Tensor:
            return torch.empty_like(plane, device=device) if plane.is_meta else plane.to(device)

        return self._of_planes(move, dtype if dtype in FLOAT_DTYPES else None)

    def _copy(self, other: QuantizedTensor) -> QuantizedTensor:
        stored = [(t.format, tuple(t.shape), t.columnwise_is_stale, t.__tensor_flatten__()[0]) for t in (self, other)]
        if stored[0] != stored[1]:
            raise ValueError(
                f"copy_: source ({other.format}, {tuple(other.shape)}) and destination ({self.format}, "
                f"{tuple(self.shape)}) differ in format, shape or planes; quantize them alike"
            )
        for name in stored[0][-1]:
            getattr(self, name).copy_(getattr(other, name))
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args else None
        if isinstance(self, QuantizedTensor):
            if (result := self._run(func, args, kwargs)) is not None:
                return result
            if func in _SAME or (func in _RESHAPES and _keeps_shape(*args)):
                return self._of_planes(lambda plane: plane.detach())
            if func is aten.clone.default:
                return self._of_planes(lambda plane: plane.clone())
            if func is aten._to_copy.default and kwargs.get("dtype", self.dtype) == self.dtype:
                keep = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
                return self._of_planes(lambda plane: aten._to_copy.default(plane, **keep))
            if func is aten.copy_.default and isinstance(args[1], QuantizedTensor):
                return self._copy(args[1])
            if func in _MAKES_PLAIN:
                plain = torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape)
                return func(plain, *args[1:], **kwargs)
        raise NotImplementedError(
            f"{cls.__name__}: {func} is not supported on codes; call .dequantize() and use the result"
        )

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op that only a subclass supports; None for any other op."""
        return None


_SAME = {aten.detach.default, aten.alias.default}
_RESHAPES = {aten.as_strided.default, aten.view.default}
# Used to create gradients and optimizer states: these ops return plain tensors of `self.dtype`.
_MAKES_PLAIN = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_empty.default,
}


def _keeps_shape(self: QuantizedTensor, shape: Any, stride: Any = None, *offset: Any) -> bool:
    """Return True if a view covers all elements unchanged. FSDP2 takes such an `as_strided` of the gathered weight."""
    return tuple(shape) == self.shape and (stride is None or tuple(stride) == self.stride()) and not any(offset)


_OWN = {"format", "format_id", "columnwise_is_stale", *QuantizedTensor._NAMES}


def _is_all_of_its_memory(part: Tensor) -> bool:
    alone = part.untyped_storage().nbytes() == part.numel() * part.itemsize
    return alone or (part.device.type == "cpu" and part.is_shared())


def _rebuild(
    text: str, arrays: dict[str, Tensor], stale: bool, requires_grad: bool, others: dict[str, Any]
) -> QuantizedTensor:
    """Rebuild a pickled tensor. Saved files contain this name and these arguments, so neither may change.

    `torch.load(weights_only=True)` calls it with untrusted file contents. It uses only parts that the description in
    the file declares, so kernels never see other shapes.
    """
    op, descriptions = "QuantizedTensor", parse_metadata(text, op="QuantizedTensor")
    if set(descriptions) != {""} or not isinstance(arrays, dict) or not isinstance(others, dict):
        raise ValueError(f"{op}: saved state describes {len(descriptions)} tensors, not one; the file is damaged")
    if clash := sorted(_OWN & set(others)):
        raise ValueError(f"{op}: saved attribute {clash[0]} cannot be set; the file is damaged")
    tensors = {name: part for name, part in arrays.items() if isinstance(part, Tensor)}
    tensor = from_description(op, "tensor", descriptions[""], descriptions[""].take(tensors, op=op))
    if stale and tensor.parts(Usage.COLUMNWISE) is None:
        raise ValueError(f"{op}: the stale columnwise plane is missing; the file is damaged")
    tensor.columnwise_is_stale = bool(stale)
    tensor.requires_grad_(bool(requires_grad))
    tensor.__dict__.update(others)
    return tensor


def from_description(op: str, name: str, description: Description, planes: dict[Usage, Plane]) -> QuantizedTensor:
    """Build a tensor from the planes that `Description.take` returned, in their memory."""
    parts = [part for of_plane in planes.values() for part in of_plane if part is not None]
    for part in parts:
        if is_traceable_wrapper_subclass(part) or part.layout != torch.strided:
            raise ValueError(f"{op}: {name} ({type(part).__name__}) is not a plain tensor; pass the output of to_plain")
    if len(devices := {str(part.device) for part in parts}) > 1:
        raise ValueError(
            f"{op}: {name} (on {', '.join(sorted(devices))}) is not on one device; move its tensors to one"
        )
    whole = {
        usage: Plane(*(None if part is None else part.detach().contiguous() for part in of_plane))
        for usage, of_plane in planes.items()
    }
    rowwise, columnwise = map(whole.get, Usage.BOTH.planes)
    dtype = getattr(torch, description.dtype)
    return QuantizedTensor(description.format, description.shape, dtype, rowwise=rowwise, columnwise=columnwise)


torch.serialization.add_safe_globals([_rebuild])
