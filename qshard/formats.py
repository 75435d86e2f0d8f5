"""Number formats: what one stored element means, and how the elements of a tensor share scales.

The Python mirror of `ffi/core/format.h`, and the only Python file that holds the constants of a format.
Everything here is frozen and hashable, so that it may be a static argument or pytree data.

Sources: OCP 8-bit Floating Point v1.0; OCP Microscaling Formats v1.0; arXiv:2209.05433 (E4M3, E5M2);
arXiv:2412.19437 (1x128 and 128x128 blocks); arXiv:2506.08027 (MXFP8, rounded up); arXiv:2509.25149 (NVFP4);
arXiv:2512.02010 (four over six).
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A floating point format of at most 8 bits: sign if any, exponent, mantissa, from the high bit down.

    Attributes:
      name: dtype string of ml_dtypes, JAX and PyTorch.
      bits: width of a code; codes of 4 bits are stored two a byte, the even element in the low nibble.
      bias: exponent field `e` and mantissa field `m` stand for `2**(e - bias) * (1 + m / 2**mantissa_bits)`.
      max: largest finite value; encoding saturates to it.
      nan_code: what encoding makes of NaN. Those of fewer than 8 bits have no NaN, and take their largest code.
      inf_code: the code of infinity, if there is one. It is decoded, never produced.

    >>> E4M3.max, hex(E4M3.max_code), E4M3.max_exponent
    (448.0, '0x7e', 8)
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    nan_code: int
    inf_code: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def signed(self) -> bool:
        """Whether the highest bit of a code is a sign."""
        return self.bits > self.exponent_bits + self.mantissa_bits

    @property
    def codes_per_byte(self) -> int:
        """How many codes are stored in a byte: two of 4 bits, one of any other width."""
        return 2 if self.bits == 4 else 1

    @property
    def packed(self) -> bool:
        """Whether codes share a byte."""
        return self.codes_per_byte > 1

    @property
    def ones_byte(self) -> int:
        """The byte that holds the code of 1.0, twice if codes are packed."""
        code = self.bias << self.mantissa_bits
        return code << self.bits | code if self.packed else code

    @property
    def max_exponent(self) -> int:
        """The exponent of `max`: `floor(log2(max))`."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_code(self) -> int:
        """The code of `max`. Zero and the positive finite values have the codes `0 .. max_code`, in their order."""
        mantissa = self.max / 2**self.max_exponent - 1
        return (self.max_exponent + self.bias << self.mantissa_bits) + int(mantissa * 2**self.mantissa_bits)


E4M3 = ElementFormat(name="float8_e4m3fn", bits=8, exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, nan_code=0x7F)
E5M2 = ElementFormat(
    name="float8_e5m2", bits=8, exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, nan_code=0x7F, inf_code=0x7C
)
E2M3 = ElementFormat(name="float6_e2m3fn", bits=6, exponent_bits=2, mantissa_bits=3, bias=1, max=7.5, nan_code=0x1F)
E3M2 = ElementFormat(name="float6_e3m2fn", bits=6, exponent_bits=3, mantissa_bits=2, bias=3, max=28.0, nan_code=0x1F)
E2M1 = ElementFormat(name="float4_e2m1fn", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, nan_code=0x7)
E8M0 = ElementFormat(
    name="float8_e8m0fnu", bits=8, exponent_bits=8, mantissa_bits=0, bias=127, max=2.0**127, nan_code=0xFF
)
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M3, E3M2, E2M1, E8M0)}

FLOATS_16 = ("bfloat16", "float16")
FLOATS = ("float32", *FLOATS_16)
"""Dtype strings of what is quantized: `float` of `ops.def`."""

FLOAT16_MAX = 65504.0
"""The largest finite float16: states of an optimizer in float16 are scaled to it."""


