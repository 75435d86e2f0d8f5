"""Calls of single kernels on NumPy arrays, without a front end."""

from __future__ import annotations

import itertools
from typing import Any

import ml_dtypes
import numpy as np
import torch

from qshard import _ffi
from qshard.formats import ELEMENTS
from qshard.ops import Binding, Operand, table

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
device = "cpu"
"""Whose kernels to call. `tests/cpu/kernel_bits.py` sets it."""
ways: tuple[str, ...] = ("plain",)
"""How: "plain"; "flushed", with subnormals flushed to zero in this thread; "odd", from and to the middle of a cache
line, and nothing beside the results may be written. Results of the ways must be the same."""


def call(
    op: str, *inputs: np.ndarray, split: bool | None = None, dtype: np.typing.DTypeLike = None, **options: Any
) -> Any:
    """The results of `op` (one, or a list), from its table row alone: shapes, dtypes, attributes.

    `split` chooses the form in which ops on blocks see a matrix. Memory and results are the same in both, so a test
    leaves it open, and gets both compared.
    """
    spec = table()[op]
    call_of = [x.shape for x in inputs], [str(x.dtype) for x in inputs]
    binding = spec.bind(*call_of, options, None if dtype is None else str(np.dtype(dtype)), cuttable=True)
    if split is None and spec.row.splits:
        forms = [False, True] if binding.split else [False]
        results = [call(op, *inputs, split=form, dtype=dtype, **options) for form in forms]
        for a, b in itertools.pairwise(results):
            for x, y in zip(*(r if isinstance(r, list) else [r] for r in (a, b)), strict=True):
                assert x.tobytes() == y.tobytes(), f"{op}: split or not makes a difference"
        return results[0]
    attributes = options if split is None else {**options, "split": split}
    assert binding.split or not split
    outputs = [(shape, np.dtype(np.uint8 if name in ELEMENTS else name)) for shape, name in binding.results]
    every = [_run(op, inputs, outputs, binding, attributes, way) for way in ways]
    for way, results in zip(ways, every, strict=True):
        for x, y in zip(results, every[0], strict=True):
            assert x.tobytes() == y.tobytes(), f"{op}: {way} differs from {ways[0]}"
    return every[0][0] if len(every[0]) == 1 else every[0]


def _run(
    op: str,
    inputs: tuple[np.ndarray, ...],
    outputs: list[tuple[tuple[int, ...], np.dtype]],
    binding: Binding,
    attributes: dict[str, Any],
    way: str,
) -> list[np.ndarray]:
    beside = 61 if way == "odd" else 0
    operands, results, rooms = [], [], []
    for x in inputs:
        room = np.concatenate([np.zeros(beside, x.dtype), np.ravel(x)])
        operands.append(_tensor(room)[beside:].view(x.shape))
    for shape, dtype in outputs:
        # Not zeros, so that an element that nobody writes is seen.
        count = int(np.prod(shape)) + 2 * beside
        rooms.append(_tensor(np.full(count * dtype.itemsize, 0x5A, np.uint8).view(dtype)))
        results.append(rooms[-1][beside : count - beside].view(shape))
    if attributes.get("split"):
        operands, results = (
            [x.view([factor.size for factor in view.factors]) for x, view in zip(side, views, strict=True)]
            for side, views in ((operands, binding.inputs), (results, binding.outputs))
        )
    torch.set_flush_denormal(way == "flushed")  # Off before NumPy works again: it is the thread's.
    try:
        _ffi.call(op, tuple(operands), tuple(results), attributes)
    finally:
        torch.set_flush_denormal(False)
    arrays = []
    for room, (shape, dtype) in zip(rooms, outputs, strict=True):
        whole = (room.view(torch.int16) if room.dtype == torch.bfloat16 else room).cpu().numpy().view(dtype)
        for edge in (whole[:beside], whole[len(whole) - beside :]):
            assert (edge.view(np.uint8) == 0x5A).all(), f"{op}: wrote beside a result"
        arrays.append(whole[beside : len(whole) - beside].reshape(shape))
    return arrays


def codes_per_byte(operand: Operand, element: str | None) -> int:
    """How many codes share a byte, if the operand holds codes of `element`; else 1."""
    if operand.dtype == "packed":
        return 2
    return ELEMENTS[element].codes_per_byte if operand.dtype == "code" and element is not None else 1


def _tensor(x: np.ndarray) -> torch.Tensor:
    """torch has bfloat16, NumPy has not."""
    x = np.asarray(x, order="C")
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


class NumpyOps:
    """The CPU ops as functions of NumPy arrays: what `qshard.pipeline` asks of a front end."""

    def __getattr__(self, name: str) -> Any:
        if name not in table():
            raise AttributeError(name)

        def run(*arrays: Any, **options: Any) -> Any:
            results = call(name, *(np.asarray(a) for a in arrays), **options)
            return tuple(results) if isinstance(results, list) else results

        return run

    @staticmethod
    def transposed(array: np.ndarray) -> np.ndarray:
        """A row-major copy with the last two axes swapped."""
        return np.ascontiguousarray(np.swapaxes(array, -1, -2))

    def transposed_squares(self, data: np.ndarray, scale_inv: np.ndarray, *, packed: bool) -> tuple[np.ndarray, ...]:
        data_t = self.transpose_packed(data) if packed else self.transpose(data, batch=data.ndim - 2)
        return data_t, self.transposed(scale_inv)
