"""Random calls of any op, generated from its row of `ffi/ops.def`: legal attributes, valid shapes, edge-case values.

New ops, attributes and elements need no edit here, unless their constraints are not in the row: `legal`, `_lists` and
`_values` add the constraints from op bodies and the meanings of operands.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from qshard.formats import E2M1, ELEMENTS, FORMATS, FloatScaling, Usage
from qshard.op_table import Operand, OpSpec, Shape, multi_table, table
from support.awkward import DTYPES, KINDS, TAME, awkward_values

SPECS = {**table(), **multi_table()}
FLOATS = tuple(map(str, DTYPES))
# Sizes next to the vectors and tiles of kernels, and more than one panel.
LENGTHS = (0, 1, 2, 3, 7, 15, 16, 17, 31, 32, 33, 63, 64, 65, 80, 127, 128, 129, 160, 257, 300, 1030)
WIDE = (1, 2, 32, 4128, 4130)
"""Column counts that exceed one task of the CPU kernels."""
FEW = (0, 1, 2, 3, 4, 6)
_OF_FORMATS = {fmt.block_of(usage) for fmt in FORMATS.values() if fmt.block for usage in Usage}
# Blocks of formats, blocks that divide no shape evenly, and blocks larger than a tile or a panel.
BLOCKS = [
    *sorted(_OF_FORMATS),
    *((1, 2), (2, 1), (6, 10), (130, 256), (3, 5), (1, 1), (1, 1000), (300, 2), (7, 130), (300, 300)),
]
WEIGHTS = [(0, 16), (3, 8), (1, 1), (16, 32), (40, 130), (33, 65), (130, 9), (9, 2002)]
NUMBERS = {
    "margin": (-3, 0, 1, 5),
    "row_step": (0, 1, 96, 5000),
    "col_step": (0, 1, 5, 2**33),
    "a_rows": (1, 1, 2, 128),
    "b_rows": (1, 3, 32, 128),
    "cols": (1, 7, 16, 32, 128, 1000),
    "block_cols": (1, 6, 16, 32, 32, 128, 128, 256),
    "workspace": (0,),
    "tiles": (4500, 4600),
    "tokens": (0, 1, 40, 300),
    "unit": (1, 16, 32),
    "classes": (1, 5, 300, 2**31 - 1),
    "first": (0, 3, 1000),
    "ignore_index": (-100, -1, 2),
}
FEW_PARTS = (0, 1, 2, 7)
"""Counts of parts of cross entropy and of experts of products; small, because the reference loops over them."""
IN_ANY_ORDER = tuple(name for name in SPECS if name.startswith("gemm"))
"""Ops whose order of summation depends on hardware: only CPU results are bit-exact."""
MOST = 2**16
"""Maximum elements of an operand; the reference is slow."""


@dataclass
class Call:
    """An op with attributes and operands.

    Attributes:
      options: attributes, and `dtype` if a result can be any float.
      tensors: shape and dtype of each tensor of each operand; a single operand is a list of one.
      operands: arrays of these shapes and dtypes, set by `filled`.
    """

    spec: OpSpec
    options: dict[str, Any]
    tensors: list[list[tuple[Shape, str]]] = field(default_factory=list)
    operands: list[Any] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.spec.name} {self.options} of {self.tensors}"

    def results(self) -> list[tuple[Shape, str]]:
        """Return the binder's shapes and dtypes of the results of an op on single tensors."""
        given = {name: value for name, value in self.options.items() if name != "dtype"}
        single = [one for (one,) in self.tensors]
        return self.spec.results([s for s, _ in single], [d for _, d in single], given, self.options.get("dtype"))


def element_of(operand: Operand, options: dict[str, Any]) -> str | None:
    """Return the element of an operand's codes if an attribute names it, else None."""
    name = "element" if operand.dtype == "code" else operand.dtype
    return options[name] if name.endswith("element") and name in options else None


def codes_per_byte(operand: Operand, options: dict[str, Any]) -> int:
    """Return the number of codes in a byte; 1 if the operand has no codes."""
    if operand.dtype == "packed":
        return 2
    element = element_of(operand, options)
    return 1 if element is None else ELEMENTS[element].codes_per_byte


