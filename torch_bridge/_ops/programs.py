"""Recorded programs: a function over `ops`, planned once for shapes, dtypes and formats, then run in one call into C++.

`Steps` wraps a function over `ops`, such as the functions of `_core.quantize_steps`, on values without gradients. To
record it, the function runs once on `_Slot`s, which have shapes and dtypes but no memory, with an `ops` that records
each op. The result is a text, which the op `run_program` runs (`host/program.h`). It allocates the results and the
intermediate tensors, and runs the handlers one after another. So each rule of the pipeline is written once, and a call
does not pay for evaluating it.

If a call may not skip the dispatcher (`eager.py`), or if the program fails, the function runs on real tensors, one op
of `torch.ops.qshard` after another, each with its checks.

Programs hold no tensors. They are cached by shapes, dtypes, device and constants.
"""

from __future__ import annotations

import functools
import json
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from qshard.formats import Format
from qshard.op_table import multi_table, table
from qshard.recipes import Recipe
from qshard.torch_bridge._ops.bind import by_lists, dtype_name, ops, plan_call, transposed_squares
from qshard.torch_bridge._ops.eager import may_skip_dispatcher
from qshard.torch_bridge._ops.flops import flops_of

T = TypeVar("T")

_ALIGNMENT = 256  # Alignment of intermediate tensors, the same as of GPU allocations.
_BY_VALUE = frozenset((type(None), bool, int, float, str, tuple, torch.Size, torch.dtype, torch.device))


_EQUALS: dict[Any, Any] = {}
"""Formats and recipes by themselves: the first of all that are equal."""


def first_equal(value: T) -> T:
    """Return the first format or recipe that was equal to this one, so that identity compares them; else the value.

    >>> from qshard.recipes import CurrentScaling
    >>> first_equal(CurrentScaling()) is first_equal(CurrentScaling())
    True
    """
    if not isinstance(value, Format | Recipe):
        return value
    first: T = _EQUALS.setdefault(value, value)
    return first


class Memo(Generic[T]):
    """A function with a cache of at most `most` results. When it is full, the whole cache is cleared.

    Unlike `functools.lru_cache`, it finds formats, recipes and all other objects that are not plain values by identity,
    because hashing them takes longer than the call. If it does not find them, it looks for equal formats and recipes,
    which takes less time than the function. A result keeps its arguments alive, so no id is reused.

    >>> double = Memo(lambda text: text * 2)
    >>> double("ab"), double("ab"), len(double)
    ('abab', 'abab', 1)
    """

    def __init__(self, function: Callable[..., T], most: int = 1024):
        self._function, self._most = function, most
        self._results: dict[tuple[Any, ...], tuple[tuple[Any, ...], T]] = {}

    def __call__(self, *args: Any) -> T:
        key = tuple([arg if type(arg) in _BY_VALUE else id(arg) for arg in args])
        found = self._results.get(key)
        if found is None:
            first = tuple(map(first_equal, args))
            is_first = all(map(operator.is_, first, args))
            result = self._function(*args) if is_first else self(*first)
            if len(self._results) >= self._most:
                self._results.clear()
            found = self._results[key] = (args, result)
        return found[1]

    def __len__(self) -> int:
        return len(self._results)

    def clear(self) -> None:
        self._results.clear()


