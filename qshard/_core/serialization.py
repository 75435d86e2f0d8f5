"""The plain form of quantized tensors: arrays that any program reads, and a line of JSON that says what they are of.

    {"w": <a quantized tensor>, "b": <an array>}     in memory
    {"w.rowwise.data": ..., "w.rowwise.scale_inv": ..., "b": ...}  and  {"qshard": "..."}     plain

`to_plain` and `from_plain` of a front end go from one to the other. Both front ends write and read the same, and so can
any format of files that holds arrays by name and strings: safetensors, for one, with the strings as its metadata.

| array | dtype | what |
| --- | --- | --- |
| `NAME.rowwise.data` | uint8 | codes; those of 4 bits two a byte, the even one in the low nibble |
| `NAME.rowwise.scale_inv` | float32, or uint8 | scales: E8M0 and E4M3 as their bytes |
| `NAME.rowwise.global_scale_inv` | float32 | NVFP4's second factor; other formats have none |
| `NAME.columnwise...` | | likewise |

`qshard.layout` has the shapes; a value is `data * scale_inv * global_scale_inv`. Planes that a tensor lacks have no
arrays.

The line of JSON is `{"version": 1, "tensors": {NAME: {"format": ..., "shape": ..., "dtype": ..., "planes": ...}}}`,
with `Format.description` under "format". Reading it checks everything: no array is taken whose dtype or shape is not
what the format and the shape of the tensor ask for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from qshard._core.quantize_steps import Plane
from qshard._core.validation import quote
from qshard.formats import FLOATS, Format, Usage
from qshard.layout import Shape, plane

__all__ = ["KEY", "Description", "flat", "key_of", "parse_metadata", "plain", "restore", "text_of"]

KEY = "qshard"
"""Of the metadata."""
VERSION = 1
_TERMS = ("format", "shape", "dtype", "planes")

Array = Any
Planes = Mapping[Usage, Plane]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What the arrays of a quantized tensor are of.

    Attributes:
      format: how it is stored.
      shape, dtype: of the tensor that it stands for.
      planes: those that it has, one or both.

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
        """The dtype and the shape of each of its arrays, by its name without that of the tensor.

        Raises:
          ValueError: the format cannot hold the shape, as `layout.plane`.
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
        """Its planes, of arrays that are called after `name`.

        Raises:
          TypeError: one is not an array.
          ValueError: one is not there, or is not of the dtype and the shape that the description asks for.
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
        """It in terms of JSON."""
        planes = [_word(usage) for usage in self.planes]
        return {"format": self.format.description, "shape": list(self.shape), "dtype": self.dtype, "planes": planes}

    @classmethod
    def of(cls, terms: Any, *, op: str = "from_plain", name: str = "tensor") -> Description:
        """The inverse of `terms`.

        Raises:
          ValueError: they are not those of a tensor.
        """
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
    """The line of JSON for some tensors."""
    return json.dumps({"version": VERSION, "tensors": {name: each.terms for name, each in descriptions.items()}})


def parse_metadata(text: str, *, op: str = "from_plain") -> dict[str, Description]:
    """The inverse of `text_of`.

    Raises:
      ValueError: it is no such line, or that of a later version.

    >>> parse_metadata('{"version": 2, "tensors": {}}')
    Traceback (most recent call last):
    ValueError: from_plain: version (2) is not 1, which this version of qshard reads; read it with a newer one
    """
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


def flat(planes: Planes) -> dict[str, Array]:
    """The arrays of planes, by their names without that of the tensor."""
    return {
        f"{_word(usage)}.{part}": array
        for usage, parts in planes.items()
        for part, array in zip(Plane._fields, parts, strict=True)
        if array is not None
    }


def plain(
    values: Mapping[str, Any], parts_of: Callable[[str, Any], tuple[Description, Planes] | None]
) -> tuple[dict[str, Array], dict[str, str]]:
    """The plain form of some values: `to_plain` of a front end.

    Args:
      values: by name.
      parts_of: of a name and a value: its description, and its planes as bytes; None if it is plain already.
    """
    arrays: dict[str, Array] = {}
    descriptions: dict[str, Description] = {}
    for name, value in values.items():
        found = parts_of(name, value)
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


def restore(
    arrays: Mapping[str, Array],
    metadata: Mapping[str, str] | None,
    made_of: Callable[[str, Description, dict[Usage, Plane]], Any],
) -> dict[str, Any]:
    """The inverse of `plain`: `from_plain` of a front end.

    Args:
      arrays, metadata: as `plain` gave them. Other metadata is ignored; arrays that it does not describe stay.
      made_of: of a name, a description and planes as bytes: the quantized tensor.

    Raises:
      TypeError: `arrays` or `metadata` is not a mapping, or a described array is not an array.
    """
    for name, given in (("arrays", arrays), ("metadata", {} if metadata is None else metadata)):
        if not isinstance(given, Mapping):
            raise TypeError(f"from_plain: {name} ({quote(given)}) is not a dict; pass the output of to_plain unchanged")
    descriptions = parse_metadata(metadata[KEY]) if metadata and KEY in metadata else {}
    rest = dict(arrays)
    made = {}
    for name, each in descriptions.items():
        made[name] = made_of(name, each, each.take(arrays, name))
        for key in each.arrays():
            del rest[key_of(name, key)]
    return rest | made


def _word(usage: Usage) -> str:
    return str(usage.name).lower()


def key_of(name: str, part: str) -> str:
    """The name of an array: of its tensor, and of what it is of that."""
    return f"{name}.{part}" if name else part


def _dtype_of(array: Array) -> str:
    return str(array.dtype).removeprefix("torch.")
