"""Checkpoints that are quantized already: which tensors are scales, and which are codes that need them.

A file of safetensors does not say so; names, dtypes and shapes do. These are the names that others write:

| checkpoint | codes | scales |
| --- | --- | --- |
| DeepSeek FP8 | `weight` F8_E4M3 | `weight_scale_inv` |
| FP8 of compressed-tensors, ModelOpt, fbgemm | `weight` F8_E4M3 | `weight_scale`, `input_scale`, `k_scale`, ... |
| NVFP4, MXFP4 and integers of compressed-tensors | `weight_packed` | `weight_scale`, `weight_global_scale` |
| NVFP4 of ModelOpt | `weight` U8 | `weight_scale` F8_E4M3, `weight_scale_2` |
| MXFP4 of gpt-oss | `NAME_blocks` U8 | `NAME_scales` U8 |
| GPTQ, AWQ, MLX | `qweight` I32, `weight` U32 | `scales`, beside `qzeros` or `biases` |
| bitsandbytes | `weight` U8 or I8 | `weight.absmax`, `SCB` |

A tensor of FP8 may also hold plain numbers. It passes for them only if nothing in the checkpoint speaks against it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from qshard.cli.checkpoint import FLOATS, Entry
from qshard.cli.errors import shown
from qshard.cli.sources import Checkpoint, quantization_of
from qshard.layout import Shape

SCALE = re.compile(
    r"(?:(?P<stem>.+?)_)?_?(?:(?P<plain>scales?)|(?:global_)?scales?(?:_(?:inv|ub|[0-9]+))*|scale_(?:weight|input)"
    r"|scaling_factor|(?:nested_)?absmax|amax|scb)",
    re.IGNORECASE | re.DOTALL,
)
WEIGHT_SCALE = re.compile(r"(?P<stem>.*weight)_scale.*", re.IGNORECASE | re.DOTALL)
PACKED = re.compile(r"(?P<stem>.+)_(?:blocks|packed|qdata)", re.DOTALL)
OFFSET = re.compile(r"_?(?:zeros?|zero_points?|qzeros|biases|shift)|.+_zero_points?")
BIAS = re.compile(r"b|.*bias", re.DOTALL)
"""All of the last part of a name, after `.` or `/`."""
LONGEST = 200
"""Characters of such a part. A longer one has no meaning, so that no name takes long to read."""
FP8 = tuple(name for name in FLOATS if name.startswith("F8_"))
SMALL = ("F4", "F6_E2M3", "F6_E3M2")
INTEGERS = ("U8", "I8", "I32", "U32")
"""Dtypes of codes that have no dtype of their own, and of several codes an element."""
CODES = (*FP8, *SMALL, *INTEGERS)
SCALES = (*(name for name in FLOATS if name not in FP8), "F8_E8M0", "U8")
"""Dtypes that a scale without the name of one may have."""
BLOCKS = (16, 32, 64, 128, 256)
"""Elements that share a scale."""


@dataclass(frozen=True)
class Doubt:
    """Why the numbers of a tensor are not those of its dtype.

    Attributes:
      why: for a sentence whose subject is the tensor.
      certain: False if it may well hold plain numbers.
    """

    why: str
    certain: bool = True


@dataclass
class Names:
    """The tensors of a checkpoint by their names.

    Attributes:
      scales: by the name of the tensor or module that they belong to.
      strays: by module, scales that belong to no tensor of that name.
      shapes: by module and shape, tensors that may be scales by their shape. One element counts as `()`.
    """

    scales: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    strays: dict[str, str] = field(default_factory=dict)
    shapes: dict[tuple[str, Shape], str] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Names:
        found, scaled = cls(), []
        known = {stem_of_packed(name) for name in checkpoint.entries}
        for name in [*checkpoint.entries, *checkpoint.outside]:
            owner = owner_of(name)
            entry = checkpoint.entries.get(name)
            if owner is not None:
                found.scales[owner].append(name)
                scaled.append((name, owner))
            elif entry is not None and entry.dtype in SCALES and entry.elements and not _match(BIAS, _last(name)):
                module, shape = module_of(name), entry.shape if entry.elements > 1 else ()
                found.shapes.setdefault((module, shape), name)
                if "scale" in _last(name).lower() or entry.dtype == "F8_E8M0":
                    found.strays.setdefault(module, name)
        for name, owner in scaled:
            if owner not in known:
                found.strays.setdefault(module_of(name), name)
        return found

    def scale(self, entry: Entry) -> str | None:
        """The scale of a tensor, by its name."""
        return next(iter(self.scales.get(stem_of_packed(entry.name), ())), None)

    def scale_of_module(self, entry: Entry) -> str | None:
        """The scale of the module that a tensor is the weight of, by its name."""
        return next(iter(self.scales.get(module_of(entry.name), ())), None)

    def stray(self, entry: Entry) -> str | None:
        """A tensor beside another one that may be its scale."""
        module = module_of(entry.name)
        grids = (grid for grid in _grids(entry.shape) if (module, grid) in self.shapes)
        return self.strays.get(module) or next((self.shapes[module, grid] for grid in grids), None)


def owner_of(name: str) -> str | None:
    """The tensor or the module that a scale is of; None if the name is not that of a scale.

    >>> owner_of("mlp.up.weight_scale_inv"), owner_of("mlp.up.scales"), owner_of("mlp.up.weight._scale")
    ('mlp.up.weight', 'mlp.up', 'mlp.up.weight')
    >>> owner_of("mlp.up.weight"), owner_of("upscale")
    (None, None)
    """
    last = _last(name)
    found = _match(WEIGHT_SCALE, last) or _match(SCALE, last)
    if found is None:
        return None
    return name[: len(name) - len(last)] + found["stem"] if found["stem"] else module_of(name)


def stem_of_packed(name: str) -> str:
    """What the scales of a tensor are named after: its name, or that without the `_blocks` of packed codes."""
    last = _last(name)
    found = _match(PACKED, last)
    return name[: len(name) - len(last)] + found["stem"] if found else name


def module_of(name: str) -> str:
    """The name without its last part."""
    return name[: -len(_last(name)) - 1] if len(_last(name)) < len(name) else ""


def reasons_by_name(checkpoint: Checkpoint) -> dict[str, str]:
    """By name, why tensors are never layers: scales, codes and zero points of a quantization that is there already."""
    found, scaled = {}, set()
    for name in [*checkpoint.entries, *checkpoint.outside]:
        if owner_of(name) is not None:
            found[name] = "a scale, by its name"
            scaled.add(module_of(name))
    for name in checkpoint.entries.keys() - found.keys():
        if _match(PACKED, _last(name)):
            found[name] = "codes, by its name"
        elif module_of(name) in scaled and _match(OFFSET, _last(name)):
            found[name] = "a zero point, by its name, beside scales"
    return found


def doubts(checkpoint: Checkpoint) -> dict[str, Doubt]:
    """By name, tensors that are codes, or may be, whose scales are not applied.

    Numbers of high precision beside a scale of a quantizer may be codes that were cast. Beside a plain `NAME_scale`,
    which may be a parameter, it is not certain.
    """
    names, never = Names.of(checkpoint), reasons_by_name(checkpoint)
    found, plain = {}, []
    for name, entry in checkpoint.entries.items():
        is_packed = stem_of_packed(name) != name
        if (name in never and not is_packed) or owner_of(name) is not None or not entry.elements:
            continue
        if entry.dtype in INTEGERS and len(entry.shape) < 2:  # Zero points, permutations, states.
            continue
        own, of_module = names.scale(entry), names.scale_of_module(entry)
        if own is not None and (entry.dtype in CODES or entry.dtype in FLOATS):
            has = "has" if entry.dtype in CODES else "may have"
            found[name] = Doubt(_scale_in(own, has), entry.dtype in CODES or not _is_plain(own))
        elif of_module is not None and entry.dtype in CODES:
            found[name] = Doubt(_scale_in(of_module))
        elif entry.dtype in (*FP8, *SMALL) and (stray := names.stray(entry)) is not None:
            found[name] = Doubt(_scale_in(stray, "may have"))
        elif entry.dtype in FP8:
            plain.append(name)
    if plain:
        others = (each for each, doubt in found.items() if doubt.certain)
        why = next((f"{shown(each)} has one" for each in others), None) or quantization_of(checkpoint)
        if why is not None:
            found |= dict.fromkeys(plain, Doubt(f"has no scale, but {why}"))
    return found


def _scale_in(name: str, has: str = "has") -> str:
    return f"{has} its scale in {shown(name)}, which qshard does not apply"


def _is_plain(scale: str) -> bool:
    found = _match(SCALE, _last(scale))
    return bool(found and found["plain"]) and not _match(WEIGHT_SCALE, _last(scale))


def _grids(shape: Shape) -> Iterator[Shape]:
    """Shapes of scales of a tensor: one, one a row, one a block."""
    yield ()
    if len(shape) < 2:
        return
    *lead, rows, columns = shape
    parts = [{1, *(-(-size // block) for block in BLOCKS)} for size in (rows, columns)]
    for row in sorted(parts[0] | {rows}):
        for column in sorted(parts[1] - {columns}):
            yield (*lead, row, column)


def _last(name: str) -> str:
    return name[max(name.rfind("."), name.rfind("/")) + 1 :]


def _match(pattern: re.Pattern[str], last: str) -> re.Match[str] | None:
    return pattern.fullmatch(last) if len(last) <= LONGEST else None