def legal(options: dict[str, Any], row: Any) -> bool:
    """Return whether the op body accepts these attributes, and no attribute is set without effect."""
    element = ELEMENTS.get(options.get("element", ""))
    if options.get("scale_dtype") == "float32":
        if element not in FloatScaling.elements or options.get("rounding", "up") != "up":
            return False
    elif "scale_dtype" in options and (options.get("eps") or options.get("pow2")):
        return False
    if options.get("keeps") == "remainder" and options["update"]:
        return False
    block = options.get("block_rows"), options.get("block_cols")
    packed = element is E2M1 and row.name.startswith(("quantize_block", "quantize_square"))
    if packed and any(side and side > 1 and (side % 2 or side > 256) for side in block):
        return False
    if options.get("hadamard") and row.name.endswith("_t") and block[1] not in (None, 1):
        return False
    if row.name == "amax_hadamard" and block[0] is not None and block[0] % 16:
        return False
    return not row.name.startswith("quantize_square_both") or block[0] == block[1]


@functools.cache
def choices(spec: OpSpec) -> list[dict[str, Any]]:
    """Return every legal combination of dtypes and of attributes with few values, shuffled."""
    values: dict[str, Any] = {}
    for name, (kind, given, *_) in spec.attributes.items():
        few = given or {"bool": (False, True), "float": (0.0, 0.5)}.get(kind)
        if few:
            values[name] = tuple(map(int, few)) if kind == "int" else few
    if any(operand.dtype == "float" for operand in spec.inputs):
        values["float"] = FLOATS
    if not spec.many and any(operand.dtype == "float" for operand in spec.outputs):
        values["dtype"] = FLOATS
    made = [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]
    made = [each for each in made if legal(each, spec)]
    random.Random(spec.name).shuffle(made)
    return made


def draw(spec: OpSpec, number: int = 0, *, lengths: Sequence[int] = LENGTHS) -> Call:
    """Generate call `number`: numbers from 0 to `len(choices(spec)) - 1` cover each choice once.

    Axis lengths are drawn from `lengths`. A single length applies to every axis and has four or more whole blocks.
    """
    rng = random.Random(f"{spec.name} {number} {lengths}")
    for _ in range(1000):
        made = _Draw(spec, rng, dict(choices(spec)[number % len(choices(spec))]), lengths).call()
        if made is not None:
            return made
    raise AssertionError(f"{spec.name}: no call fits its row and {choices(spec)[number % len(choices(spec))]}")


