"""Calls of single kernels on NumPy arrays, without a front end."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import torch

from qshard import _ffi
from qshard.formats import ELEMENTS
from qshard.op_table import Binding
from support.awkward import BFLOAT16, assert_all_bits_equal
from support.draws import SPECS, Call
from support.oracle import oracle

device = "cpu"
"""Device of the kernels. `tests/cpu/kernel_bits.py` sets it."""
OWN_EXPONENTIALS = tuple(name for name in SPECS if name.startswith("cross_entropy"))
"""Ops whose exponentials are an instruction of a GPU there."""
WAYS = ("plain", "flushed", "odd", "in place")
"""How: "flushed", with subnormals flushed to zero in this thread; "odd", from and to the middle of a cache line, and
nothing beside the results may be written; "in place", with each result that has the name of an operand in its memory.
"""


def check(made: Call, ways: tuple[str, ...] = WAYS) -> None:
    """Assert the bits of the reference for all ways to call an op, and for both forms of a matrix in blocks.

    Ops with a GPU's own exponentials have the bits of the first way; tests/cpu/test_cross_entropy.py has their errors.
    """
    want = run(made) if device != "cpu" and made.spec.name in OWN_EXPONENTIALS else oracle(made)
    splits = [False]
    if made.spec.splits and bind(made).split:
        splits.append(True)
    for way, split in itertools.product(ways, splits):
        assert_all_bits_equal(run(made, way, split=split), want, f"{made}, {way}, split {split}")


def call(op: str, *operands: Any, **options: Any) -> Any:
    """Call an op with shapes, dtypes and attributes from its row, and return the result or a list."""
    spec = SPECS[op]
    if "dtype" in options:
        options["dtype"] = str(np.dtype(options["dtype"]))
    lists = [operand if isinstance(operand, list) else [operand] for operand in operands]
    tensors = [[(x.shape, str(x.dtype)) for x in each] for each in lists]
    results = run(Call(spec, options, tensors, list(operands)))
    return results[0] if len(results) == 1 else results


def run(made: Call, way: str = "plain", *, split: bool = False) -> list[np.ndarray]:
    """Run a call and return its results. Ops on lists write to the operands of the same names."""
    beside = 61 if way == "odd" else 0
    inputs, outputs = placed(made, beside, split=split, in_place=way == "in place")
    torch.set_flush_denormal(way == "flushed")  # A thread setting: must be off again before NumPy runs.
    try:
        results = [result for result, _ in outputs]
        _ffi.call(made.spec.name, inputs, results, attributes_of(made, split=split))
    finally:
        torch.set_flush_denormal(False)
    arrays = []
    for _, (room, view) in outputs:
        whole = to_numpy(room).view(np.uint8)
        edge = beside * room.element_size()
        for side in (whole[:edge], whole[len(whole) - edge :]):
            assert (side == 0x5A).all(), f"wrote beside a result of {made}"
        arrays.append(to_numpy(view))
    return arrays


Placed = tuple[torch.Tensor, torch.Tensor]
"""A buffer, and a tensor in it with margins on both sides."""


def placed(
    made: Call, beside: int = 0, *, split: bool = False, in_place: bool = False
) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, Placed]]]:
    """Return a handler's operands, and its results with their initial pattern and buffer."""
    spec = made.spec
    operands = [[_placed(x, beside) for x in (o if isinstance(o, list) else [o])] for o in made.operands]
    given = {operand.name: tensors for operand, tensors in zip(spec.inputs, operands, strict=True)}
    if spec.many:
        outputs = [given[output.name] for output in spec.outputs]
        if made.options.get("update"):  # Of Adam: a result of its own.
            outputs[0] = [_room(shape, "float32", beside) for shape, _ in made.tensors[1]]
    else:
        outputs = [
            (in_place and given.get(output.name)) or [_room(shape, "uint8" if d in ELEMENTS else d, beside)]
            for output, (shape, d) in zip(spec.outputs, made.results(), strict=True)
        ]
    inputs = [view for each in operands for _, view in each]
    rooms = list(itertools.chain(*outputs))
    results = [view for _, view in rooms]
    if split:
        binding = bind(made)
        inputs, results = (
            [x.view([factor.size for factor in view.factors]) for x, view in zip(side, views, strict=True)]
            for side, views in ((inputs, binding.inputs), (results, binding.outputs))
        )
    return inputs, list(zip(results, rooms, strict=True))


def attributes_of(made: Call, *, split: bool = False) -> dict[str, Any]:
    """Return all attributes of the handler, with the form of the call if it has two."""
    given = {name: value for name, value in made.options.items() if name != "dtype"}
    return {**given, "split": True} if split else given


def bind(made: Call) -> Binding:
    """Bind an op on single tensors."""
    shapes, dtypes = zip(*(one for (one,) in made.tensors), strict=True)
    return made.spec.bind(shapes, dtypes, attributes_of(made), made.options.get("dtype"), may_shard=True)


def _placed(x: np.ndarray, beside: int) -> Placed:
    room, view = _room(np.asarray(x).shape, str(x.dtype), beside)
    view.copy_(to_torch(np.asarray(x)))
    return room, view


def _room(shape: tuple[int, ...], dtype: str, beside: int) -> Placed:
    """Allocate a nonzero buffer, so that unwritten elements are detected."""
    count = math.prod(shape)
    kind = getattr(torch, dtype)
    room = torch.full(((count + 2 * beside) * kind.itemsize,), 0x5A, dtype=torch.uint8, device=device).view(kind)
    return room, room[beside : beside + count].view(shape)


def to_torch(x: np.ndarray) -> torch.Tensor:
    """Copy to the device. NumPy has no native bfloat16."""
    x = np.asarray(x, order="C")
    if x.dtype == BFLOAT16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16).to(device)
    return torch.from_numpy(x).to(device)


def to_numpy(x: torch.Tensor) -> np.ndarray:
    x = x.cpu()
    return x.view(torch.int16).numpy().view(BFLOAT16) if x.dtype == torch.bfloat16 else x.numpy()
