"""Number formats: the encoding of one element, and the blocks and scales that elements share.

Mirrors `ffi/core/format.h`, and is the only Python module with the constants of a format. All objects are frozen and
hashable, so they can be static arguments of `jit` and static fields of a pytree.

Sources: OCP 8-bit Floating Point v1.0; OCP Microscaling Formats v1.0; arXiv:2209.05433 (E4M3, E5M2); arXiv:2412.19437
(1x128, 128x128); arXiv:2506.08027 (MXFP8, rounded up); arXiv:2509.25149 (NVFP4); arXiv:2512.02010 (four over six).
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
    """A floating-point format of at most 8 bits: optional sign, exponent and mantissa, from the high bit down.

    Attributes:
      name: dtype name in ml_dtypes, JAX and PyTorch.
      bits: width of a code. 4-bit codes are packed two to a byte, the even element in the low nibble.
      bias: exponent bias. Fields `e` and `m` encode `2**(e - bias) * (1 + m / 2**mantissa_bits)`.
      max: largest finite value; encoding saturates to it.
      nan_code: code that NaN encodes to. Formats with fewer than 8 bits have no NaN and use their largest code.
      inf_code: code of infinity, or None if the format has none. Decoding accepts it; encoding never produces it.

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

    def __repr__(self) -> str:
        constant = self.name.partition("_")[2][:4].upper()  # E4M3 of float8_e4m3fn
        return constant if self == ELEMENTS.get(self.name) else constructor_call(self)

    @property
    def signed(self) -> bool:
        """True if codes have a sign bit."""
        return self.bits > self.exponent_bits + self.mantissa_bits

    @property
    def codes_per_byte(self) -> int:
        """Number of codes stored in a byte: 2 for 4-bit codes, otherwise 1."""
        return 2 if self.bits == 4 else 1

    @property
    def packed(self) -> bool:
        """True if several codes share a byte."""
        return self.codes_per_byte > 1

    @property
    def ones_byte(self) -> int:
        """The byte that encodes 1.0, in both nibbles if codes are packed."""
        code = self.bias << self.mantissa_bits
        return code << self.bits | code if self.packed else code

    @property
    def max_exponent(self) -> int:
        """Exponent of `max`: `floor(log2(max))`."""
        return math.frexp(self.max)[1] - 1

    @property
    def max_code(self) -> int:
        """Code of `max`. Codes `0 .. max_code` are zero and the positive finite values in ascending order."""
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
"""Dtypes that can be quantized: the dtype class `float` in `ops.def`."""

FLOAT16_MAX = 65504.0
"""Largest finite float16. Optimizer state in float16 is scaled to it."""


class Usage(enum.Flag):
    """The axis that blocks run along, which decides the GEMM that a plane can serve.

    A plane is one set of `data` and `scale_inv`. For a weight `[N, K]`, `y = x @ w.T` contracts K and reads the ROWWISE
    plane (blocks along the last axis); the gradient of `x` contracts N and reads the COLUMNWISE plane (blocks along the
    first axis).

    >>> list(Usage.BOTH)
    [Usage.ROWWISE, Usage.COLUMNWISE]
    """

    ROWWISE = 1
    COLUMNWISE = 2
    BOTH = ROWWISE | COLUMNWISE

    def __repr__(self) -> str:
        return str(self)

    @property
    def planes(self) -> tuple[Usage, ...]:
        """The single-plane usages in this usage. Unlike `list(usage)`, it works under every `torch.compile`."""
        if self is Usage.BOTH:
            return (Usage.ROWWISE, Usage.COLUMNWISE)
        return (self,) if self else ()