class _Draw:
    def __init__(self, spec: OpSpec, rng: random.Random, options: dict[str, Any], lengths: Sequence[int]):
        self.spec, self.rng, self.lengths = spec, rng, lengths
        self.small, self.only = max(lengths) < 33, lengths[0] if len(lengths) == 1 else None
        self.float = options.pop("float", "float32")
        types = spec.attributes
        if "block_rows" in types:
            blocks = spec.blocks or ([b for b in BLOCKS if max(b) < 33] if self.small else BLOCKS)
            if self.only:
                blocks = [b for b in blocks if all(self.only % (4 * side) == 0 for side in b)]
            if spec.many:
                blocks = [*blocks, (0, 0), (0, 0)]
            blocks = [b for b in blocks if legal({**options, "block_rows": b[0], "block_cols": b[1]}, spec)]
            options |= dict(zip(("block_rows", "block_cols"), rng.choice(blocks), strict=True))
        options |= {name: rng.choice(NUMBERS[name]) for name in NUMBERS if name in types and name not in options}
        options |= {name: rng.choice([0, 1, 1, 2]) for name in ("batch", "lead", "outer") if name in types}
        self.options = options
        self.sizes: dict[str, Any] = {}
        self.majors: list[int] | None = None
        packed = any(codes_per_byte(o, options) > 1 for o in (*spec.inputs, *spec.outputs))
        self.even = 2 if packed else 1

    def call(self) -> Call | None:
        """Return the call, or None if the binder rejects it or it is too large."""
        made = Call(self.spec, self.options)
        if self.spec.many:
            made.tensors = self._lists()
            return made
        prefix = self.rng.choice([0, 0, 1, 2, 3])
        for operand in self.spec.inputs:
            shape = self._shape(operand, prefix)
            made.tensors.append([(shape, self._dtype(operand, made.tensors))])
        if any(math.prod(shape) > max(MOST, 2 * (self.only or 0) ** 2) for ((shape, _),) in made.tensors):
            return None
        if self.sizes.get("length") == 0:  # The amax history of delayed scaling has at least one entry.
            return None
        try:
            results = made.results()
        except ValueError:
            return None
        # Only ops on padded rows and products have results, or gathered rows, that are larger than their operands.
        if len(self.spec.inputs) > 1 and self.spec.inputs[1].name == "rows":
            gathered = made.tensors[1][0][0][0] * made.tensors[0][0][0][1]
            if max(gathered, *(math.prod(shape) for shape, _ in results)) > MOST:
                return None
        return made

    def _shape(self, operand: Operand, prefix: int) -> Shape:
        shape: list[int] = []
        for term in operand.terms:
            if term == "...":
                shape += (self.majors or [])[:prefix]
            elif isinstance(term, str):
                shape += self._star(term)
            else:
                shape.append(self._axis(term))
        if self.majors is None:
            self.majors = []
            for term in operand.terms:
                self.majors += self.sizes[term] if isinstance(term, str) else [self.sizes.get(term[0], 1)]
        per_byte = codes_per_byte(operand, self.options)
        if per_byte > 1 and shape:
            shape[-1] = -(-shape[-1] // per_byte)
        return tuple(shape)

    def _star(self, term: str) -> list[int]:
        if term not in self.sizes:
            count = self.options.get(term[1:], self.rng.choice([0, 1, 1, 2]))
            sizes = [self.rng.choice([1, 2, 3, 5]) for _ in range(count)]
            if sizes and term not in ("*batch", "*outer"):
                sizes[-1] = self._length()
            self.sizes[term] = sizes
        return self.sizes[term]

    def _length(self) -> int:
        return -(-self.rng.choice(self.lengths) // self.even) * self.even

    def _axis(self, term: tuple[str, ...]) -> int:
        major, *minors = (int(n) if n.isdigit() else self.options.get(n, n) for n in term)
        run = math.prod(int(size) for size in minors)
        if isinstance(major, int):
            return major * run
        if major not in self.sizes:
            length = self.rng.choice(FEW_PARTS) if major == "parts" else self._length()
            if major == "e" and self.spec.name.startswith("gemm"):
                length = 2 if self.only else self.rng.choice(FEW_PARTS)
            if self.rng.random() < 0.5:  # Partial blocks at the edge, which some ops reject.
                length = -(-length // run) * run
            self.sizes[major] = -(-length // run)
            return length
        return self.sizes[major] * run

    def _dtype(self, operand: Operand, before: list[list[tuple[Shape, str]]]) -> str:
        named = {"code": "element", "scale": "scale_dtype"}.get(operand.dtype, operand.dtype)
        name = self.options.get(named, operand.dtype)
        if name in ELEMENTS:
            return "uint8"
        some = {
            "float": FLOATS if before else [self.float],
            "same": [dtype for ((_, dtype),) in before[:1]],
            "word": ["uint32", "int32"],
            "byte": ["uint8"],
            "packed": ["uint8"],
        }
        return self.rng.choice(some.get(name, [name]))

    # --- ops on lists: mostly defined by attributes and op bodies, not by rows ---

    def _lists(self) -> list[list[tuple[Shape, str]]]:
        n = self.rng.choice([1, 2, 3])
        if self.spec.name == "adam":
            return self._adam(n)
        if self.spec.name == "transpose_each":
            return self._transposes(n)
        return self._slices(n)

    def _slices(self, n: int) -> list[list[tuple[Shape, str]]]:
        rng, options = self.rng, self.options
        weights = [s for s in WEIGHTS if s[1] % self.even == 0 and (not self.small or math.prod(s) < 600)]
        shapes = [rng.choice(weights) for _ in range(n)]
        options["shapes"] = tuple(itertools.chain(*shapes))
        rows, cols = options["block_rows"], options["block_cols"]
        blocks = sum(-(-m // rows) * -(-k // cols) if rows else 1 for m, k in shapes)
        wholes = sum({"none": 0, "tensor": 1, "row": m}[options.get("whole", "none")] for m, _ in shapes)
        lengths = [rng.choice([0, 1, m * k // 3, m * k]) for m, k in shapes]
        codes = [math.prod(s) // self.even for s in shapes]
        if options.get("pieces"):
            codes = [-(-length // self.even) + self.even - 1 + rng.choice([0, 2]) for length in lengths]
        of: dict[str, Any] = {
            **{name: [((n, 2), rng.choice(["uint32", "int32"]))] for name in ("starts", "seeds")},
            **{name: [((blocks + wholes,), "float32")] for name in ("amax", "scale")},
            "x": [((length,), self.float) for length in lengths],
            "data": [((count,), "uint8") for count in codes],
        }
        return [of[operand.name] for operand in self.spec.inputs]

    def _transposes(self, n: int) -> list[list[tuple[Shape, str]]]:
        data, data_t = [], []
        dtype = self.rng.choice(["uint8", "float32"])
        for _ in range(n):
            lead = self.rng.choice([(), (2,), (3, 1)])
            rows, cols = (min(self.rng.choice(self.lengths) or 1, 160) for _ in range(2))
            per_byte = 2 if dtype == "uint8" and rows % 2 == cols % 2 == 0 and self.rng.random() < 0.5 else 1
            data.append(((*lead, rows, cols // per_byte), dtype))
            data_t.append(((*lead, cols, rows // per_byte), dtype))
        return [data, data_t]

    def _adam(self, n: int) -> list[list[tuple[Shape, str]]]:
        options = self.options
        scaled = [options[name] not in FLOATS[:2] for name in ("exp_avg_dtype", "exp_avg_sq_dtype")]
        # Rows of whole blocks, partial blocks, single elements and no rows; some not a multiple of four.
        shapes: list[Shape] = [(3, 5), (4, 128), (2, 300), (5, 2, 97), (1, 129), (7, 256), (0, 4), (3, 1), (3, 132)]
        if self.small:
            shapes = [(3, 5), (2, 130), (0, 4)]
        elif any(scaled):
            shapes += [(2, 5000)]
        else:
            shapes += [(1,), (127,), (1000,), (0,), ()]
        shapes = [self.rng.choice(shapes) for _ in range(3 * n)]
        low = options["keeps"]
        param = {"remainder": "bfloat16", "master": self.float}.get(low, self.rng.choice(FLOATS))
        made = [[((len(shapes) or 1, 10), "float32")], [(s, self.float) for s in shapes]]
        has_param = not options["update"] or options["decay"] != "none" or low != "none"
        made.append([(s, param) for s in shapes] if has_param else [])
        kind = {"remainder": "int16", "master": "float32", "none": ""}[low]
        made.append([(s, kind) for s in shapes] if kind else [])
        for name, has_scale in zip(("exp_avg_dtype", "exp_avg_sq_dtype"), scaled, strict=True):
            dtype = "uint8" if options[name] in ELEMENTS else options[name]
            made.append([(s, dtype) for s in shapes])
            blocks = [((s[0], -(-math.prod(s[1:]) // 128)), "float32") for s in shapes] if has_scale else []
            made.append(blocks)
        return made


# --- values ---


def filled(call: Call, number: int = 0) -> Call:
    """Return the call with operands of edge-case values."""
    rng = np.random.default_rng(number)
    made: list[Any] = []
    for operand, tensors in zip(call.spec.inputs, call.tensors, strict=True):
        arrays = [_values(call, operand, shape, dtype, rng, i) for i, (shape, dtype) in enumerate(tensors)]
        made.append(arrays if operand.many else arrays[0])
    call.operands = made
    return call


def every_value(dtype: str, count: int) -> np.ndarray:
    """Every number of 16 bits, shuffled, so that amaxes differ. Of fp32 its upper halves, and what is next to each."""
    rng = np.random.default_rng(count)
    bits = np.resize(rng.permutation(np.arange(2**16, dtype=np.uint16)), count)
    if np.dtype(dtype).itemsize == 2:
        return bits.view(dtype)
    return (bits.astype(np.uint32) << 16 | rng.choice(np.uint32([0, 1, 0xFFFF]), count)).view(np.float32)


def _values(call: Call, operand: Operand, shape: Shape, dtype: str, rng: np.random.Generator, i: int) -> np.ndarray:
    name, count, seed = operand.name, math.prod(shape), int(rng.integers(2**31))
    if name in ("starts", "seeds", "seed", "first"):
        return _words(call, name, shape, rng).view(dtype)
    if name in ("rows", "stops") and call.spec.inputs[1].name == "rows":
        return _padded_rows(call, name, shape, rng).view(dtype)
    if name in ("stops", "ends"):
        rows = call.options["tokens"] if name == "ends" else call.tensors[0][0][0][call.spec.name.endswith("_k")]
        return _stops(call, rows, shape, rng).view(dtype)
    if name in ("positions", "tokens"):
        rows = call.tensors[0 if name == "positions" else 3][0][0][0]
        others = rng.choice([-1, rows, -(2**31), 2**31 - 1], shape)
        return (
            np.where(rng.integers(0, 8, shape) > 0, rng.integers(-1, rows + 1, shape), others)
            .astype(np.int32)
            .view(dtype)
        )
    if name == "labels":
        return _labels(call, shape, rng).view(dtype)
    if name == "sizes":
        some = [0, 0, 0, 1, 3, 17, 40, *rng.choice([0, -1, 2**31 - 1], 2)]
        return rng.choice(some, shape).astype(np.int32).view(dtype)
    if name in ("rows", "stops"):
        return _padded_rows(call, name, shape, rng).view(dtype)
    if call.spec.name == "adam":
        return _adam_values(call, name, shape, dtype, rng, i)
    if name == "hyper":
        betas = [part for beta in (0.9, 0.999) for part in (np.float32(beta), beta - float(np.float32(beta)))]
        return np.broadcast_to(np.float32([1e-2, *betas, 1e-8, 0.1, 0.5]), shape).copy()
    if name == "step":
        return rng.integers(1, 5000, shape).astype(np.float32)
    if dtype == "uint8":
        element = call.options["element"] if name == "codes" else element_of(operand, call.options)
        bits = 8 if element is None else ELEMENTS[element].bits
        if name == "data" and call.options.get("pieces"):
            return np.zeros(shape, np.uint8)
        return rng.integers(0, 2 ** (8 if bits == 4 and name != "codes" else bits), shape, np.uint8)
    if name == "x" and "hadamard" in (call.spec.name.removeprefix("amax_"), *call.options) and rng.integers(2):
        with np.errstate(over="ignore"):
            return _far_apart(shape, rng).astype(dtype)
    kinds = [KINDS, TAME, ("normal", "ties", "wide"), ("normal", "max"), None][int(rng.integers(5))]
    if kinds is None or count >= 2**16:
        x = every_value(dtype, count).reshape(shape)
    else:
        x = awkward_values(shape or (1,), seed, dtype, kinds=kinds).reshape(shape)
    # With a negative scale, the sign of zeros that mark infinities is undefined.
    if "amax" in name or name == "history" or (name == "scale" and call.options.get("nonfinite") == "nan"):
        x = np.where(np.isnan(x), x.dtype.type(np.nan), np.abs(x))
    if name == "scale" and "margin" in call.options:  # 0 means unset.
        x = np.where(rng.integers(0, 2, shape), x, x.dtype.type(0))
    if call.spec.name in ("quantize_nvfp4_both", "quantize_nvfp4_stochastic_both") and "global_amax" in name:
        batch = (
            len(call.tensors[0][0][0]) - 2 - call.options["outer"]
        )  # One per matrix, repeated over axes that a front end may shard.
        x = np.broadcast_to(x[(..., *(slice(1),) * (x.ndim - batch))], shape).copy()
    if call.options.get("shared") and operand.terms == ("...",) and x.size:
        x = np.full(shape, x.flat[0])
    return x


def _far_apart(shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return sums of 16 that cancel to their smallest terms, bfloat16 ties, and exponent spans near the exact path."""
    x = rng.integers(-255, 256, shape).astype(np.float32)
    if rng.integers(2):
        x[..., 8:] = -x[..., : max(0, shape[-1] - 8)]
    span = int(rng.choice([0, 5, 17, 18, 19, 20, 60, 250]))
    base = int(rng.choice([base for base in (-133, -60, 0, 119 - span) if -133 <= base <= 119 - span]))
    return np.ldexp(x, base + rng.integers(0, span + 1, shape)).astype(np.float32)


def _words(call: Call, name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return uint64 as two uint32, the low one first."""
    numbers = rng.choice(rng.integers(0, 2**64, 3, np.uint64), shape[:-1])
    if name == "starts":
        sizes = np.prod(np.reshape(call.options["shapes"], (-1, 2)), axis=1, dtype=np.int64)
        lengths = np.array([shape[0] for shape, _ in call.tensors[[o.name for o in call.spec.inputs].index("x")]])
        room = np.maximum(sizes - lengths, 0)
        numbers = np.array(
            [rng.choice([0, r // 3, r, s, s + 2**40]) if s else 0 for r, s in zip(room, sizes, strict=True)], np.uint64
        )
    elif name == "first":
        numbers = rng.choice(np.array([0, 1, 15, 2**32 - 5, 2**36 + 7, 2**63], np.uint64), shape[:-1])
    if call.options.get("turned") and numbers.ndim and numbers.size:
        down = np.arange(len(numbers), dtype=np.uint64) * np.uint64(call.options["row_step"] if name == "first" else 0)
        numbers = numbers[:1] + down.reshape(-1, *(1,) * (numbers.ndim - 1))
    return np.ascontiguousarray(numbers[..., None]).view(np.uint32).reshape(shape)


def _stops(call: Call, rows: int, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return where the rows of experts end: multiples of contracted blocks, or any numbers, also beyond the rows."""
    stops = np.sort(rng.integers(0, rows + 1, shape))
    if rng.integers(2):
        unit = call.options.get("cols", 1)
        return (stops // unit * unit).astype(np.int32)
    others = rng.choice([-(2**31), -1, 0, rows, rows + 1, 2**31 - 1], shape)
    return np.where(rng.integers(0, 3, shape) > 0, stops, others).astype(np.int32)


def _labels(call: Call, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return labels, mostly of local classes; also neighbouring, ignored and invalid ones."""
    first, columns = call.options.get("first", 0), call.tensors[0][0][0][-1]
    here = first + rng.integers(-1, columns + 2, shape)
    others = rng.choice([call.options.get("ignore_index", 0), -1, -(2**31), 2**31 - 1], shape)
    return np.where(rng.integers(0, 5, shape) > 0, np.clip(here, -(2**31), 2**31 - 1), others).astype(np.int32)


def _padded_rows(call: Call, name: str, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """Return rows of x with padding between, or stops of experts; also numbers that lead outside, in any order."""
    rows, padded = (call.tensors[i][0][0][0] for i in (0, 1))  # Of x, and of `rows`.
    outside = [-1, -(2**31), 2**31 - 1]
    if name == "rows":
        own = rng.permutation(np.resize(np.arange(rows + 1), shape))
        return np.where(rng.integers(0, 8, shape) > 0, own, rng.choice(outside, shape)).astype(np.int32)
    unit = int(rng.choice([1, 8, 16, 128]))
    stops = np.minimum(np.sort(rng.integers(0, padded // unit + 2, shape)) * unit, padded)
    if not rng.integers(4):
        stops = rng.choice([*outside, 0, padded, padded // 3, padded // 2], shape)
    return stops.astype(np.int32)


def _adam_values(call: Call, name: str, shape: Shape, dtype: str, rng: np.random.Generator, i: int) -> np.ndarray:
    """Return values of wide range with zeros, a subnormal, infinities and NaN; states in their stored form."""
    from qshard.reference import _adam as adam

    if name == "constants":
        rows = [adam.adam_constants(i + 1, 1e-2, decay=0.1, grad_scale=0.5) for i in range(shape[0])]
        return np.array(rows, np.float32)
    if dtype == "int16":
        return rng.integers(-(2**15), 2**15, shape).astype(np.int16)
    if name.endswith("scale_inv"):
        return np.ldexp(np.float32(1), rng.integers(-40, 20, shape)).astype(np.float32)
    if dtype == "uint8":
        element = ELEMENTS[call.options[f"{name}_dtype"]]
        sign = 2**7 * rng.integers(0, 2, shape) if name == "exp_avg" else 0
        return (rng.integers(0, element.max_code + 1, shape) + sign).astype(np.uint8)
    x = (rng.standard_normal(shape) * np.exp(4 * rng.standard_normal(shape))).astype(np.float32)
    flat = x.reshape(-1)
    if flat.size > 8:
        flat[:3] = 0.0, -0.0, 1e-40
    if name == "grad" and flat.size > 300 and i % 2:
        flat[[5, 6, 140]] = np.nan, np.inf, -np.inf
    if name == "exp_avg_sq":
        x = np.abs(x)
    with np.errstate(all="ignore"):
        return x.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