class Usage(enum.Flag):
    """The axis along which blocks run, and so the GEMM that a plane is for.

    A plane is one set of `data` and `scale_inv`. Of a weight `[N, K]`, `y = x @ w.T` contracts K and needs ROWWISE
    (blocks along the last axis); the gradient of `x` contracts N and needs COLUMNWISE (blocks along the first).

    >>> list(Usage.BOTH)
    [<Usage.ROWWISE: 1>, <Usage.COLUMNWISE: 2>]
    """

    ROWWISE = 1
    COLUMNWISE = 2
    BOTH = ROWWISE | COLUMNWISE

    @property
    def planes(self) -> tuple[Usage, ...]:
        """The usages that each are one plane. `list` of it gives the same, but not under every `torch.compile`."""
        if self is Usage.BOTH:
            return (Usage.ROWWISE, Usage.COLUMNWISE)
        return (self,) if self else ()


class Scaling:
    """How the elements of a block, or of a tensor, come to share a scale.

    A method is a subclass; its fields are the options that change its bits. Options of other methods have the value
    that changes nothing, so that ops which serve several methods can be given all of them.

    Attributes:
      dtype: dtype string of `scale_inv`: "float32", or the name of an `ElementFormat`.
      elements: the formats of `data` that may be scaled so.
      whole_blocks: the last block of a row or column may not be cut short.
      turns_columns: the columnwise plane of vectors is stored as the rowwise plane of `x.T`.
    """

    dtype: ClassVar[str]
    elements: ClassVar[tuple[ElementFormat, ...]]
    whole_blocks: ClassVar[bool] = True
    turns_columns: ClassVar[bool] = True

    # Fields of a subclass take the place of these.
    pow2: bool = False
    eps: float = 0.0
    scale_rounding: Literal["up", "floor"] = "up"
    global_scale: Literal["tensor", "row"] | None = None
    scale_max: float = E4M3.max
    four_over_six: Literal["mae", "mse"] | None = None

    def rules(self, block: tuple[int, int] | None) -> list[tuple[str, bool, str]]:
        """Of options: the name, whether it is legal, and what it should be."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class FloatScaling(Scaling):
    """One fp32 scale for the tensor or for each block, `element.max / amax`.

    Attributes:
      pow2: round the scale down to a power of two.
      eps: the least amax that a scale is made of.
    """

    dtype: ClassVar[str] = "float32"
    elements: ClassVar[tuple[ElementFormat, ...]] = (E4M3, E5M2)
    whole_blocks: ClassVar[bool] = False

    pow2: bool = False
    eps: float = 0.0

    def rules(self, block: tuple[int, int] | None) -> list[tuple[str, bool, str]]:
        return [
            ("block", block is None or _is_pair(block), "None or a pair of positive integers"),
            ("eps", isinstance(self.eps, int | float) and 0 <= self.eps < math.inf, "0 or a positive finite number"),
            ("pow2", self.pow2 in (False, True), "False or True"),
        ]


def _is_pair(block: Any) -> bool:
    return isinstance(block, tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)


@dataclass(frozen=True, kw_only=True)
class PowerScaling(Scaling):
    """A power of two for each block of 32, stored as E8M0.

    Attributes:
      scale_rounding: "up", so that nothing saturates, or OCP's "floor".
    """

    dtype: ClassVar[str] = E8M0.name
    elements: ClassVar[tuple[ElementFormat, ...]] = (E4M3, E5M2, E2M3, E3M2, E2M1)
    turns_columns: ClassVar[bool] = False

    scale_rounding: Literal["up", "floor"] = "up"

    def rules(self, block: tuple[int, int] | None) -> list[tuple[str, bool, str]]:
        return [
            ("block", block in ((1, 32), (32, 32)), "(1, 32) or (32, 32)"),
            ("scale_rounding", self.scale_rounding in ("up", "floor"), "'up' or 'floor'"),
        ]


@dataclass(frozen=True, kw_only=True)
class TwoLevelScaling(Scaling):
    """An E4M3 scale for each block of 16, under an fp32 scale for the tensor or for each row.

    Attributes:
      global_scale: what shares the fp32 scale: the "tensor" or each "row".
      scale_max: the block scale that the largest block gets: 448, or 256, which leaves room for the 1.5 times it that
        four over six tries.
      four_over_six: scale a block to 4 instead of 6 if that makes the "mae" or "mse" of the block smaller.
    """

    dtype: ClassVar[str] = E4M3.name
    elements: ClassVar[tuple[ElementFormat, ...]] = (E2M1,)

    global_scale: Literal["tensor", "row"] = "tensor"
    scale_max: float = E4M3.max
    four_over_six: Literal["mae", "mse"] | None = None

    def rules(self, block: tuple[int, int] | None) -> list[tuple[str, bool, str]]:
        return [
            ("block", block in ((1, 16), (16, 16)), "(1, 16) or (16, 16)"),
            ("global_scale", self.global_scale in ("tensor", "row"), "'tensor' or 'row'"),
            ("global_scale", self.global_scale != "row" or block == (1, 16), "'tensor': blocks span several rows"),
            ("scale_max", self.scale_max in (E4M3.max, 256.0), "448 or 256"),
            ("four_over_six", self.four_over_six in (None, "mae", "mse"), "None, 'mae' or 'mse'"),
        ]


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a tensor is stored: elements, the blocks that share a scale, and the method that scales them.

    Illegal combinations are refused when a format is made. Other modules do not look at the structure of a format: they
    ask it what follows from that (`transposes`, `kind`, `gather_refusal`, ...), and `layout.plane` for shapes.

    Attributes:
      name: what `str` prints; options changed from those of `FORMATS[name]` follow in brackets.
      element: the format of `data`.
      scaling: the method, with its options.
      block: (rows, cols) that share a scale in the rowwise plane; None: the whole tensor does.
      hadamard: NVFP4 vectors only: rotate the columnwise plane by a random Hadamard transform first.
      rounding: of elements: "nearest", or NVFP4's "stochastic".
      nonfinite: what shows of an infinite element. "saturate", the default of `FORMATS`: nothing, as it becomes the
        largest code, which is what the standards and TransformerEngine define. "nan": it and what shares a scale with
        it become NaN, so that an overflow reaches the loss or a gradient, where loss scaling looks for it. Recipes for
        training choose "nan". Finite numbers have the same bits either way.

    >>> print(MXFP8_E4M3, MXFP8_E4M3.with_options(scale_rounding="floor"))
    MXFP8_E4M3 MXFP8_E4M3[scale_rounding=floor]
    >>> MXFP8_E4M3.block, MXFP8_E4M3.block_of(Usage.COLUMNWISE)
    ((1, 32), (32, 1))
    """

    name: str
    element: ElementFormat
    scaling: Scaling = FloatScaling()
    block: tuple[int, int] | None = None
    hadamard: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    nonfinite: Literal["saturate", "nan"] = "saturate"

    def __post_init__(self) -> None:
        if isinstance(self.element, str):  # By its name.
            object.__setattr__(self, "element", ELEMENTS.get(self.element, self.element))
        if not isinstance(self.scaling, Scaling):
            raise TypeError(f"Format {self.name}: scaling ({self.scaling!r}) must be a Scaling, such as PowerScaling()")
        two_level = isinstance(self.scaling, TwoLevelScaling)
        plain = not self.hadamard and self.rounding == "nearest"
        for option, legal, need in [
            *self.scaling.rules(self.block),
            ("element", self.element in self.scaling.elements, " or ".join(map(str, self.scaling.elements))),
            ("hadamard", self.hadamard in (False, True), "False or True"),
            ("rounding", self.rounding in ("nearest", "stochastic"), "'nearest' or 'stochastic'"),
            ("rounding", self.rounding == "nearest" or two_level, "'nearest': only NVFP4 has stochastic rounding"),
            ("nonfinite", self.nonfinite in ("saturate", "nan"), "'saturate' or 'nan'"),
            (
                "hadamard",
                not self.hadamard or (two_level and self.block == (1, 16)),
                "False: the rotation needs 1x16 blocks",
            ),
            (
                "four_over_six",
                plain or not self.scaling.four_over_six,
                "None: it excludes rotation and stochastic rounding",
            ),
        ]:
            if not legal:
                given = self.options[option]
                text = str(given) if isinstance(given, ElementFormat) else repr(given)
                raise ValueError(f"Format {self.name}: {option} ({text}) must be {need}")

    def __str__(self) -> str:
        default = FORMATS.get(self.name, self).options
        changed = [f"{name}={value}" for name, value in self.options.items() if value != default.get(name)]
        return f"{self.name}[{', '.join(changed)}]" if changed else self.name

    @property
    def options(self) -> dict[str, Any]:
        """What `with_options` can change, by name: the options of the method, and those of the format."""
        own = {name: getattr(self, name) for name in ("hadamard", "rounding", "nonfinite")}
        return {"element": self.element, "block": self.block} | vars(self.scaling) | own

    def with_options(self, **options: Any) -> Format:
        """This format with other options, checked again.

        >>> NVFP4.with_options(global_scale="row").scaling
        TwoLevelScaling(global_scale='row', scale_max=448.0, four_over_six=None)
        >>> FP8_E4M3.with_options(global_scale="row")
        Traceback (most recent call last):
        ValueError: Format FP8_E4M3 has no option global_scale; it has element, block, pow2, eps, hadamard, rounding, \
nonfinite
        """
        if unknown := sorted(set(options) - set(self.options)):
            raise ValueError(f"Format {self.name} has no option {unknown[0]}; it has {', '.join(self.options)}")
        own = {name: options.pop(name, value) for name, value in vars(self.scaling).items()}
        return dataclasses.replace(self, scaling=type(self.scaling)(**own), **options)

    @property
    def description(self) -> dict[str, Any]:
        """The format in terms of JSON, for files and saved programs.

        >>> str(Format.of(NVFP4.with_options(global_scale="row").description))
        'NVFP4[global_scale=row]'
        """
        return self.options | {"name": self.name, "scale_dtype": self.scale_dtype, "element": self.element.name}

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Format:
        """The inverse of `description`. Options that it lacks, as one of an older version may, have their defaults.

        Raises:
          ValueError: it is not that of a format.
        """
        given = dict(description) if isinstance(description, Mapping) else {}
        methods = {method.dtype: method for method in (FloatScaling, PowerScaling, TwoLevelScaling)}
        name, element, method, block = (given.pop(term, ()) for term in ("name", "element", "scale_dtype", "block"))
        pair = isinstance(block, list | tuple) and len(block) == 2 and all(type(size) is int for size in block)
        for term, value, legal, need in (
            ("name", name, isinstance(name, str), "a string"),
            ("element", element, element in tuple(ELEMENTS), " or ".join(ELEMENTS)),
            ("scale_dtype", method, method in tuple(methods), " or ".join(methods)),
            ("block", block, block is None or pair, "None or a pair of positive integers"),
        ):
            if not legal:
                raise ValueError(f"Format {name}: {term} ({value!r}) must be {need}")
        plain = cls(name=name, element=ELEMENTS[element], block=block and tuple(block), scaling=methods[method]())
        return plain.with_options(**given)

    def __reduce__(self) -> tuple[Any, ...]:
        return Format.of, (self.description,)  # What arrives is checked.

    # --- what others ask ---

    @property
    def kind(self) -> tuple[object, ...]:
        """What formats of one kind have in common: the method, whether of tensors or of blocks, the width of a code."""
        return type(self.scaling), self.block is None, self.element.bits

    @property
    def per_tensor(self) -> bool:
        """Whether one fp32 scale serves all elements, so that it is made of one amax, and nothing else."""
        return self.block is None

    @property
    def tensor_scaled(self) -> bool:
        """Whether a scale serves the whole tensor, so that its shards must agree on an amax."""
        return self.block is None or self.scaling.global_scale == "tensor"

    @property
    def row_scaled(self) -> bool:
        """Whether each row has an fp32 scale. It follows from the elements of the row, so rows are never cut."""
        return self.scaling.global_scale == "row"

    @property
    def power_scales(self) -> bool:
        """Whether scales are powers of two, so that to multiply by one rounds nothing."""
        return self.scaling.pow2 or self.scale_dtype == E8M0.name

    @property
    def transposes(self) -> bool:
        """Whether both planes hold the same numbers, so that the columnwise one is the transpose of the rowwise one."""
        return self.block is None or self.block[0] == self.block[1]

    def rotates(self, usage: Usage) -> bool:
        """Whether a plane for `usage` is of x rotated, and so has amaxes of its own."""
        return self.hadamard and usage is not Usage.ROWWISE

    @property
    def turns_columns(self) -> bool:
        """Whether the columnwise plane is stored as the rowwise plane of `x.T`: all but that of vectors of MXFP8 and
        MXFP6. Codes of 4 bits are packed along the axis that a GEMM contracts, so theirs always is.
        """
        return self.transposes or self.scaling.turns_columns or self.element.codes_per_byte > 1

    @property
    def stochastic(self) -> bool:
        """Whether quantizing takes a seed."""
        return self.rounding == "stochastic"

    @property
    def slice_refusal(self) -> str | None:
        """Why slices of a weight cannot be cast apart; None if they can: if codes depend on amaxes and the element."""
        if self.scaling.four_over_six is None:
            return None
        return f"its scales depend on more than amaxes (four_over_six={self.scaling.four_over_six})"

    @property
    def gather_refusal(self) -> str | None:
        """Why a weight cannot be gathered as codes for forward and backward; None if it can."""
        if not self.transposes:
            return "its rowwise and columnwise planes have different codes, and a gather sends one of them"
        if self.stochastic:
            return "it uses stochastic rounding, so each gather would draw different codes"
        return self.slice_refusal

    @property
    def scale_dtype(self) -> str:
        """Dtype string of `scale_inv`."""
        return self.scaling.dtype

    @property
    def scale_bytes(self) -> int:
        """Bytes of an element of `scale_inv`."""
        return 1 if self.scale_dtype in ELEMENTS else 4

    @property
    def stored_scale_dtype(self) -> str:
        """Dtype string of `scale_inv` where one-byte floats are bytes."""
        return "uint8" if self.scale_dtype in ELEMENTS else self.scale_dtype

    @property
    def data_dtype(self) -> str:
        """Dtype string of `data` at rest: uint8 holds codes that are not of 8 bits."""
        return self.element.name if self.element.bits == 8 else "uint8"

    def block_of(self, usage: Usage) -> tuple[int, int] | None:
        """(rows, cols) of `x` that share a scale in the plane for `usage`; None: the whole tensor does."""
        if self.block is None or usage is Usage.ROWWISE:
            return self.block
        return self.block[::-1]

    def block_shape(self, usage: Usage = Usage.ROWWISE) -> tuple[int, int]:
        """`block_of` as the unit of shards and of padding: (1, 1) under one scale, which sets no limits."""
        return self.block_of(usage) or (1, 1)


