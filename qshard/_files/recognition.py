"""Recognition of quantized weights in checkpoints of others, by the names, dtypes and shapes of their tensors.

| checkpoint | codes | scales |
| --- | --- | --- |
| DeepSeek | `NAME` FP8 | `NAME_scale_inv`, a block each; `MODULE.scale` E8M0 |
| compressed-tensors, ModelOpt, fbgemm | `NAME` FP8 | `NAME_scale`, of the tensor, of each row, or of each block |
| compressed-tensors, ModelOpt | `NAME` FP8 | `NAME_scale` E8M0, of 32 elements |
| compressed-tensors | `NAME_packed` U8 | `NAME_scale` E8M0, of 32; or E4M3, of 16, and `NAME_global_scale` |
| ModelOpt | `NAME` U8 | `NAME_scale` E8M0, of 32; or E4M3, of 16, and `NAME_scale_2` |
| gpt-oss | `NAME_blocks` U8 `[*lead, N, K / 32, 16]` | `NAME_scales` E8M0 `[*lead, N, K / 32]` |

A weight is recognized only if its scales have the dtype and the shape that its codes need, and no other tensor changes
its values, such as a zero point. The caller must not read other codes as numbers.

Sources: as in `engine_formats.py`; transformers 5.24, integrations/fbgemm_fp8.py, integrations/mxfp4.py
`convert_moe_packed_tensors` and integrations/finegrained_fp8.py `Fp8Dequantize`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from qshard._core.quantize_steps import Plane
from qshard._core.serialization import Description
from qshard._files.engine_formats import EngineTensor
from qshard.formats import (
    E4M3,
    E5M2,
    FP8_E4M3,
    FP8_E5M2,
    MXFP4,
    MXFP8_E4M3,
    MXFP8_E5M2,
    NVFP4,
    ElementFormat,
    Format,
    FP8_1x128,
    FP8_128x128,
    Usage,
)
from qshard.layout import Shape, plane

FP8 = {"F8_E4M3": E4M3, "F8_E5M2": E5M2}
BYTES = ("U8", "I8")  # dtypes of packed 4-bit codes
E8M0S = ("U8", "F8_E8M0")
FLOAT_SCALES: dict[str, Any] = {
    "F32": np.float32,
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,  # DeepSeek, for blocks of 128
}
BLOCK = (128, 128)  # of FP8, unless the configuration of the model says otherwise
VALUES = "bfloat16"  # dtype of the values; files of codes do not say it
# Tensors of the same module that do not change the values of a weight.
HARMLESS = (
    "bias",
    "input_scale",
    "input_scale_ub",
    "input_global_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
)
LONGEST = 10_000  # bytes of a name, so that hostile names cost no time


class TensorSpec(NamedTuple):
    """Safetensors dtype and shape of a tensor."""

    dtype: str
    shape: Shape

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class RecognizedWeight:
    """A quantized weight in a checkpoint of others.

    Attributes:
      name: name of the weight, as of its values.
      description: its format and shape, with a rowwise plane.
      tensors: its tensors, one for each array of the plane.
    """

    name: str
    description: Description
    tensors: tuple[EngineTensor, ...]

    def plane(self, arrays: Mapping[str, NDArray[np.uint8]]) -> Plane:
        """Return the rowwise plane from the bytes of the tensors by name. Codes and one-byte scales are uint8."""
        dtypes = {part.rpartition(".")[2]: dtype for part, (dtype, _) in self.description.arrays().items()}
        parts = {each.part: _widen(each, arrays[each.name], dtypes[each.part]) for each in self.tensors}
        return Plane(**{each.part: each.decode(parts[each.part]) for each in self.tensors})


def _widen(tensor: EngineTensor, raw: NDArray[np.uint8], dtype: str) -> NDArray[Any]:
    """Return the contents of a tensor from its bytes: float scales of any dtype as float32, which is exact."""
    if dtype == "float32":
        floats: NDArray[Any] = raw.view(FLOAT_SCALES[tensor.dtype])
        return floats.astype(np.float32).reshape(tensor.shape)
    return raw.reshape(tensor.shape)


def recognize(
    tensors: Mapping[str, TensorSpec], block: tuple[int, int] = BLOCK, outside: Iterable[str] = ()
) -> dict[str, RecognizedWeight]:
    """Find the quantized weights of a checkpoint.

    Args:
      tensors: all tensors of the checkpoint, by name.
      block: (rows, cols) that share a scale in FP8 weights with a grid of scales: `block_of_config`.
      outside: names of tensors of the same checkpoint in files that are not there.

    >>> codes = {"up.weight": TensorSpec("F8_E4M3", (256, 512))}
    >>> found = recognize(codes | {"up.weight_scale_inv": TensorSpec("F32", (2, 4))})
    >>> print(found["up.weight"].description.format, [each.name for each in found["up.weight"].tensors])
    FP8_128x128[pow2=False] ['up.weight', 'up.weight_scale_inv']
    >>> recognize(codes | {"up.weight_scale_inv": TensorSpec("F32", (3, 4))})
    {}
    """
    modules: dict[str, list[str]] = {}
    for name in itertools.chain(tensors, outside):
        modules.setdefault(_module(name), []).append(name)
    found: dict[str, RecognizedWeight] = {}
    for name, stored in tensors.items():
        if len(name) > LONGEST or not stored.elements or len(stored.shape) < 2:
            continue
        weight = next((each for each in _readings(name, stored, tensors, block)), None)
        if weight is None or (weight.name != name and weight.name in tensors):
            continue
        own = {each.name for each in weight.tensors}
        if not any(_may_change(other, weight.name) for other in modules[_module(name)] if other not in own):
            found[weight.name] = weight
    return found


def block_of_config(config: Mapping[str, Any] | None) -> tuple[int, int]:
    """Return the block of FP8 weights that a `config.json` gives; 128 x 128 if it gives none.

    >>> block_of_config({"quantization_config": {"weight_block_size": [64, 64]}})
    (64, 64)
    """
    found: set[tuple[int, int]] = set()
    for text in _values_of(config, ("weight_block_size", "block_structure")):
        given = [int(part) for part in text.split("x") if part.isdecimal()] if isinstance(text, str) else text
        if isinstance(given, list) and len(given) == 2 and all(type(size) is int and size > 0 for size in given):
            found.add((given[0], given[1]))
    return found.pop() if len(found) == 1 else BLOCK


def _values_of(config: Any, keys: tuple[str, ...]) -> Iterator[Any]:
    """Yield the values of keys at any depth."""
    pending = [config]
    while pending:
        each = pending.pop()
        if isinstance(each, Mapping):
            yield from (value for key, value in each.items() if key in keys)
            pending += each.values()
        elif isinstance(each, list):
            pending += each


def _module(name: str) -> str:
    return name[: max(name.rfind("."), name.rfind("/")) + 1]


def _may_change(other: str, name: str) -> bool:
    """Return whether a tensor of the same module may change the values of the weight `name`."""
    last, own = other[len(_module(other)) :], name[len(_module(name)) :]
    if last in HARMLESS:
        return False
    if own == "weight" and any(word in last for word in ("scale", "zero", "shift", "lora", "g_idx")):
        return True
    return last.startswith(f"{own}_") and last not in (f"{own}_bias", f"{own}_shape")


def _readings(
    name: str, stored: TensorSpec, tensors: Mapping[str, TensorSpec], block: tuple[int, int]
) -> Iterator[RecognizedWeight]:
    """Yield the possible readings of a tensor as the codes of a weight."""
    if stored.dtype in FP8:
        scales = [name + "_scale_inv", name + "_scale"]
        if name.endswith("weight") and name[: -len("weight")] == _module(name):
            scales.append(_module(name) + "scale")
        there = [scale for scale in scales if scale in tensors]
        if len(there) == 1 and (there[0] in scales[:2] or tensors[there[0]].dtype == "F8_E8M0"):
            yield from _fp8(name, stored, there[0], tensors[there[0]], block)
    elif stored.dtype in BYTES and name.endswith("_blocks"):
        stem = name.removesuffix("_blocks")
        scale = tensors.get(stem + "_scales")
        if scale is not None and scale.dtype in E8M0S and stored.shape == (*scale.shape, 16) and len(scale.shape) > 1:
            shape = (*scale.shape[:-1], scale.shape[-1] * 32)
            yield _weight(stem, MXFP4, shape, {"data": (name, stored), "scale_inv": (stem + "_scales", scale)})
    elif stored.dtype in BYTES:
        stem = name.removesuffix("_packed")
        second = stem + ("_scale_2" if stem == name else "_global_scale")
        yield from _pairs(stem, name, stored, stem + "_scale", second, tensors)


def _pairs(
    stem: str, name: str, stored: TensorSpec, first: str, second: str, tensors: Mapping[str, TensorSpec]
) -> Iterator[RecognizedWeight]:
    """Yield the reading of two codes a byte, with scales of 32 elements, or of 16 and a global scale."""
    scale, whole = tensors.get(first), tensors.get(second)
    if scale is None:
        return
    shape = (*stored.shape[:-1], 2 * stored.shape[-1])
    parts = {"data": (name, stored), "scale_inv": (first, scale)}
    if scale.dtype in E8M0S and whole is None and scale.shape == (*shape[:-1], shape[-1] // 32) and not shape[-1] % 32:
        yield _weight(stem, MXFP4, shape, parts)
    of_16 = (*shape[:-1], shape[-1] // 16)
    if scale.dtype != "F8_E4M3" or scale.shape != of_16 or shape[-1] % 16 or whole is None:
        return
    if whole.dtype in FLOAT_SCALES and whole.elements == 1:
        yield _weight(stem, NVFP4, shape, parts | {"global_scale_inv": (second, whole)})


def _fp8(
    name: str, stored: TensorSpec, first: str, scale: TensorSpec, block: tuple[int, int]
) -> Iterator[RecognizedWeight]:
    """Yield the reading of FP8 codes with scales of the tensor, of rows, of blocks, or of 32 elements."""
    shape, element = stored.shape, FP8[stored.dtype]
    parts = {"data": (name, stored), "scale_inv": (first, scale)}
    if scale.dtype in E8M0S and scale.shape == (*shape[:-1], shape[-1] // 32) and not shape[-1] % 32:
        yield _weight(name, MXFP8_E4M3 if element == E4M3 else MXFP8_E5M2, shape, parts)
    if scale.dtype not in FLOAT_SCALES:
        return
    grid = tuple(-(-size // part) for size, part in zip(shape[-2:], block, strict=True))
    if scale.shape in ((*shape[:-2], *grid), (*shape[:-2], grid[0], 1, grid[1], 1)):
        spans_two = math.prod(shape[:-2]) > 1 and shape[-2] % block[0]  # in the folded matrix of qshard
        if not spans_two:
            yield _weight(name, _of_blocks(FP8_128x128, element, block), shape, parts)
    elif scale.elements == 1:
        yield _weight(name, FP8_E4M3 if element == E4M3 else FP8_E5M2, shape, parts)
    elif scale.shape in (shape[:-1], (*shape[:-1], 1)):
        yield _weight(name, _of_blocks(FP8_1x128, element, (1, shape[-1])), shape, parts)


def _of_blocks(fmt: Format, element: ElementFormat, block: tuple[int, int]) -> Format:
    return fmt.with_options(element=element, block=block, pow2=False)


def _weight(name: str, fmt: Format, shape: Shape, parts: Mapping[str, tuple[str, TensorSpec]]) -> RecognizedWeight:
    where = plane(fmt, shape, Usage.ROWWISE, op="recognize", name=name)
    shapes = {"data": where.data_shape, "scale_inv": where.scale_shape, "global_scale_inv": where.global_scale_shape}
    tensors = tuple(
        EngineTensor(
            name=of,
            part=part,
            dtype=stored.dtype,
            shape=stored.shape,
            part_shape=shapes[part] or (),
            reciprocal=of.endswith("_global_scale"),
        )
        for part, (of, stored) in parts.items()
    )
    what = Description(format=fmt, shape=shape, dtype=VALUES, planes=(Usage.ROWWISE,))
    return RecognizedWeight(name, what, tensors)
