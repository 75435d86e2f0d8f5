"""Serialization of quantized tensors as plain arrays and a JSON string, shared by both front ends.

    {"w": <a quantized tensor>, "b": <an array>}     in memory
    {"w.rowwise.data": ..., "w.rowwise.scale_inv": ..., "b": ...}  and  {"qshard": "..."}     plain

`to_plain` and `from_plain` of a front end convert between the two. Both front ends read and write the same form. Any
file format that stores named arrays and strings can hold it, such as safetensors with the string in its metadata.

| array | dtype | contents |
| --- | --- | --- |
| `NAME.rowwise.data` | uint8 | codes; 4-bit codes packed two to a byte, the even one in the low nibble |
| `NAME.rowwise.scale_inv` | float32, or uint8 | scales: E8M0 and E4M3 as their bytes |
| `NAME.rowwise.global_scale_inv` | float32 | global scales of NVFP4; absent for other formats |
| `NAME.columnwise...` | | likewise |

`qshard.layout` has the shapes; a value is `data * scale_inv * global_scale_inv`. Planes that a tensor lacks have no
arrays.

The JSON string is `{"version": 1, "tensors": {NAME: {"format": ..., "shape": ..., "dtype": ..., "planes": ...}}}`, with
`Format.description` under "format". Reading validates everything: the dtype and shape of each array must follow from
the format and the shape of its tensor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import FLOATS, Format, Usage
from qshard.layout import Shape, plane

KEY = "qshard"  # key of the JSON string in the metadata
VERSION = 1
_TERMS = ("format", "shape", "dtype", "planes")

Array = Any
Planes = Mapping[Usage, Plane]


@dataclass(frozen=True, kw_only=True)
class Description:
    """Static description of a quantized tensor: its format, the shape and dtype of its values, and its planes.

    >>> from qshard.formats import NVFP4
    >>> of_w = Description(format=NVFP4, shape=(4, 32), dtype="bfloat16", planes=(Usage.ROWWISE,))
    >>> for name, what in of_w.arrays().items():
    ...     print(name, *what)
    rowwise.data uint8 (4, 16)
    rowwise.scale_inv uint8 (4, 2)
    rowwise.global_scale_inv float32 ()
    """

    format: Format
    shape: Shape
    dtype: str
    planes: tuple[Usage, ...]

    def arrays(self, *, op: str = "from_plain", name: str = "tensor") -> dict[str, tuple[str, Shape]]:
        """Return the dtype and shape of each array, by its name without the name of the tensor.

        Raises ValueError if the format does not support the shape.
        """
        return {f"{_word(usage)}.{part}": what for usage, part, what in self._parts(op, name)}

    def _parts(self, op: str, name: str) -> Iterator[tuple[Usage, str, tuple[str, Shape]]]:
        for usage in self.planes:
            where = plane(self.format, self.shape, usage, op=op, name=name)
            dtypes = ("uint8", self.format.stored_scale_dtype, "float32")
            shapes = (where.data_shape, where.scale_shape, where.global_scale_shape)
            for part, dtype, shape in zip(Plane._fields, dtypes, shapes, strict=True):
                if shape is not None:
                    yield usage, part, (dtype, shape)

    def take(self, arrays: Mapping[str, Array], name: str = "", *, op: str = "from_plain") -> dict[Usage, Plane]:
        """Look up the arrays of the tensor `name`, validate them, and return them as planes.

        Raises:
          TypeError: an entry is not an array.
          ValueError: an array is missing, or its dtype or shape does not match the description.
        """
        found: dict[Usage, dict[str, Array]] = {usage: {} for usage in self.planes}
        for usage, part, (dtype, shape) in self._parts(op, name or "tensor"):
            key = key_of(name, f"{_word(usage)}.{part}")
            array = arrays.get(key)
            if array is None:
                raise ValueError(
                    f"{op}: {key} is missing, but the metadata describes it; pass arrays and metadata of the same file"
                )
            if not (hasattr(array, "dtype") and hasattr(array, "shape")):
                raise TypeError(f"{op}: {key} ({quote(array)}) is not an array; pass the output of to_plain unchanged")
            given = (_dtype_of(array), tuple(array.shape))
            if given != (dtype, shape):
                raise ValueError(
                    f"{op}: {key} ({given[0]} {given[1]}) is not {dtype} {shape}, which {self.format} of shape "
                    f"{self.shape} has; pass arrays and metadata of the same file"
                )
            found[usage][part] = array
        return {usage: Plane(**parts) for usage, parts in found.items()}

    @property
    def terms(self) -> dict[str, Any]:
        """The description as JSON-serializable values. `Description.of` is the inverse."""
        planes = [_word(usage) for usage in self.planes]
        return {"format": self.format.description, "shape": list(self.shape), "dtype": self.dtype, "planes": planes}

    @classmethod
    def of(cls, terms: Any, *, op: str = "from_plain", name: str = "tensor") -> Description:
        """Parse `terms`, or raise ValueError."""
        if not isinstance(terms, dict) or set(terms) != set(_TERMS):
            given = ", ".join(map(str, terms)) if isinstance(terms, dict) else type(terms).__name__
            raise ValueError(
                f"{op}: description of {name} ({given}) does not have exactly the keys {', '.join(_TERMS)}; the "
                "description is damaged"
            )
        shape, dtype, planes = terms["shape"], terms["dtype"], terms["planes"]
        words = [_word(usage) for usage in Usage.BOTH.planes]
        for term, legal, need in (
            ("shape", isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape), "a list of sizes"),
            ("dtype", dtype in FLOATS, " or ".join(FLOATS)),
            ("planes", planes in (words, words[:1], words[1:]), f"{words}, or one of them"),
        ):
            if not legal:
                raise ValueError(f"{op}: {term} of {name} ({terms[term]!r}) is not {need}; the description is damaged")
        try:
            fmt = Format.of(terms["format"])
        except ValueError as error:
            raise ValueError(f"{op}: format of {name} is unknown to this version of qshard: {error}") from None
        usages = tuple(usage for usage in Usage.BOTH.planes if _word(usage) in planes)
        return cls(format=fmt, shape=tuple(shape), dtype=dtype, planes=usages)


def text_of(descriptions: Mapping[str, Description]) -> str:
    """Encode the descriptions of tensors as a JSON string."""
    return json.dumps({"version": VERSION, "tensors": {name: each.terms for name, each in descriptions.items()}})


def parse_metadata(text: str, *, op: str = "from_plain") -> dict[str, Description]:
    """Parse the JSON string of `text_of`. Raises ValueError if it is not such a string, or a later version wrote it."""
    try:
        read = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        read = None
    if not isinstance(read, dict) or "version" not in read:
        raise ValueError(f"{op}: description ({str(text)[:40]!r}) is not the metadata of to_plain; pass it unchanged")
    if read["version"] != VERSION:
        raise ValueError(
            f"{op}: version ({read['version']!r}) is not {VERSION}, which this version of qshard reads; read it with a "
            "newer one"
        )
    tensors = read.get("tensors")
    if not isinstance(tensors, dict) or len(read) != 2:
        raise ValueError(f"{op}: description ({', '.join(read)}) is not a version and a dict of tensors; it is damaged")
    return {name: Description.of(terms, op=op, name=name or "tensor") for name, terms in tensors.items()}


def merge_texts(texts: Iterable[str], *, op: str = "from_plain") -> str:
    """Merge the JSON strings of files that are the shards of one checkpoint.

    Raises:
      ValueError: a string cannot be parsed, or two describe one tensor differently.
    """
    merged: dict[str, Description] = {}
    for text in texts:
        for name, each in parse_metadata(text, op=op).items():
            if merged.setdefault(name, each) != each:
                raise ValueError(f"{op}: two shards describe {quote(name)} differently; save them again")
    return text_of(merged)


def flat(planes: Planes) -> dict[str, Array]:
    """Flatten planes to arrays, by their names without the name of the tensor."""
    return {
        f"{_word(usage)}.{part}": array
        for usage, parts in planes.items()
        for part, array in zip(Plane._fields, parts, strict=True)
        if array is not None
    }


def plain(
    values: Mapping[str, Any], parts_of: Callable[[str, Any], tuple[Description, Planes] | None]
) -> tuple[dict[str, Array], dict[str, str]]:
    """Implement `to_plain` of a front end: return the arrays by name, and the metadata.

    Args:
      values: quantized tensors and arrays by name.
      parts_of: returns for a name and a value its description and its planes as bytes, or None if the value is an
        array.

    Raises TypeError if `values` or one of them is not flat, and ValueError if two arrays would get the same name.
    """
    if not isinstance(values, Mapping):
        raise TypeError(f"to_plain: values ({quote(values)}) is not a dict; pass quantized arrays by name")
    arrays: dict[str, Array] = {}
    descriptions: dict[str, Description] = {}
    for name, value in values.items():
        found = parts_of(name, value)
        if found is None and any(parts_of(name, leaf) is not None for leaf in _leaves(value)):
            raise TypeError(
                f"to_plain: {name} (of type {type(value).__name__}) has quantized arrays in it; pass one flat "
                f"dict, with names such as {f'{name}.weight'!r}"
            )
        made = {name: value}
        if found is not None:
            descriptions[name], planes = found
            made = {key_of(name, key): array for key, array in flat(planes).items()}
        if twice := sorted(made.keys() & arrays.keys()):
            raise ValueError(
                f"to_plain: {name} would be stored as {twice[0]!r}, a name already in use; rename one of them"
            )
        arrays.update(made)
    return arrays, {KEY: text_of(descriptions)}


def _leaves(value: Any) -> Iterator[Any]:
    """Yield what dicts and sequences contain, at any depth; nothing for another value."""
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield each
        yield from _leaves(each)


def restore(
    arrays: Mapping[str, Array],
    metadata: Mapping[str, str] | None,
    build: Callable[[str, Description, dict[Usage, Plane]], Any],
) -> dict[str, Any]:
    """Implement `from_plain` of a front end: return quantized tensors and arrays by name.

    Args:
      arrays: arrays that `plain` returned. Arrays without a description are returned unchanged.
      metadata: metadata that `plain` returned. Other keys are ignored.
      build: builds a quantized tensor from a name, a description and planes as bytes.

    Raises:
      TypeError: `arrays` or `metadata` is not a mapping, or an entry with a description is not an array.
      ValueError: metadata and arrays do not match.
    """
    for name, given in (("arrays", arrays), ("metadata", {} if metadata is None else metadata)):
        if not isinstance(given, Mapping):
            raise TypeError(f"from_plain: {name} ({quote(given)}) is not a dict; pass the output of to_plain unchanged")
    descriptions = parse_metadata(metadata[KEY]) if metadata and KEY in metadata else {}
    rest = dict(arrays)
    made = {}
    for name, each in descriptions.items():
        made[name] = build(name, each, each.take(arrays, name))
        for key in each.arrays():
            del rest[key_of(name, key)]
    return rest | made


def _word(usage: Usage) -> str:
    return str(usage.name).lower()


def key_of(name: str, part: str) -> str:
    """Return the name of an array: the name of its tensor, then the name of the part."""
    return f"{name}.{part}" if name else part


def _dtype_of(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")
