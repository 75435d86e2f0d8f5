"""Random calls of any op, generated from its row of `ffi/ops.def`: legal attributes and valid shapes.

New ops, attributes and elements need no edit here, unless their constraints are not in the row: `legal` and `_lists`
add those of op bodies. `support/draw_values.py` fills the operands.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from qshard.formats import E2M1, ELEMENTS, FORMATS, FloatScaling, Usage
from qshard.op_table import Operand, OpSpec, Shape, multi_table, table
from support.awkward import DTYPES

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
    "tile_rows": (1, 16, 32),
    "classes": (1, 5, 300, 2**31 - 1),
    "first": (0, 3, 1000),
    "ignore_index": (-100, -1, 2),
}
FEW_PARTS = (0, 1, 2, 7)
"""Counts of parts of cross entropy and of experts of products; small, because the reference loops over them."""
MOST_CHOICES = 33
"""Maximum experts of a token of `combine_rows`; the reference loops over them too."""
IN_ANY_ORDER = tuple(name for name in SPECS if name.startswith("gemm"))
"""Ops whose order of summation depends on hardware: only CPU results are bit-exact."""
MOST = 2**16
"""Maximum elements of an operand; the reference is slow."""
MOST_PRODUCTS = 2**22
"""Maximum multiplications of a product."""


@dataclass
class Call:
    """An op with attributes and operands.

    Attributes:
      options: attributes, and `dtype` if a result can be any float.
      tensors: shape and dtype of each tensor of each operand; a single operand is a list of one.
      operands: arrays of these shapes and dtypes, set by `draw_values.filled`.
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
    if options.get("whole", "none") != "none" and options.get("block_rows") == 0:
        return False
    block = options.get("block_rows"), options.get("block_cols")
    packed = element is E2M1 and row.name.startswith(("quantize_block", "quantize_square"))
    if packed and any(side and side > 1 and (side % 2 or side > 256) for side in block):
        return False
    if options.get("hadamard") and row.name.endswith("_t") and block[1] not in (None, 1):
        return False
    if row.name == "amax_hadamard" and block[0] is not None and block[0] % 16:
        return False
    return row.name != "quantize_square_both_rows" or block[0] == block[1]


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

    Axis lengths are drawn from `lengths`. A single length applies to every axis, except the rows of one operand of a
    product, and has four or more whole blocks.
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
        self.is_product = spec.name in IN_ANY_ORDER
        self.short = rng.choice("mn") if self.is_product and self.only else ""
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
        if self.is_product:
            (a, _), (out, _) = made.tensors[0][0], results[0]
            b = next(shapes[0][0] for o, shapes in zip(self.spec.inputs, made.tensors, strict=True) if o.name == "b")
            if math.prod(a) * math.prod(b) * math.prod(out) > MOST_PRODUCTS**2:
                return None
        # Only ops that gather rows, and products, have results or gathered rows that are larger than their operands.
        if len(self.spec.inputs) > 1 and self.spec.inputs[1].name in ("rows", "positions"):
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
            if major == "e" and self.is_product:
                length = 2 if self.only else self.rng.choice(FEW_PARTS)
            if major == "c":
                length = min(length, MOST_CHOICES)
            if major == self.short:  # One operand has all numbers; the work is bounded.
                length = 16
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
        if self.spec.name == "transpose_stack":
            rows, cols = (min(self.rng.choice(self.lengths) or 1, 160) for _ in range(2))
            dtype = self.rng.choice(["uint8", "float32"])
            return [[((n, cols, rows), dtype)], [((rows, cols), dtype)] * n]
        if self.spec.name.startswith("gemm"):
            return self._grouped_products(n)
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

    def _grouped_products(self, n: int) -> list[list[tuple[Shape, str]]]:
        rng, options = self.rng, self.options
        m, rows, k, tokens = (min(rng.choice(self.lengths), 160) for _ in range(4))
        k = -(-k // self.even) * self.even
        scale = "uint8" if options.get("scale_dtype") == "float8_e8m0fnu" else "float32"
        if blocks := "cols" in options:
            tokens, across = m, -(-k // options["cols"])
        codes = {o.name: k // codes_per_byte(o, options) for o in self.spec.inputs if o.name in ("a", "b")}
        of: dict[str, Any] = {
            "a": [((m, codes["a"]), "uint8")],
            "a_scale_inv": [((m, across) if blocks else (n,), scale)],
            "b_scale_inv": [((n, -(-rows // options["b_rows"]), across) if blocks else (n,), scale)],
            **{name: [((n,), rng.choice(["uint32", "int32"]))] for name in ("stops", "ends")},
            "out": [((tokens, rows), self.float)],
            "workspace": [((rng.choice([0, 5]),), "uint8")],
            "b": [((rows, codes["b"]), "uint8")] * n,
        }
        return [of[operand.name] for operand in self.spec.inputs]

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
