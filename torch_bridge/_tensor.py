"""`QuantizedTensor`: codes and scales that stand for a high-precision tensor."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from qshard.formats import Format
from qshard.torch_bridge import _pipeline

__all__ = ["Plane", "QuantizedTensor"]

aten = torch.ops.aten


class Plane(NamedTuple):
    """What one GEMM reads of a quantized tensor; `qshard.layout` has the shapes.

    Attributes:
      data: the codes, in their own dtype.
      scale_inv: value = code * scale_inv.
    """

    data: Tensor
    scale_inv: Tensor


class QuantizedTensor(Tensor):
    """A tensor of dtype `dtype` and shape `shape`, stored as `fmt`: `value = fl(code * scale_inv)`, rounded to `dtype`.

    A container: it can be moved, detached and dequantized. All other ops on it raise, since each would have to choose
    between values and codes, and values cost what the format saved. It has no gradient of its own, except as the weight
    of `Linear`, where it stands for a parameter of dtype `dtype`.

    Attributes:
      format: how it is stored.
      rowwise: the `Plane` with blocks along the last axis; None if absent.
      columnwise: the `Plane` with blocks along the first axis; None if absent.
      global_scale_inv: the second scale of formats that have one, else None.

    Under FSDP2 it is what a sharded weight becomes between gather and reshard: its codes are the gathered bytes.

    >>> from qshard.formats import FP8_E4M3, Usage
    >>> from qshard.torch_bridge import quantize
    >>> q = quantize(torch.tensor([[1.0, 0.5]]), FP8_E4M3, usage=Usage.BOTH)
    >>> q.rowwise.data.dtype, tuple(q.columnwise.data.shape), q.dequantize()
    (torch.float8_e4m3fn, (2, 1), tensor([[1.0000, 0.5000]]))
    >>> q + 1
    Traceback (most recent call last):
    NotImplementedError: QuantizedTensor: aten.add.Tensor is not an op on codes; call .dequantize() and use its result
    """

    format: Format
    _rowwise_data: Tensor | None
    _columnwise_data: Tensor | None
    _scale_inv: Tensor | None
    _columnwise_scale_inv: Tensor | None
    _global_scale_inv: Tensor | None

    _PLANES = ("_rowwise_data", "_columnwise_data", "_scale_inv", "_columnwise_scale_inv", "_global_scale_inv")

    @staticmethod
    def __new__(
        cls,
        fmt: Format,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        rowwise_data: Tensor | None = None,
        columnwise_data: Tensor | None = None,
        scale_inv: Tensor | None = None,
        columnwise_scale_inv: Tensor | None = None,
        global_scale_inv: Tensor | None = None,
    ) -> QuantizedTensor:
        """Wraps planes that exist. Use `quantize` to make them.

        Args:
          fmt: the format.
          shape, dtype: of the tensor it stands for.
          rowwise_data, columnwise_data: codes as uint8.
          scale_inv: of the rowwise plane, or of both if the format has one scale for the whole tensor.
          columnwise_scale_inv: of the columnwise plane, if the format has more.
          global_scale_inv: of both planes.
        """
        data = rowwise_data if rowwise_data is not None else columnwise_data
        assert data is not None
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=data.device)
        self.format = fmt
        self._rowwise_data, self._columnwise_data = rowwise_data, columnwise_data
        self._scale_inv, self._columnwise_scale_inv = scale_inv, columnwise_scale_inv
        self._global_scale_inv = global_scale_inv
        return self

    @property
    def rowwise(self) -> Plane | None:
        if self._rowwise_data is None or self._scale_inv is None:
            return None
        return Plane(_pipeline.as_element(self._rowwise_data, self.format), self._scale_inv)

    @property
    def columnwise(self) -> Plane | None:
        scale_inv = self._scale_inv if self._columnwise_scale_inv is None else self._columnwise_scale_inv
        if self._columnwise_data is None or scale_inv is None:
            return None
        return Plane(_pipeline.as_element(self._columnwise_data, self.format), scale_inv)

    @property
    def global_scale_inv(self) -> Tensor | None:
        return self._global_scale_inv

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, `fl(code * scale_inv)` rounded once to `dtype`.

        Args:
          dtype: float32, bfloat16 or float16; `self.dtype` by default.

        Returns:
          A plain tensor of `self.shape`. Both planes give the same bits.
        """
        dtype = self.dtype if dtype is None else dtype
        if self._rowwise_data is not None and self._scale_inv is not None:
            return _pipeline.dequantize(self.format, self._rowwise_data, self._scale_inv, dtype)
        plane = self.columnwise
        assert plane is not None
        values = _pipeline.dequantize(self.format, plane.data.view(torch.uint8), plane.scale_inv, dtype)
        return values.t().reshape(self.shape).contiguous()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"QuantizedTensor({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Format, torch.dtype]]:
        return [name for name in self._PLANES if getattr(self, name) is not None], (self.format, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        planes: dict[str, Tensor], context: tuple[Format, torch.dtype], shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> QuantizedTensor:
        fmt, dtype = context
        return QuantizedTensor(fmt, shape, dtype, **{name.removeprefix("_"): plane for name, plane in planes.items()})

    def _of_planes(self, change: Any) -> QuantizedTensor:
        names, context = self.__tensor_flatten__()
        planes = {name: change(getattr(self, name)) for name in names}
        return QuantizedTensor.__tensor_unflatten__(planes, context, self.shape, self.stride())

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        self = args[0] if args else None
        if isinstance(self, QuantizedTensor):
            if func in _SAME or (func in _RESHAPES and _keeps_shape(self, func, args)):
                return self._of_planes(lambda plane: plane.detach())
            if func is aten.clone.default:
                return self._of_planes(lambda plane: plane.clone())
            if func is aten._to_copy.default and kwargs.get("dtype", self.dtype) == self.dtype:
                keep = {name: value for name, value in kwargs.items() if name in ("device", "non_blocking")}
                return self._of_planes(lambda plane: aten._to_copy.default(plane, **keep))
            if func in _MAKES_PLAIN:
                like = torch.empty((0,), dtype=self.dtype, device=self.device)
                options = {"dtype": like.dtype, "device": like.device, **_given(kwargs)}
                return _MAKES_PLAIN[func](self.shape, *args[1:], **options)
        raise NotImplementedError(
            f"QuantizedTensor: {func} is not an op on codes; call .dequantize() and use its result"
        )


_SAME = {aten.detach.default, aten.alias.default}
_RESHAPES = {aten.as_strided.default, aten.view.default}
# What gradients and optimizer states are made with: plain tensors of the dtype that the codes stand for.
_MAKES_PLAIN: dict[Any, Any] = {
    aten.zeros_like.default: torch.zeros,
    aten.ones_like.default: torch.ones,
    aten.empty_like.default: torch.empty,
    aten.full_like.default: torch.full,
    aten.new_zeros.default: lambda _, shape, **options: torch.zeros(shape, **options),
    aten.new_empty.default: lambda _, shape, **options: torch.empty(shape, **options),
}


def _given(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: kwargs[name] for name in ("dtype", "device") if kwargs.get(name) is not None}


def _keeps_shape(self: QuantizedTensor, func: Any, args: Any) -> bool:
    """Whether a view is of all elements as they are. FSDP2 asks for such an `as_strided` of what it has gathered."""
    if tuple(args[1]) != tuple(self.shape):
        return False
    return func is aten.view.default or (tuple(args[2]) == self.stride() and not any(args[3:]))
