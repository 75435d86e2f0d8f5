"""Detection of codes in checkpoints of others: tensors that need a scale to be numbers, by names, dtypes and shapes.

A safetensors file marks neither codes nor scales. Other libraries use these names:

| checkpoint | codes | scales |
| --- | --- | --- |
| DeepSeek FP8 | `weight` F8_E4M3 | `weight_scale_inv` |
| FP8 of compressed-tensors, ModelOpt, fbgemm | `weight` F8_E4M3 | `weight_scale`, `input_scale`, `k_scale`, ... |
| NVFP4, MXFP4 and integers of compressed-tensors | `weight_packed` | `weight_scale`, `weight_global_scale` |
| NVFP4 of ModelOpt | `weight` U8 | `weight_scale` F8_E4M3, `weight_scale_2` |
| MXFP4 of gpt-oss | `NAME_blocks` U8 | `NAME_scales` U8 |
| GPTQ, AWQ, MLX | `qweight` I32, `weight` U32 | `scales`, beside `qzeros` or `biases` |
| bitsandbytes | `weight` U8 or I8 | `weight.absmax`, `SCB` |

FP8 tensors without any sign of a scale are treated as plain numbers.
"""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import dataclass
from typing import NamedTuple

from qshard._files.checkpoint import FLOATS, Checkpoint, quantization_of
from qshard._files.names import quote
from qshard.layout import Shape

# Patterns for the last part of a name, after `.` or `/`.
SCALE = re.compile(
    r"(?:(?P<stem>.+?)_)?_?(?:(?P<plain>scales?)|(?:global_)?scales?(?:_(?:inv|ub|[0-9]+))*|scale_(?:weight|input)"
    r"|scaling_factor|(?:nested_)?absmax|amax|scb)",
    re.IGNORECASE | re.DOTALL,
)
WEIGHT_SCALE = re.compile(r"(?P<stem>.*weight)_scale.*", re.IGNORECASE | re.DOTALL)
PACKED = re.compile(r"(?P<stem>.+)_(?:blocks|packed|qdata)", re.DOTALL)
OFFSET = re.compile(r"_?(?:zeros?|zero_points?|qzeros|biases|shift)|.+_zero_points?")
BIAS = re.compile(r"b|.*bias", re.DOTALL)
LONGEST = 200  # Maximum length of a last part. Longer ones match no pattern, so that hostile names cost no time.
FP8 = tuple(name for name in FLOATS if name.startswith("F8_"))
SMALL = ("F4", "F6_E2M3", "F6_E3M2")
INTEGERS = ("U8", "I8", "I32", "U32")  # dtypes of packed codes, and of codes without a dtype of their own
CODES = (*FP8, *SMALL, *INTEGERS)
SCALES = (*(name for name in FLOATS if name not in FP8), "F8_E8M0", "U8")  # dtypes of scales
BLOCKS = (16, 32, 64, 128, 256)  # block sizes in elements


class TensorName(NamedTuple):
    """A name of a tensor, parsed.

    Attributes:
      module: text before the last `.` or `/`.
      last: text after it.
      owner: for a scale, the name of its tensor or module; None for other tensors.
      stem: the name without the suffix of packed codes, such as `_blocks`; names of its scales begin with the stem.
    """

    module: str
    last: str
    owner: str | None
    stem: str

    @property
    def is_packed(self) -> bool:
        """True if the name is a name of packed codes."""
        return not self.stem.endswith(self.last)


def parse_name(name: str) -> TensorName:
    """Split a name.

    >>> [parse_name(f"mlp.up.{last}").owner for last in ("weight_scale_inv", "scales", "upscale")]
    ['mlp.up.weight', 'mlp.up', None]
    >>> parse_name("mlp.up_blocks").stem
    'mlp.up'
    """
    end = max(name.rfind("."), name.rfind("/"))
    module, last, front = name[: max(end, 0)], name[end + 1 :], name[: end + 1]
    if len(last) > LONGEST:
        return TensorName(module, last, None, name)
    scale = WEIGHT_SCALE.fullmatch(last) or SCALE.fullmatch(last)
    packed = PACKED.fullmatch(last)
    owner = None if scale is None else front + scale["stem"] if scale["stem"] else module
    return TensorName(module, last, owner, front + packed["stem"] if packed else name)


@dataclass(frozen=True)
class Doubt:
    """A sign that a tensor has codes instead of numbers, as the predicate of a sentence about the tensor.

    `certain` is False if the tensor may still have plain numbers.
    """

    why: str
    certain: bool = True


