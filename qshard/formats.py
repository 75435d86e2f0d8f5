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
from dataclasses import dataclass
from typing import Any, Literal

__all__ = [
    "E2M1",
    "E4M3",
    "E5M2",
    "E8M0",
    "ELEMENTS",
    "FLOAT16_MAX",
    "FORMATS",
    "FP8_128x128",
    "FP8_1x128",
    "FP8_E4M3",
    "FP8_E5M2",
    "MXFP8_32x32",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "NVFP4",
    "NVFP4_16x16",
    "ElementFormat",
    "Format",
    "Usage",
]


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A floating point format of at most 8 bits: sign if any, exponent, mantissa, from the high bit down.

    Attributes:
      name: dtype string of ml_dtypes, JAX and PyTorch.
      bits: width of a code; codes of 4 bits are stored two a byte, the even element in the low nibble.
      bias: exponent field `e` and mantissa field `m` stand for `2**(e - bias) * (1 + m / 2**mantissa_bits)`.
      max: largest finite value; encoding saturates to it.
      nan_code: what encoding makes of NaN. E2M1 has no NaN and takes its largest code.
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
        return 8 // self.bits

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
E2M1 = ElementFormat(name="float4_e2m1fn", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, nan_code=0x7)
E8M0 = ElementFormat(
    name="float8_e8m0fnu", bits=8, exponent_bits=8, mantissa_bits=0, bias=127, max=2.0**127, nan_code=0xFF
)
ELEMENTS = {element.name: element for element in (E4M3, E5M2, E2M1, E8M0)}

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
        return tuple(one for one in (Usage.ROWWISE, Usage.COLUMNWISE) if one in self)


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a tensor is stored: elements, and the scales they share. Options hold the values that change its bits.

    Attributes:
      name: what `str` prints; options changed from those of `FORMATS[name]` follow in brackets.
      element: the format of `data`.
      scale_dtype: dtype string of `scale_inv`: "float32", or the name of an `ElementFormat`.
      block: (rows, cols) that share a scale in the rowwise plane; None: the whole tensor does.
      pow2: fp32 scales only: round the scale down to a power of two.
      eps: fp32 scales only: the least amax that a scale is made of.
      scale_rounding: E8M0 scales only: "up", so that nothing saturates, or OCP's "floor".
      global_scale: E4M3 scales only: what shares the second, fp32 scale: the "tensor" or each "row".
      scale_max: E4M3 scales only: the block scale that the largest block gets, 448 or 256.
      four_over_six: scale a block to 4 instead of 6 if that makes the "mae" or "mse" of the block smaller.
      hadamard: rotate the columnwise plane by a random Hadamard transform first.
      rounding: of elements: "nearest" or "stochastic".

    >>> print(MXFP8_E4M3, MXFP8_E4M3.with_options(scale_rounding="floor"))
    MXFP8_E4M3 MXFP8_E4M3[scale_rounding=floor]
    >>> MXFP8_E4M3.block, MXFP8_E4M3.block_of(Usage.COLUMNWISE)
    ((1, 32), (32, 1))
    """

    name: str
    element: ElementFormat
    scale_dtype: str = "float32"
    block: tuple[int, int] | None = None
    pow2: bool = False
    eps: float = 0.0
    scale_rounding: Literal["up", "floor"] = "up"
    global_scale: Literal["tensor", "row"] | None = None
    scale_max: float = E4M3.max
    four_over_six: Literal["mae", "mse"] | None = None
    hadamard: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"

    def __post_init__(self) -> None:
        fp32, e4m3 = self.scale_dtype == "float32", self.scale_dtype == E4M3.name
        plain = not self.hadamard and self.rounding == "nearest"
        for option, legal, need in [
            ("scale_dtype", self.scale_dtype in ("float32", E8M0.name, E4M3.name), f"float32, {E8M0} or {E4M3}"),
            ("element", self.element in ((E2M1,) if e4m3 else (E4M3, E5M2)), f"FP8, or {E2M1} with {E4M3} scales"),
            ("block", fp32 or self.block is not None, "a pair, as only an fp32 scale may serve a whole tensor"),
            ("eps", self.eps == 0 or (fp32 and 0 < self.eps < math.inf), "0, or finite and positive with fp32 scales"),
            ("hadamard", not self.hadamard or self.block == (1, 16), "False, as blocks are not 1x16"),
            ("global_scale", (self.global_scale is not None) == e4m3, f"there with {E4M3} scales alone"),
            ("global_scale", self.global_scale != "row" or self.block == (1, 16), "'tensor', as blocks span rows"),
            ("four_over_six", self.four_over_six is None or plain, "None, as it needs nearest rounding of x itself"),
        ]:
            self._require(option, legal, need)
        for option, (scale_dtype, values) in _OPTION_VALUES.items():
            legal_values = values if scale_dtype == self.scale_dtype else values[:1]
            self._require(option, getattr(self, option) in legal_values, f"one of {legal_values}")

    def _require(self, option: str, legal: bool, need: str) -> None:
        if not legal:
            raise ValueError(f"Format {self.name}: {option} ({getattr(self, option)!r}) is not {need}; change it")

    def __str__(self) -> str:
        default = FORMATS.get(self.name, self)
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return f"{self.name}[{', '.join(changed)}]" if changed else self.name

    def with_options(self, **options: Any) -> Format:
        """This format with other options, checked again."""
        return dataclasses.replace(self, **options)

    @property
    def data_dtype(self) -> str:
        """Dtype string of `data` at rest: codes of less than a byte are packed into uint8."""
        return "uint8" if self.element.codes_per_byte > 1 else self.element.name

    @property
    def square(self) -> bool:
        """Whether rowwise and columnwise blocks are the same, so that one plane is the transpose of the other."""
        return self.block is None or self.block[0] == self.block[1]

    @property
    def cuts_blocks(self) -> bool:
        """Whether the last block of a row or column may be cut short. OCP and NVFP4 blocks are always whole."""
        return self.scale_dtype == "float32"

    def block_of(self, usage: Usage) -> tuple[int, int] | None:
        """(rows, cols) of `x` that share a scale in the plane for `usage`; None: the whole tensor does."""
        if self.block is None or usage is Usage.ROWWISE:
            return self.block
        return self.block[::-1]


# The values of each option of a format with scales of this dtype. Formats with other scales have the first.
_OPTION_VALUES: dict[str, tuple[str, tuple[object, ...]]] = {
    "pow2": ("float32", (False, True)),
    "scale_rounding": (E8M0.name, ("up", "floor")),
    "global_scale": (E4M3.name, (None, "tensor", "row")),
    "scale_max": (E4M3.name, (E4M3.max, 256.0)),
    "four_over_six": (E4M3.name, (None, "mae", "mse")),
    "hadamard": (E4M3.name, (False, True)),
    "rounding": (E4M3.name, ("nearest", "stochastic")),
}

FP8_E4M3 = Format(name="FP8_E4M3", element=E4M3)
FP8_E5M2 = Format(name="FP8_E5M2", element=E5M2)
FP8_1x128 = Format(name="FP8_1x128", element=E4M3, block=(1, 128), pow2=True)
FP8_128x128 = Format(name="FP8_128x128", element=E4M3, block=(128, 128), pow2=True)
MXFP8_E4M3 = Format(name="MXFP8_E4M3", element=E4M3, block=(1, 32), scale_dtype=E8M0.name)
MXFP8_E5M2 = Format(name="MXFP8_E5M2", element=E5M2, block=(1, 32), scale_dtype=E8M0.name)
MXFP8_32x32 = Format(name="MXFP8_32x32", element=E4M3, block=(32, 32), scale_dtype=E8M0.name)
NVFP4 = Format(name="NVFP4", element=E2M1, block=(1, 16), scale_dtype=E4M3.name, global_scale="tensor")
NVFP4_16x16 = Format(name="NVFP4_16x16", element=E2M1, block=(16, 16), scale_dtype=E4M3.name, global_scale="tensor")
FORMATS = {
    fmt.name: fmt
    for fmt in (
        FP8_E4M3,
        FP8_E5M2,
        FP8_1x128,
        FP8_128x128,
        MXFP8_E4M3,
        MXFP8_E5M2,
        MXFP8_32x32,
        NVFP4,
        NVFP4_16x16,
    )
}