class Scaling:
    """Base class of scaling methods: how the scales of blocks, or of a whole tensor, are computed and stored.

    The fields of a subclass are the options that change the bits of a result. The base class gives every option of
    every method its neutral value, so an op that serves several methods can be passed all of them.

    Attributes:
      dtype: dtype of `scale_inv`: "float32" or the name of an `ElementFormat`.
      elements: formats of `data` that the method accepts.
      whole_blocks: whether the axes of a tensor must be multiples of the block.
      transposes_columns: whether the columnwise plane of 1-D blocks is stored as the rowwise plane of `x.T`.
      legal: legal values of `block` and of options that have few.
    """

    dtype: ClassVar[str]
    elements: ClassVar[tuple[ElementFormat, ...]]
    whole_blocks: ClassVar[bool] = True
    transposes_columns: ClassVar[bool] = True
    legal: ClassVar[dict[str, tuple[Any, ...]]] = {}

    # Subclasses override these with fields.
    pow2: bool = False
    eps: float = 0.0
    scale_rounding: Literal["up", "floor"] = "up"
    global_scale: Literal["tensor", "row"] | None = None
    scale_max: float = E4M3.max
    four_over_six: Literal["mae", "mse"] | None = None

    def __repr__(self) -> str:
        return constructor_call(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class FloatScaling(Scaling):
    """One fp32 scale per tensor or per block: `element.max / amax`.

    Attributes:
      pow2: round the scale down to a power of two.
      eps: lower bound on the amax that a scale is computed from.
    """

    dtype: ClassVar[str] = "float32"
    elements: ClassVar[tuple[ElementFormat, ...]] = (E4M3, E5M2)
    whole_blocks: ClassVar[bool] = False
    legal: ClassVar[dict[str, tuple[Any, ...]]] = {"pow2": (False, True)}
    pow2: bool = False
    eps: float = 0.0


@dataclass(frozen=True, kw_only=True, repr=False)
class PowerScaling(Scaling):
    """One power-of-two scale per block of 32, stored as E8M0.

    Attributes:
      scale_rounding: "up", so that no finite element saturates, or "floor" as in the OCP specification.
    """

    dtype: ClassVar[str] = E8M0.name
    elements: ClassVar[tuple[ElementFormat, ...]] = (E4M3, E5M2, E2M3, E3M2, E2M1)
    transposes_columns: ClassVar[bool] = False
    legal: ClassVar[dict[str, tuple[Any, ...]]] = {"block": ((1, 32), (32, 32)), "scale_rounding": ("up", "floor")}
    scale_rounding: Literal["up", "floor"] = "up"


@dataclass(frozen=True, kw_only=True, repr=False)
class TwoLevelScaling(Scaling):
    """One E4M3 scale per block of 16, and one fp32 global scale per tensor or per row.

    Attributes:
      global_scale: what shares a global scale: the "tensor" or each "row".
      scale_max: block scale of the block with the largest amax: 448, or 256. With 256, the factor of 1.5 that four over
        six tries does not overflow E4M3.
      four_over_six: scale the amax of a block to 4 instead of 6 if that lowers the "mae" or "mse" of the block.
    """

    dtype: ClassVar[str] = E4M3.name
    elements: ClassVar[tuple[ElementFormat, ...]] = (E2M1,)
    legal: ClassVar[dict[str, tuple[Any, ...]]] = {
        "block": ((1, 16), (16, 16)),
        "global_scale": ("tensor", "row"),
        "scale_max": (E4M3.max, 256.0),
        "four_over_six": (None, "mae", "mse"),
    }
    global_scale: Literal["tensor", "row"] = "tensor"
    scale_max: float = E4M3.max
    four_over_six: Literal["mae", "mse"] | None = None


def _either(values: tuple[Any, ...]) -> str:
    *first, last = (repr(value).removesuffix(".0") for value in values)
    return f"{', '.join(first)} or {last}"


@dataclass(frozen=True, kw_only=True)
class Format:
    """Storage format of a tensor: its element format, the blocks that share a scale, and the scaling method.

    The constructor rejects illegal combinations. Other modules use derived properties (`shares_codes`, `kind`,
    `gather_refusal`) and `layout.plane` for shapes, instead of reading the structure of a format.

    Attributes:
      name: name of the format. `str` prints it, followed by the options that differ from `FORMATS[name]` in brackets.
      element: format of the elements of `data`, or its name.
      scaling: scaling method with its options.
      block: (rows, cols) that share a scale in the rowwise plane; None: the whole tensor shares one.
      hadamard: rotate the columnwise plane by a random Hadamard transform before quantizing. Only for NVFP4 with 1x16
        blocks.
      rounding: rounding of elements: "nearest", or "stochastic" for NVFP4.
      nonfinite: encoding of infinite elements. "saturate", the default of `FORMATS`, encodes infinity as the largest
        finite code, as the standards and TransformerEngine do, which hides the overflow. With "nan", infinity and every
        element that shares its scale become NaN, so an overflow reaches the loss or a gradient, where loss scaling
        detects it. Training recipes use "nan". Finite inputs encode to the same bits either way.

    >>> print(MXFP8_E4M3, MXFP8_E4M3.with_options(scale_rounding="floor"))
    MXFP8_E4M3 MXFP8_E4M3[scale_rounding=floor]
    >>> MXFP8_E4M3.with_options(scale_rounding="floor")
    MXFP8_E4M3.with_options(scale_rounding='floor')
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
        if isinstance(self.element, str):  # element formats may be passed by name
            object.__setattr__(self, "element", ELEMENTS.get(self.element, self.element))
        if not isinstance(self.scaling, Scaling):
            raise TypeError(f"Format {self.name}: scaling ({self.scaling!r}) must be a Scaling, such as PowerScaling()")
        scaling, block = self.scaling, self.block
        own = {"hadamard": (False, True), "rounding": ("nearest", "stochastic"), "nonfinite": ("saturate", "nan")}
        is_pair = isinstance(block, tuple) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        eps_is_legal = isinstance(scaling.eps, int | float) and 0 <= scaling.eps < math.inf
        two_level = isinstance(scaling, TwoLevelScaling)
        may_rotate = not self.hadamard or (two_level and block == (1, 16))
        compatible = not scaling.four_over_six or not (self.hadamard or self.stochastic)
        for option, legal, need in [
            *((name, self.options[name] in values, _either(values)) for name, values in (scaling.legal | own).items()),
            ("block", block is None or is_pair, "None or a pair of positive integers"),
            ("eps", eps_is_legal, "0 or a positive finite number"),
            ("element", self.element in scaling.elements, " or ".join(map(str, scaling.elements))),
            ("global_scale", scaling.global_scale != "row" or block == (1, 16), "'tensor': blocks span several rows"),
            ("rounding", self.rounding == "nearest" or two_level, "'nearest': only NVFP4 has stochastic rounding"),
            ("hadamard", may_rotate, "False: the rotation needs 1x16 blocks"),
            ("four_over_six", compatible, "None: it excludes rotation and stochastic rounding"),
        ]:
            if not legal:
                given = self.options[option]
                text = str(given) if isinstance(given, ElementFormat) else repr(given)
                raise ValueError(f"Format {self.name}: {option} ({text}) must be {need}")

    def __str__(self) -> str:
        default = FORMATS.get(self.name, self).options
        changed = [f"{name}={value}" for name, value in self.options.items() if value != default.get(name)]
        return f"{self.name}[{', '.join(changed)}]" if changed else self.name

    def __repr__(self) -> str:
        default = FORMATS.get(self.name)
        if default is None or type(default.scaling) is not type(self.scaling):
            return constructor_call(self)
        changed = [f"{name}={value!r}" for name, value in self.options.items() if value != default.options[name]]
        return f"{self.name}.with_options({', '.join(changed)})" if changed else self.name

    @property
    def options(self) -> dict[str, Any]:
        """Current values of the options that `with_options` accepts."""
        own = {name: getattr(self, name) for name in ("hadamard", "rounding", "nonfinite")}
        return {"element": self.element, "block": self.block} | vars(self.scaling) | own

    def with_options(self, **options: Any) -> Format:
        """Return a copy of this format with some options replaced.

        Args:
          **options: new values for entries of `options`.

        Raises:
          ValueError: the format has no such option, or the value is illegal.

        >>> NVFP4.with_options(global_scale="row").scaling
        TwoLevelScaling(global_scale='row')
        >>> FP8_E4M3.with_options(global_scale="row")
        Traceback (most recent call last):
        ValueError: Format FP8_E4M3 has no option global_scale; it has element, block, pow2, eps, hadamard, ...
        """
        if unknown := sorted(set(options) - set(self.options)):
            raise ValueError(f"Format {self.name} has no option {unknown[0]}; it has {', '.join(self.options)}")
        own = {name: options.pop(name, value) for name, value in vars(self.scaling).items()}
        return dataclasses.replace(self, scaling=type(self.scaling)(**own), **options)

    @property
    def description(self) -> dict[str, Any]:
        """The format as JSON-serializable values, for checkpoints and saved programs. `Format.of` is the inverse.

        >>> str(Format.of(NVFP4.with_options(global_scale="row").description))
        'NVFP4[global_scale=row]'
        """
        return self.options | {"name": self.name, "scale_dtype": self.scale_dtype, "element": self.element.name}

    @classmethod
    def of(cls, description: Mapping[str, Any]) -> Format:
        """Return the format that a `description` encodes.

        Options that are missing, because an older version wrote the description, take their defaults.

        Raises:
          ValueError: `description` does not describe a legal format.
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
        return Format.of, (self.description,)  # unpickling validates the fields

    @property
    def kind(self) -> tuple[object, ...]:
        """Scaling method, per-tensor or not, and code width: named recipes accept formats of one kind."""
        return type(self.scaling), self.block is None, self.element.bits

    @property
    def per_tensor(self) -> bool:
        """True if one fp32 scale, computed from one amax, serves the whole tensor, without block scales."""
        return self.block is None

    @property
    def tensor_scaled(self) -> bool:
        """True if some scale serves the whole tensor, so its shards must share an amax."""
        return self.block is None or self.scaling.global_scale == "tensor"

    @property
    def has_one_amax(self) -> bool:
        """True if one amax of the whole tensor serves both planes."""
        return self.tensor_scaled and not self.hadamard

    @property
    def row_scaled(self) -> bool:
        """True if each row has an fp32 global scale. Ranks that shard the columns reduce one amax for each row."""
        return self.scaling.global_scale == "row"

    @property
    def power_scales(self) -> bool:
        """True if all scales are powers of two, so that scaling is exact."""
        return self.scaling.pow2 or self.scale_dtype == E8M0.name

    @property
    def shares_codes(self) -> bool:
        """True if both planes hold the same numbers: the columnwise plane is the transpose of the rowwise plane."""
        return self.block is None or self.block[0] == self.block[1]

    def rotates(self, usage: Usage) -> bool:
        """Return whether the plane for `usage` quantizes a rotated `x`, and therefore has different amaxes."""
        return self.hadamard and usage is not Usage.ROWWISE

    @property
    def transposes_columns(self) -> bool:
        """True if the columnwise plane is stored as the rowwise plane of `x.T`.

        False only for MXFP8 and MXFP6 with 1-D blocks. Packed 4-bit codes are always transposed, because they must be
        packed along the axis that a GEMM contracts.
        """
        return self.shares_codes or self.scaling.transposes_columns or self.element.codes_per_byte > 1

    @property
    def stochastic(self) -> bool:
        """True if quantization rounds stochastically and takes a seed."""
        return self.rounding == "stochastic"

    @property
    def slice_refusal(self) -> str | None:
        """Why flat slices of a tensor cannot be cast separately, or None if codes depend only on element and amaxes."""
        if self.scaling.four_over_six is None:
            return None
        return f"its scales depend on more than amaxes (four_over_six={self.scaling.four_over_six})"

    @property
    def gather_refusal(self) -> str | None:
        """Why codes of a weight cannot be gathered once for forward and backward, or None if they can."""
        if not self.shares_codes:
            return "its rowwise and columnwise planes have different codes, and a gather sends one of them"
        if self.stochastic:
            return "it uses stochastic rounding, so each gather would draw different codes"
        return self.slice_refusal

    @property
    def scale_dtype(self) -> str:
        """Dtype of `scale_inv`."""
        return self.scaling.dtype

    @property
    def scale_bytes(self) -> int:
        """Bytes per element of `scale_inv`."""
        return 1 if self.scale_dtype in ELEMENTS else 4

    @property
    def stored_scale_dtype(self) -> str:
        """Dtype of `scale_inv` in storage that holds one-byte floats as uint8."""
        return "uint8" if self.scale_dtype in ELEMENTS else self.scale_dtype

    @property
    def data_dtype(self) -> str:
        """Dtype of `data` in storage: the element's name, or uint8 for codes narrower than 8 bits."""
        return self.element.name if self.element.bits == 8 else "uint8"

    def block_of(self, usage: Usage) -> tuple[int, int] | None:
        """Return the (rows, cols) of `x` that share a scale in the plane for `usage`, or None if all of `x` does."""
        if self.block is None or usage is Usage.ROWWISE:
            return self.block
        return self.block[::-1]

    def block_shape(self, usage: Usage = Usage.ROWWISE) -> tuple[int, int]:
        """Return `block_of`, or (1, 1) for one scale per tensor: the alignment that shards and padding need."""
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
"""All formats defined in this module, by name."""


def constructor_call(value: Any) -> str:
    """Format a dataclass as a call of its constructor, without arguments that equal their defaults.

    >>> constructor_call(FloatScaling(pow2=True)), constructor_call(FloatScaling())
    ('FloatScaling(pow2=True)', 'FloatScaling()')
    """
    values = [(field.name, getattr(value, field.name), field.default) for field in dataclasses.fields(value)]
    arguments = [f"{name}={given!r}" for name, given, default in values if given != default]
    return f"{type(value).__name__}({', '.join(arguments)})"