class Names:
    """The tensors of a checkpoint, indexed by the parts of their names.

    Attributes:
      scales: tensor or module -> its first scale.
      strays: module -> its first scale without a tensor.
      shapes: module and shape -> the first tensor with both, except codes and biases. One element counts as `()`.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.parts = {name: parse_name(name) for name in (*checkpoint.entries, *checkpoint.outside)}
        self.scales: dict[str, str] = {}
        self.strays: dict[str, str] = {}
        self.shapes: dict[tuple[str, Shape], str] = {}
        known = {self.parts[name].stem for name in checkpoint.entries}
        for name, (module, last, owner, _) in self.parts.items():
            entry = checkpoint.entries.get(name)
            if owner is not None:
                self.scales.setdefault(owner, name)
                if owner not in known:
                    self.strays.setdefault(module, name)
            elif entry is None:  # in another shard, with unknown shape
                if not BIAS.fullmatch(last):
                    self.strays.setdefault(module, name)
            elif entry.dtype in SCALES and entry.elements and not BIAS.fullmatch(last):
                self.shapes.setdefault((module, entry.shape if entry.elements > 1 else ()), name)
                if "scale" in last.lower() or entry.dtype == "F8_E8M0":
                    self.strays.setdefault(module, name)

    def reasons(self) -> dict[str, str]:
        """Return name -> reason for tensors that are never layers: scales, packed codes and zero points."""
        scaled = {parts.module for parts in self.parts.values() if parts.owner is not None}
        found = {}
        for name, parts in self.parts.items():
            if parts.owner is not None:
                found[name] = "a scale, by its name"
            elif parts.is_packed:
                found[name] = "codes, by its name"
            elif parts.module in scaled and OFFSET.fullmatch(parts.last):
                found[name] = "a zero point, by its name, beside scales"
        return found

    def doubts(self) -> dict[str, Doubt]:
        """Return name -> doubt for tensors with signs of a scale.

        High-precision numbers beside a quantizer's scale may be codes that were cast. Beside `NAME_scale`, which may be
        a parameter, this is not certain.
        """
        found, plain = {}, []
        for name, entry in self.checkpoint.entries.items():
            module, last, owner, stem = self.parts[name]
            if owner is not None or not entry.elements or OFFSET.fullmatch(last):
                continue
            if entry.dtype in INTEGERS and len(entry.shape) < 2:  # permutations, optimizer states
                continue
            own = self.scales.get(stem)
            if entry.dtype in CODES and (scale := own or self.scales.get(module)) is not None:
                found[name] = Doubt(_predicate(scale))
            elif entry.dtype in FLOATS and entry.dtype not in FP8 and own is not None:
                found[name] = Doubt(_predicate(own, "may have"), not _is_plain(self.parts[own]))
            elif entry.dtype in (*FP8, *SMALL) and (stray := self._stray(module, entry.shape)) is not None:
                found[name] = Doubt(_predicate(stray, "may have"))
            elif entry.dtype in FP8:
                plain.append(name)
        if plain:
            others = [each for each, entry in self.checkpoint.entries.items() if len(entry.tensors) > 1]
            others += [each for each, doubt in found.items() if doubt.certain]
            why = next((f"{quote(each)} has one" for each in others), None) or quantization_of(self.checkpoint)
            if why is not None:
                found |= dict.fromkeys(plain, Doubt(f"has no scale, but {why}"))
        return found

    def _stray(self, module: str, shape: Shape) -> str | None:
        """Find a scale in the same module by its shape."""
        if module in self.strays:
            return self.strays[module]
        places = ((module, grid) for grid in _grids(shape))
        return next((self.shapes[place] for place in places if place in self.shapes), None)


def _predicate(name: str, has: str = "has") -> str:
    return f"{has} its scale in {quote(name)}, which qshard does not apply"


def _is_plain(scale: TensorName) -> bool:
    """Return whether a scale is called `NAME_scale`, which may also be a parameter of a model."""
    found = SCALE.fullmatch(scale.last)
    return bool(found and found["plain"]) and not WEIGHT_SCALE.fullmatch(scale.last)


@functools.lru_cache
def _grids(shape: Shape) -> tuple[Shape, ...]:
    """Return the possible shapes of a tensor's scales: per tensor, per row, per block."""
    if len(shape) < 2:
        return ((),)
    *lead, rows, columns = shape
    parts = [{1, *(-(-size // block) for block in BLOCKS)} for size in (rows, columns)]
    return (), *((*lead, *grid) for grid in itertools.product(parts[0] | {rows}, parts[1] - {columns}))


def find_unscaled(checkpoint: Checkpoint) -> tuple[str, str] | None:
    """Return the name of a tensor that is surely no plain numbers, and why as a predicate; None if there is none.

    Stricter than `doubts`, because a loader cannot leave a tensor out: of integers and numbers of high precision only a
    scale of their own counts, or a scale of the module of a `weight`.
    """
    by_name = Names(checkpoint)
    doubts = by_name.doubts()
    for name, entry in checkpoint.entries.items():
        parts = by_name.parts[name]
        if entry.dtype in (*FP8, *SMALL) and len(entry.shape) > 1:
            return name, "has no scale that qshard recognizes"
        if name in doubts and doubts[name].certain and (parts.stem in by_name.scales or parts.last == "weight"):
            return name, doubts[name].why
    return None
