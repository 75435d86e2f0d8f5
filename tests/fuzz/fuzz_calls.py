"""Calls of every op, drawn from its row of `ffi/ops.def`: valid, nearly valid and hostile.

None may crash, write outside its results, or change an operand.

    python tests/fuzz/fuzz_calls.py --calls 100000 --seed 1

Every buffer ends at a page that may not be touched, and begins after bytes that are looked at. A call is drawn from the
seed and its number alone; the number of the one that crashes is in the file that `--progress` names, and
`--first N --calls 1 --show` runs that one again and prints it.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import math
import mmap
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from qshard import _ffi
from qshard.formats import ELEMENTS
from qshard.op_table import Operand, OpSpec, multi_table, table

PAGE = mmap.PAGESIZE
SLOT = 16 * PAGE
_FLOATS = ["float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"]
_INTEGERS = ["uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "bool"]
DTYPES = {name: getattr(torch, name) for name in (*_FLOATS, *_INTEGERS)}
EXTREMES = [-(2**63), -(2**62), -2, -1, 0, 1, 2**31 - 1, 2**31, 2**32, 2**61, 2**62, 2**63 - 1]
WRONG_VALUES: list[Any] = [
    *EXTREMES,
    -1.0,
    0.0,
    math.nan,
    math.inf,
    -math.inf,
    1e30,
    True,
    False,
    "",
    "up",
    "x",
    (),
    (1,),
    (-1, 2),
]


class Arena:
    """Memory for buffers, each of which ends where a page begins that may be neither read nor written."""

    def __init__(self, slots: int = 40):
        self.memory = mmap.mmap(-1, slots * (SLOT + PAGE))
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        libc = ctypes.CDLL(None, use_errno=True)
        for slot in range(slots):
            end = self.base + slot * (SLOT + PAGE) + SLOT
            assert libc.mprotect(ctypes.c_void_p(end), PAGE, 0) == 0
        self.slots = slots
        self.used = 0

    def bytes(self, count: int) -> torch.Tensor:
        """`count` bytes that end at the guard; 64 more lie before them."""
        slot, self.used = self.used % self.slots, self.used + 1
        end = self.base + slot * (SLOT + PAGE) + SLOT
        room = (ctypes.c_uint8 * (count + 64)).from_address(end - count - 64)
        ctypes.memset(end - count - 64, 0x5A, 64)
        return torch.frombuffer(room, dtype=torch.uint8)[64:]


def size_of(dtype: str) -> int:
    return DTYPES[dtype].itemsize


class Draw:
    """One call, from a source of random numbers."""

    def __init__(self, row: OpSpec, rng: random.Random, arena: Arena):
        self.row, self.rng, self.arena = row, rng, arena
        self.attributes = {name: self.attribute(name, *what) for name, what in row.attributes.items()}
        if row.blocks:
            self.attributes["block_rows"], self.attributes["block_cols"] = rng.choice(row.blocks)
        elif "block_rows" in self.attributes:
            rows = rng.choice([1, 2, 3, 16, 32])
            square = row.name.startswith("quantize_square_both") and rng.random() < 0.7
            self.attributes |= {"block_rows": rows, "block_cols": rows if square else rng.choice([1, 2, 16, 32])}
            if row.many and rng.random() < 0.3:
                self.attributes |= {"block_rows": 0, "block_cols": 0}
        if row.splits and rng.random() < 0.6:
            self.attributes["split"] = rng.random() < 0.5
        self.sizes: dict[str, Any] = {}
        self.count = rng.choice([0, 1, 2, 3]) if row.many else 0
        self.results: list[torch.Tensor] = []
        self.operands: list[torch.Tensor] = []

    def attribute(self, name: str, kind: str, legal: tuple[Any, ...], least: float, most: float, _: Any) -> Any:
        rng = self.rng
        if legal:
            return int(rng.choice(legal)) if kind == "int" else rng.choice(legal)
        if kind == "int":
            return rng.choice([v for v in (0, 1, 2, 16, -3, 64) if least <= v <= most])
        return {"float": 0.0, "bool": rng.random() < 0.5, "int[]": ()}[kind]

    def size(self, name: str) -> int:
        if name.isdigit():
            return int(name)
        if name in self.attributes:
            return int(self.attributes[name])
        return self.sizes.setdefault(name, self.rng.choice([0, 1, 2, 3, 4, 6]))

    def shape(self, operand: Operand, per_byte: int = 1) -> tuple[int, ...]:
        sizes: list[int] = []
        for term in operand.terms:
            if term == "...":
                sizes += self.sizes["first"][: self.rng.choice([0, 0, 1, 2])]
            elif isinstance(term, str):
                count = self.attributes.get(term[1:], self.rng.choice([0, 1, 1, 2]))
                star = self.sizes.setdefault(term, [self.rng.choice([0, 1, 2, 3, 16]) for _ in range(min(count, 3))])
                sizes += star
            else:
                sizes.append(math.prod(self.size(name) for name in term))
        if not self.sizes.get("first"):
            majors = []
            for term in operand.terms:
                majors += self.sizes[term] if isinstance(term, str) and term != "..." else [self.size(term[0])]
            self.sizes["first"] = majors
        if sizes and per_byte > 1:
            sizes[-1] = -(-sizes[-1] // per_byte)
        return tuple(sizes)

    def dtype(self, operand: Operand, first: str) -> str:
        kind, rng = operand.dtype, self.rng
        named = {"code": "element", "scale": "scale_dtype"}.get(kind, kind)
        if named in self.attributes:
            name = self.attributes[named]
            return "uint8" if name in ELEMENTS and (ELEMENTS[name].bits != 8 or rng.random() < 0.7) else name
        return {
            "float": lambda: rng.choice(["float32", "bfloat16", "float16"]),
            "word": lambda: rng.choice(["uint32", "int32"]),
            "byte": lambda: rng.choice(["uint8", "int8", "float8_e4m3fn"]),
            "any": lambda: {"remainder": "int16"}.get(self.attributes.get("keeps"), "float32"),
            "same": lambda: first,
            "packed": lambda: "uint8",
        }.get(kind, lambda: kind)()

    def tensor(self, shape: tuple[int, ...], dtype: str, values: bool) -> torch.Tensor:
        count = math.prod(shape)
        if count == 0 or any(size < 0 for size in shape):
            return torch.empty(tuple(max(0, size) for size in shape), dtype=DTYPES[dtype])
        count = min(count * size_of(dtype), SLOT - 64)
        data = self.arena.bytes(count)
        if values:
            data.copy_(torch.frombuffer(bytearray(self.rng.randbytes(count)), dtype=torch.uint8))
        whole = data[: count - count % size_of(dtype)].view(DTYPES[dtype])
        return whole.view(shape) if whole.numel() == math.prod(shape) else whole

    def single(self) -> None:
        """Operands and results of an op on single tensors."""
        row = self.row
        shapes, dtypes = [], []
        for operand in row.inputs:
            named = self.attributes.get("element" if operand.dtype == "code" else operand.dtype, "")
            per_byte = 2 if operand.dtype == "packed" else ELEMENTS[named].codes_per_byte if named in ELEMENTS else 1
            shapes.append(self.shape(operand, per_byte))
            dtypes.append(self.dtype(operand, dtypes[0] if dtypes else "float32"))
        given = {k: v for k, v in self.attributes.items() if k != "split"}
        try:
            made, axes, whole = row.match(shapes, dtypes, given, self.rng.choice(["float32", "bfloat16", "float16"]))
            if self.attributes.get("split"):
                self.attributes["split"] = whole
                if whole:
                    shapes, made = self.split(axes[: len(shapes)], axes[len(shapes) :], made)
        except (ValueError, TypeError):
            made = [((self.rng.choice([1, 4, 16]),), "float32") for _ in row.outputs]
        self.operands = [self.tensor(s, d, True) for s, d in zip(shapes, dtypes, strict=True)]
        self.results = [self.tensor(s, "uint8" if d in ELEMENTS else d, False) for s, d in made]

    @staticmethod
    def split(inputs: Any, outputs: Any, made: Any) -> tuple[Any, Any]:
        """Shapes of factors, the major ones in front."""
        majors = [axis[0][0] for axis in inputs[0]]

        def order(axes: Any) -> tuple[int, ...]:
            first = sorted(axes, key=lambda axis: majors.index(axis[0][0]) if axis[0][0] in majors else 99)
            factors = [*(axis[0] for axis in first), *(factor for axis in axes for factor in axis[1:])]
            return tuple(size // per_byte for _, size, per_byte in factors)

        return [order(axes) for axes in inputs], [(order(a), d) for a, (_, d) in zip(outputs, made, strict=True)]

    def lists(self) -> None:
        """Operands and results of an op on lists, of which each changes some in place."""
        rng, row, held = self.rng, self.row, {}
        if "shapes" in self.attributes:
            sizes = [(rng.choice([0, 1, 3, 16]), rng.choice([2, 16, 32])) for _ in range(self.count)]
            self.attributes["shapes"] = tuple(size for shape in sizes for size in shape)
            rows, cols = self.attributes["block_rows"], self.attributes["block_cols"]
            self.sizes["blocks"] = sum(-(-m // rows) * -(-k // cols) if rows else 1 for m, k in sizes)
            if row.name == "amax_slices":
                whole = self.attributes["whole"]
                self.sizes["blocks"] += sum({"none": 0, "tensor": 1, "row": m}[whole] for m, _ in sizes)
        self.sizes |= {"n": self.count, "*rows": [max(1, self.count)]}
        single = {"first"} | {t for o in row.inputs if not o.many for t in o.terms if isinstance(t, str)}
        kinds: dict[str, str] = {}
        for operand in row.inputs:
            if operand.many:
                held[operand.name] = []
                continue
            held[operand.name] = [self.tensor(self.shape(operand), self.dtype(operand, "float32"), True)]
        for i in range(self.count):
            self.sizes = {k: v for k, v in self.sizes.items() if k in single or k in ("n", "blocks")}
            self.sizes["first"] = [1]
            first = "float32"
            for operand in (o for o in row.inputs if o.many):
                name = operand.name
                if name == "data_t":
                    self.sizes["*axes_t"] = self.sizes["*axes"][:-2] + self.sizes["*axes"][:-3:-1]
                elif name == "data" and "shapes" in self.attributes:
                    element = ELEMENTS.get(self.attributes.get("element", ""), ELEMENTS["float4_e2m1fn"])
                    per_byte = element.codes_per_byte
                    self.sizes["*codes"] = [math.prod(sizes[i]) // per_byte]
                elif name.endswith("scale_inv"):
                    self.sizes["*blocks"] = [-(-math.prod(self.sizes["*axes"]) // 128)]
                if operand.optional and not self.has(name):
                    continue
                shape = self.shape(operand)
                if operand.dtype in ("float", "any"):
                    first = kinds.setdefault(name, self.dtype(operand, first))
                    if name == "param" and self.attributes["keeps"] == "remainder":
                        first = kinds[name] = "bfloat16"
                    dtype = first
                else:
                    dtype = self.dtype(operand, first)
                held[name].append(self.tensor(shape, dtype, True))
        self.operands = [t for o in row.inputs for t in held[o.name]]
        self.results = [t for o in row.outputs for t in held[o.name]]

    def has(self, name: str) -> bool:
        a = self.attributes
        if name == "param":
            return not a["update"] or a["decay"] != "none" or a["keeps"] != "none"
        if name == "low":
            return a["keeps"] != "none"
        return a[name.removesuffix("_scale_inv") + "_dtype"] not in ("float32", "bfloat16")

    def spoil(self) -> None:
        """Makes the call hostile in one to three ways."""
        for _ in range(self.rng.choice([1, 1, 2, 3])):
            self.rng.choice(
                [self.spoil_attribute, self.spoil_attribute, self.spoil_tensor, self.spoil_tensor, self.spoil_count]
            )()

    def spoil_attribute(self) -> None:
        rng = self.rng
        name = rng.choice([*self.attributes, "another"])
        way = rng.random()
        if way < 0.1:
            self.attributes.pop(name, None)
        elif name == "shapes":
            size = rng.choice([0, 1, 2 * self.count])
            self.attributes[name] = tuple(rng.choice([*EXTREMES, 1, 2, 16]) for _ in range(size))
        elif way < 0.6 and type(self.attributes.get(name)) is int:
            self.attributes[name] = rng.choice(EXTREMES)
        else:
            self.attributes[name] = rng.choice(WRONG_VALUES)

    def spoil_tensor(self) -> None:
        rng = self.rng
        tensors = rng.choice([self.operands, self.results])
        if not tensors:
            return
        i = rng.randrange(len(tensors))
        t = tensors[i]
        way = rng.randrange(8)
        if way == 0:
            tensors[i] = self.tensor(tuple(t.shape), rng.choice(list(DTYPES)), True)
        elif way == 1:
            tensors[i] = self.tensor(
                tuple(rng.choice([0, 1, 2, 7, 16]) for _ in range(rng.randrange(5))), "float32", True
            )
        elif way == 2 and t.dim() and t.numel():
            tensors[i] = t.transpose(0, -1) if rng.random() < 0.5 else t[::2]
        elif way == 3:  # Huge, and empty.
            tensors[i] = torch.empty(rng.choice([(2**62, 0), (0, 2**62), (2**31, 2**31, 0), (0,)]), dtype=t.dtype)
        elif way == 4:  # Memory of another tensor.
            tensors[i] = rng.choice([*self.operands, *self.results])
        elif way == 5 and t.numel() > 1:  # Memory that begins within that of another.
            tensors[i] = t.flatten()[1:]
            (self.operands if tensors is self.results else self.results).append(t)
        elif way == 6 and 0 < t.numel() * t.itemsize < SLOT // 2 and t.itemsize > 1:  # Not aligned.
            count = t.numel() * t.itemsize
            data = self.arena.bytes(count + 1)
            room = (ctypes.c_uint8 * count).from_address(data.data_ptr())
            tensors[i] = torch.frombuffer(room, dtype=t.dtype).view(t.shape)
        else:
            tensors[i] = t.reshape(1, *t.shape) if t.is_contiguous() else t

    def spoil_count(self) -> None:
        tensors = self.rng.choice([self.operands, self.results])
        if tensors and self.rng.random() < 0.6:
            tensors.pop(self.rng.randrange(len(tensors)))
        elif tensors:
            tensors.append(self.rng.choice(tensors))

    def run(self, show: bool) -> bool:
        """Whether the call was taken."""
        if show:
            tensors = [[(tuple(t.shape), str(t.dtype), t.data_ptr()) for t in s] for s in (self.operands, self.results)]
            print(self.row.name, *tensors, self.attributes, flush=True)
        written = {t.data_ptr() for t in self.results if t.numel()}
        kept = [
            (t, bytes_of(t)) for t in self.operands if t.numel() and t.is_contiguous() and t.data_ptr() not in written
        ]
        try:
            _ffi.call(self.row.name, self.operands, self.results, self.attributes)
            taken = True
        except (ValueError, TypeError, RuntimeError, OverflowError):
            taken = False
        for tensor, before in kept:
            assert bytes_of(tensor) == before, f"{self.row.name}: an operand was changed"
        for t in self.results:
            if taken and t.numel() and t.untyped_storage().data_ptr() == t.data_ptr() - 64:
                edge = ctypes.string_at(t.data_ptr() - 64, 64)
                assert edge == b"\x5a" * 64, f"{self.row.name}: wrote before a result"
        return taken


def bytes_of(t: torch.Tensor) -> bytes:
    return ctypes.string_at(t.data_ptr(), t.numel() * t.itemsize)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    parser.add_argument("--show", action="store_true", help="print every call before it is made")
    parser.add_argument("--progress", type=Path, help="a file for the number of the call that is being made")
    args = parser.parse_args()
    faulthandler.enable()
    rows, taken, made = [*table().values(), *multi_table().values()], Counter[str](), Counter[str]()
    arena = Arena()
    for number in range(args.first, args.first + args.calls):
        if args.progress:
            args.progress.write_text(str(number))
        rng = random.Random(f"{args.seed} {number}")
        draw = Draw(rng.choice(rows), rng, arena)
        (draw.lists if draw.row.many else draw.single)()
        if rng.random() < 0.6:
            draw.spoil()
        made[draw.row.name] += 1
        taken[draw.row.name] += draw.run(args.show)
    print(f"{args.calls} calls from seed {args.seed}, {sum(taken.values())} of them taken")
    if args.calls >= 2000:
        blind = [row.name for row in rows if taken[row.name] == 0]
        if blind:
            sys.exit(f"no call was taken of {', '.join(blind)}: their draws are not valid")


if __name__ == "__main__":
    main()