FP8_E4M3 = Format(name="FP8_E4M3", element=E4M3)
FP8_E5M2 = Format(name="FP8_E5M2", element=E5M2)
FP8_1x128 = Format(name="FP8_1x128", element=E4M3, block=(1, 128), scaling=FloatScaling(pow2=True))
FP8_128x128 = Format(name="FP8_128x128", element=E4M3, block=(128, 128), scaling=FloatScaling(pow2=True))
MXFP8_E4M3 = Format(name="MXFP8_E4M3", element=E4M3, block=(1, 32), scaling=PowerScaling())
MXFP8_E5M2 = Format(name="MXFP8_E5M2", element=E5M2, block=(1, 32), scaling=PowerScaling())
MXFP8_32x32 = Format(name="MXFP8_32x32", element=E4M3, block=(32, 32), scaling=PowerScaling())
MXFP6_E2M3 = Format(name="MXFP6_E2M3", element=E2M3, block=(1, 32), scaling=PowerScaling())
MXFP6_E2M3_32x32 = Format(name="MXFP6_E2M3_32x32", element=E2M3, block=(32, 32), scaling=PowerScaling())
MXFP6_E3M2 = Format(name="MXFP6_E3M2", element=E3M2, block=(1, 32), scaling=PowerScaling())
MXFP6_E3M2_32x32 = Format(name="MXFP6_E3M2_32x32", element=E3M2, block=(32, 32), scaling=PowerScaling())
MXFP4 = Format(name="MXFP4", element=E2M1, block=(1, 32), scaling=PowerScaling())
MXFP4_32x32 = Format(name="MXFP4_32x32", element=E2M1, block=(32, 32), scaling=PowerScaling())
NVFP4 = Format(name="NVFP4", element=E2M1, block=(1, 16), scaling=TwoLevelScaling())
NVFP4_16x16 = Format(name="NVFP4_16x16", element=E2M1, block=(16, 16), scaling=TwoLevelScaling())
FORMATS = {fmt.name: fmt for fmt in list(globals().values()) if isinstance(fmt, Format)}
"""All formats above, by name."""
