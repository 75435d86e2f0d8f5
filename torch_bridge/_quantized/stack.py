"""`QuantizedStack`: the codes of several matrices, each with its own scales, in one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qshard._core import quantize_steps
from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import Usage
from qshard.layout import is_transposed
from qshard.torch_bridge._ops.bind import ops
from qshard.torch_bridge._quantized.tensor import FLOAT_DTYPES, QuantizedTensor

aten = torch.ops.aten


class QuantizedStack(QuantizedTensor):
    """Matrices `[E, N, K]` that are quantized apart and stored next to each other, as the weights of experts.

    FSDP2 and ZeRO gather the weights of experts in one parameter as such a tensor, and `grouped_linear` multiplies its
    codes. Each matrix has the codes and scales of `quantize` of this matrix alone. Planes are as in `QuantizedTensor`,
    and every part has a leading axis of E: the scale of a per-tensor format is `[E]`.

    Besides the ops of `QuantizedTensor` it has `stack[e]`, a `QuantizedTensor` in the same memory; a transpose of its
    last two axes, which exchanges the planes and needs a format with 2-D blocks or one scale; and `.to(dtype)`, which
    keeps the codes and changes the dtype of the values.

    >>> from qshard.formats import FP8_E4M3
    >>> plane = Plane(torch.full((2, 1, 3), 56, dtype=torch.uint8), torch.tensor([1.0, 2.0]))  # codes of 1
    >>> stack = QuantizedStack(FP8_E4M3, (2, 1, 3), torch.float32, rowwise=plane)
    >>> stack.dequantize()
    tensor([[[1., 1., 1.]],
    <BLANKLINE>
            [[2., 2., 2.]]])
    >>> stack[1], stack.mT.shape
    (QuantizedTensor(FP8_E4M3, shape=(1, 3), dtype=torch.float32, device=cpu), torch.Size([2, 3, 1]))
    """

    @classmethod
    def of(cls, matrices: Sequence[QuantizedTensor]) -> QuantizedStack:
        """Copy the codes of matrices of one format, shape and dtype, with the same planes, next to each other.

        Raises:
          TypeError: an entry is not a `QuantizedTensor`.
          ValueError: there is none, or they differ.

        >>> from qshard.torch_bridge import quantize
        >>> QuantizedStack.of([quantize(torch.ones(2, 2) * size, "FP8_E4M3") for size in (1, 2)]).dequantize()[1]
        tensor([[2., 2.],
                [2., 2.]])
        """
        for matrix in matrices:
            if type(matrix) is not QuantizedTensor:
                raise TypeError(
                    f"QuantizedStack.of: matrices ({quote(matrix)}) must be QuantizedTensors; quantize each"
                )
        kinds = {(str(one.format), tuple(one.shape), str(one.dtype), *one.__tensor_flatten__()[0]) for one in matrices}
        if len(kinds) != 1:
            raise ValueError(
                f"QuantizedStack.of: matrices ({len(matrices)}) have {len(kinds)} kinds of format, shape, dtype and "
                "planes; pass at least one, all quantized alike"
            )
        first, count = matrices[0], len(matrices)
        planes = ([parts for one in matrices if (parts := one.parts(each)) is not None] for each in Usage.BOTH.planes)
        rowwise, columnwise = (_stack_planes(each) if each else None for each in planes)
        return cls(first.format, (count, *first.shape), first.dtype, rowwise=rowwise, columnwise=columnwise)

    def dequantize(self, dtype: torch.dtype | None = None, *, usage: Usage | None = None) -> Tensor:
        """Compute the values, `fl(code * scale_inv)`, rounded once to `dtype`. Arguments as in `QuantizedTensor`."""
        dtype = self._dequantized_dtype(dtype)
        there = [each for each in Usage.BOTH.planes if self.parts(each) is not None and usage in (None, each)]
        if not there:
            raise ValueError(f"dequantize: usage ({quote(usage)}) is not a plane of {self!r}; leave it out")
        parts = self.parts(there[0])
        assert parts is not None
        values: Tensor = quantize_steps.dequantize(ops, parts, self.format, there[0], dtype)
        return values.mT.contiguous() if is_transposed(self.format, there[0]) else values

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return super().__repr__().replace("QuantizedTensor", "QuantizedStack", 1)

    def describe(self, *, stale: bool = False) -> Any:
        """Raise: files of `to_plain` have no stacks."""
        raise NotImplementedError(
            f"QuantizedStack: {self!r} is the gathered codes of experts, which files have one by one; export each, "
            "stack[e], or call reshard() on the module to export values"
        )

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Pickle the matrices one by one."""
        self.check_memory()
        matrices = [matrix.detach() for matrix in self.unbind()]
        return _stack, (matrices, self.requires_grad, self._foreign_attributes())

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.transpose.int:
            axes = {axis % self.ndim for axis in args[1:]}
            if axes == {1, 2} and self.format.shares_codes:
                rows, columns = (self.parts(each, stale=True) for each in Usage.BOTH.planes)
                shape = (self.shape[0], self.shape[2], self.shape[1])
                with torch.inference_mode(False):  # In inference mode the result could not be a view.
                    return QuantizedStack(self.format, shape, self.dtype, rowwise=columns, columnwise=rows)
        if func is aten.select.int and args[1] % self.ndim == 0:
            planes = [self.parts(each) for each in Usage.BOTH.planes]
            rows, columns = (None if own is None else _select(own, args[2]) for own in planes)
            with torch.inference_mode(False):
                return QuantizedTensor(self.format, tuple(self.shape[1:]), self.dtype, rowwise=rows, columnwise=columns)
        if func is aten.unbind.int and (args[1:] or (0,))[0] % self.ndim == 0:
            return [self[index] for index in range(self.shape[0])]
        if func is aten._to_copy.default and kwargs.get("dtype") in FLOAT_DTYPES and set(kwargs) <= {"dtype"}:
            names, (fmt, _, stale) = self.__tensor_flatten__()
            inner = {name: getattr(self, name) for name in names}
            return self.__tensor_unflatten__(inner, (fmt, kwargs["dtype"], stale), tuple(self.shape), None)
        return None


def _stack(matrices: list[QuantizedTensor], requires_grad: bool, others: dict[str, Any]) -> QuantizedStack:
    """Rebuild a pickled stack. Saved files contain this name and these arguments, so neither may change."""
    stack = QuantizedStack.of(matrices)
    stack.requires_grad_(bool(requires_grad))
    stack.__dict__.update(others)
    return stack


def _stack_planes(planes: list[Plane]) -> Plane:
    of_parts: list[list[Any]] = [[*each] for each in zip(*planes, strict=True)]
    return Plane(*(None if each[0] is None else torch.stack(each) for each in of_parts))


torch.serialization.add_safe_globals([_stack])


def _select(parts: Plane, index: int) -> Plane:
    return Plane(*(None if part is None else part[index] for part in parts))