class Steps:
    """A function over `ops` that is recorded as a program.

    Args:
      function: `function(ops, *tensors, *constants)` returns a tuple of tensors or None. Results may be views of the
        tensors that it computes, by `view`. It must depend on nothing but constants, shapes and dtypes.

    >>> def amaxes(ops, x):
    ...     return ops.amax_tensor(x, lead=1), ops.amax_tensor(x, lead=0)
    >>> Steps(amaxes)((torch.tensor([[1.0, -3.0], [2.0, 0.0]]),))
    (tensor([3., 2.]), tensor(3.))
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]]):
        self._function = function
        self.programs = Memo(self._record)

    def __call__(
        self, tensors: tuple[Tensor, ...], *constants: Any, check: Callable[[], object] | None = None
    ) -> tuple[Any, ...]:
        """Return the results. `check` raises an error that names the cause; it runs only if the program does not."""
        if may_skip_dispatcher(tensors):
            try:
                shapes, dtypes = tuple([x.shape for x in tensors]), tuple([x.dtype for x in tensors])
                program = self.programs(shapes, dtypes, tensors[0].device.type, *constants)
                if program is not None:
                    return program(tensors)
            except (ValueError, TypeError, RuntimeError):
                pass  # The steps below raise an error that names the operand.
        if check is not None:
            check()
        return self._function(ops, *[x.detach() if x.requires_grad else x for x in tensors], *constants)

    def text(
        self, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], platform: str, *constants: Any
    ) -> str | None:
        """Return the program for `run_program`, which returns the results that are neither None nor inputs."""
        program = self.programs(shapes, dtypes, platform, *constants)
        return None if program is None else program.text

    def _record(
        self, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[torch.dtype, ...], platform: str, *constants: Any
    ) -> Program | None:
        recorder = _Recorder()
        inputs = [recorder.slot(tuple(shape), dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
        try:
            results = self._function(recorder, *inputs, *constants)
        except _NoSuchOpError:
            return None
        return recorder.program(results, len(inputs), platform)


class _NoSuchOpError(Exception):
    """A step is not a qshard op, so the function cannot be recorded."""


class _Slot:
    """Placeholder of a tensor. Slots with the same number share memory."""

    def __init__(self, recorder: _Recorder, number: int, shape: tuple[int, ...], dtype: torch.dtype):
        self._recorder, self.number, self.shape, self.dtype = recorder, number, shape, dtype

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def view(self, shape: Sequence[int]) -> _Slot:
        if math.prod(shape) != math.prod(self.shape):
            raise ValueError(f"view: {self.shape} does not have as many elements as {tuple(shape)}")
        return _Slot(self._recorder, self.number, tuple(shape), self.dtype)

    reshape = view

    def new_empty(self, shape: Sequence[int]) -> _Slot:
        return self._recorder.slot(tuple(shape), self.dtype)

    def as_row(self) -> tuple[tuple[int, ...], torch.dtype, int]:
        return self.shape, self.dtype, self.number


class _Recorder:
    """An `ops` that records the ops called on it."""

    def __init__(self) -> None:
        self._slots: list[tuple[tuple[int, ...], torch.dtype]] = []
        self._rows: dict[Any, int] = {}
        self._steps: list[tuple[str, list[int], list[int], dict[str, Any]]] = []

    def slot(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Slot:
        self._slots.append((shape, dtype))
        return _Slot(self, len(self._slots) - 1, shape, dtype)

    def __getattr__(self, op: str) -> Callable[..., Any]:
        if op in multi_table():
            return functools.partial(self._in_place, op)
        return functools.partial(self._op, op)

    def _op(self, op: str, *operands: _Slot, **keywords: Any) -> Any:
        spec = table()[op]
        plan = plan_call(
            spec, tuple(x.shape for x in operands), tuple(x.dtype for x in operands), tuple(keywords.items())
        )
        outputs = [self.slot(shape, dtype) for shape, dtype in plan.outputs]
        self._add_step(op, operands, outputs, plan.attributes)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def _in_place(self, op: str, *operands: Any, **attributes: Any) -> None:
        self._add_step(op, *by_lists(multi_table()[op], operands), attributes)

    def swap_last_axes(self, x: _Slot) -> _Slot:
        raise _NoSuchOpError

    def transposed_squares(self, data: _Slot, scale_inv: _Slot, *, packed: bool) -> Any:
        return transposed_squares(self, data, scale_inv, packed=packed)

    def _add_step(
        self, op: str, operands: Sequence[_Slot], written: Sequence[_Slot], attributes: dict[str, Any]
    ) -> None:
        inputs, results = (
            [self._rows.setdefault(x.as_row(), len(self._rows)) for x in xs] for xs in (operands, written)
        )
        self._steps.append((op, inputs, results, attributes))

    def _buffer_offsets(self, numbers: Sequence[int]) -> tuple[dict[int, int], int]:
        """Return byte offsets in one buffer, and its size. Tensors that are not live at the same time share bytes."""
        lives: dict[int, list[int]] = {}
        by_row = [number for *_, number in self._rows]
        for i, (_, *sides, _) in enumerate(self._steps):
            for row in (row for side in sides for row in side):
                lives.setdefault(by_row[row], []).append(i)
        placed: list[tuple[int, int, int, int]] = []  # Start, end, first step, last step.
        offsets: dict[int, int] = {}
        for number in numbers:
            shape, dtype = self._slots[number]
            size = -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
            steps = lives.get(number, [-1])
            live = sorted(place for place in placed if place[2] <= steps[-1] and steps[0] <= place[3])
            at = 0
            for start, end, *_ in live:
                if at + size <= start:
                    break
                at = max(at, end)
            offsets[number] = at
            placed.append((at, at + size, steps[0], steps[-1]))
        return offsets, max((end for _, end, *_ in placed), default=0)

    def program(self, results: Sequence[_Slot | None], inputs: int, platform: str) -> Program:
        """Build the program. Each result has its own memory; intermediate tensors share one buffer."""
        distinct: dict[int, _Slot] = {}
        for x in results:
            if x is not None and x.shape != distinct.setdefault(x.number, x).shape:
                raise ValueError(
                    f"Steps: a result {x.shape} is another's, which has another shape, {distinct[x.number].shape}"
                )
        distinct = {number: x for number, x in distinct.items() if number >= inputs}
        sources = {number: inputs + i for i, number in enumerate(distinct)} | {i: i for i in range(inputs)}
        offsets, size = self._buffer_offsets([number for number in range(len(self._slots)) if number not in sources])
        end = inputs + len(distinct)
        slots = [
            (dtype_name(dtype), shape, sources.get(number, end), offsets.get(number, 0))
            for shape, dtype, number in self._rows
        ]
        outputs = [(dtype_name(x.dtype), x.shape) for x in distinct.values()]
        description = {
            "platform": platform,
            "inputs": inputs,
            "outputs": outputs,
            "scratch": max(size, bool(offsets)),  # Tensors without elements are in it, too.
            "slots": slots,
            "steps": self._steps,
        }
        # A call looks up the number of a result among its inputs, its outputs and None.
        return Program(_text_of(description), tuple(end if x is None else sources[x.number] for x in results))


class Program:
    """A recorded function: the text for `run_program`, and which of the inputs and outputs it returns."""

    def __init__(self, text: str, results: tuple[int, ...]):
        self.text = text
        first, *others = results
        self._pick = operator.itemgetter(*results) if others else operator.itemgetter(slice(first, first + 1))

    def __call__(self, inputs: tuple[Tensor, ...]) -> tuple[Any, ...]:
        picked: tuple[Any, ...] = self._pick((*inputs, *run_program(inputs, self.text), None))
        return picked


def _text_of(description: dict[str, Any]) -> str:
    """Encode a program as JSON with apostrophes.

    With `cpp_wrapper` inductor writes the text into C++, and escapes no quotes.
    """
    return json.dumps(description, separators=(",", ":")).replace('"', "'")


@functools.cache
def _description_of(text: str) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(text.replace("'", '"'))
    return description


def _run_fake(inputs: Sequence[Tensor], program: str) -> list[Tensor]:
    outputs = _description_of(program)["outputs"]
    return [inputs[0].new_empty(shape, dtype=getattr(torch, dtype)) for dtype, shape in outputs]


def _flops_of_program(inputs: Sequence[Any], program: str, out_val: object = None) -> int:
    description = _description_of(program)
    shapes = [shape for _, shape, *_ in description["slots"]]
    steps = ((op, [shapes[slot] for slot in slots], attributes) for op, slots, _, attributes in description["steps"])
    # Ops on lists are not in `table`. Programs contain none that is a product.
    return sum(flops_of(table()[op], *of_step) for op, *of_step in steps if op in table())


_LIBRARY = torch.library.Library("qshard", "FRAGMENT")


def _define(overload: str, returns: str, run_fake: Callable[..., Any]) -> Any:
    name = f"run_program{overload}"
    tags = [torch.Tag.needs_exact_strides, torch.Tag.pt2_compliant_tag]
    _LIBRARY.define(f"{name}(Tensor[] inputs, str program) -> {returns}", tags=tags)
    torch.library.register_fake(f"qshard::{name}", run_fake, lib=_LIBRARY)
    # Programs run on values without gradients, also in grad mode.
    _LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    return getattr(torch.ops.qshard.run_program, overload.removeprefix(".") or "default")


run_program: Callable[[Sequence[Tensor], str], list[Tensor]] = _define("", "Tensor[]", _run_fake)
"""The op that runs a program: `run_program(inputs, text)` returns its outputs. The kernel is in C++."""

# PyTorch's `cpp_wrapper` calls ops that return a list through Python, and fails for a list of one tensor.
_run_one = _define(".one", "Tensor", lambda inputs, program: _run_fake(inputs, program)[0])
_run_two = _define(".two", "(Tensor, Tensor)", lambda inputs, program: tuple(_run_fake(inputs, program)))

register_flop_formula(torch.ops.qshard.run_program, get_raw=True)(_flops_of_program)


def run_in_graph(inputs: Sequence[Tensor], text: str, outputs: int) -> Sequence[Tensor]:
    """Run a program with one or two outputs in a compiled graph."""
    results: Sequence[Tensor] = _run_two(inputs, text) if outputs == 2 else (_run_one(inputs, text),)
    return results
