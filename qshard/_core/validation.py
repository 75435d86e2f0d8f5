"""Formats by their names, and what errors say of arguments.

Every function that takes a format takes its name too. It calls `as_format` first, and nobody else looks at the type:
`as_recipe` in `qshard.recipes` is the same for recipes.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Collection, Iterable
from typing import Any

from qshard.formats import ELEMENTS, FLOATS, FORMATS, Format, Usage

FormatLike = Format | str
"""A format, or what `str` prints of it."""


def as_format(value: Any, op: str, name: str = "fmt") -> Format:
    """The format that a caller of `op` gave as its argument `name`, as itself or by name.

    Args:
      value: a `Format`, or what `str` prints of one: a name in `FORMATS`, then maybe options in brackets.

    Raises:
      TypeError: it is something else, such as a recipe.
      ValueError: there is no format of that name, or none with these options.

    >>> print(as_format("MXFP8_E4M3", "quantize"), as_format("NVFP4[global_scale=row, nonfinite=nan]", "quantize"))
    MXFP8_E4M3 NVFP4[global_scale=row, nonfinite=nan]
    >>> as_format("mxfp8_e4m3", "quantize")
    Traceback (most recent call last):
    ValueError: quantize: fmt ('mxfp8_e4m3') is not a format name; did you mean 'MXFP8_E4M3'?
    """
    if isinstance(value, Format):
        return value
    if isinstance(value, str):
        return FORMATS[value] if value in FORMATS else _parse_format(value, op, name)
    if isinstance(getattr(value, "weight", None), Format):  # This module cannot know recipes.
        recipe = (value if isinstance(value, type) else type(value)).__name__
        of_that_name = f"qshard.formats.{recipe}, or " if recipe in FORMATS else ""
        raise TypeError(
            f"{op}: {name} (the recipe {recipe}) is not a format; pass {of_that_name}a format of the recipe, such as "
            f"its weight format, {value.weight}"
        )
    what = f"{op}: {name} ({quote(value)})"
    if by_element := _of_element(getattr(value, "name", getattr(value, "__name__", str(value)))):
        raise TypeError(f"{what} is an element type, not a format; pass a format of that element: {by_element}")
    raise TypeError(f"{what} is not a format or a format name; pass one of qshard.formats, such as 'MXFP8_E4M3'")


def as_formats(values: Any, op: str, name: str = "formats") -> list[Format]:
    """Several of them; a single one is a list of one.

    >>> [str(fmt) for fmt in as_formats(["FP8_E4M3", "NVFP4"], "compare")]
    ['FP8_E4M3', 'NVFP4']
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        return [as_format(values, op, name)]
    return [as_format(value, op, f"{name}[{i}]") for i, value in enumerate(values)]


def as_usage(value: Any, op: str) -> Usage:
    """The planes that a caller of `op` asked for.

    >>> as_usage("rowwise", "quantize")
    Traceback (most recent call last):
    TypeError: quantize: usage ('rowwise') is not a Usage; pass Usage.ROWWISE, Usage.COLUMNWISE or Usage.BOTH
    """
    if isinstance(value, Usage) and value:
        return value
    raise TypeError(f"{op}: usage ({quote(value)}) is not a Usage; pass Usage.ROWWISE, Usage.COLUMNWISE or Usage.BOTH")


def as_plane(value: Any, op: str, there: Collection[Usage]) -> Usage:
    """The plane that a caller of `op` asked for, among those that are there."""
    if isinstance(value, Usage) and value in there:
        return value
    usage = as_usage(value, op)
    if usage is Usage.BOTH:
        raise ValueError(f"{op}: usage ({usage}) selects both planes; pass Usage.ROWWISE or Usage.COLUMNWISE")
    raise ValueError(
        f"{op}: usage ({usage}) is not a plane of this tensor; quantize with that usage, or with Usage.BOTH"
    )


def check_float(op: str, name: str, dtype: str) -> None:
    """Raises unless ops read this dtype as high precision.

    >>> check_float("quantize", "x", "int8")
    Traceback (most recent call last):
    TypeError: quantize: x (int8) is not float32, bfloat16 or float16; cast it first
    """
    if dtype not in FLOATS:
        raise TypeError(f"{op}: {name} ({dtype}) is not {join_names(FLOATS)}; cast it first")


def seed_missing(op: str, what: object) -> str:
    """What the error says where there is no seed, and `what` needs one."""
    return f"{op}: {what} uses stochastic rounding and needs `seed`; pass a new seed on each call"


def already_quantized(op: str, name: str, x: Any) -> str:
    """The error text of a quantized tensor, with `format`, where numbers in high precision are wanted."""
    kind = type(x).__name__
    return f"{op}: {name} ({kind}, {x.format}) is already quantized; pass {name}.dequantize(), or use it as it is"


def no_second_derivative(op: str, instead: str) -> str:
    """The error text of a gradient that is differentiated and has no derivative."""
    return f"{op}: second derivatives (gradient penalty, Hessian) are not supported; {instead}"


def join_names(names: Iterable[str]) -> str:
    """`a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def quote(value: Any) -> str:
    """What an error says of a value: its `repr` if that is short, else its type; of an array, shape and dtype.

    >>> import numpy as np
    >>> quote("MXFP8"), quote(None), quote(np.ones((2, 3))), quote(list(range(100)))
    ("'MXFP8'", 'None', 'numpy.ndarray, float64 (2, 3)', 'of type list')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        kind = f"{type(value).__module__.partition('.')[0]}.{type(value).__name__}"
        if "Tracer" in kind or kind.endswith(".ArrayImpl"):
            kind = "jax.Array"
        return f"{kind}, {str(dtype).removeprefix('torch.')} {tuple(shape)}"
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"of type {type(value).__name__}"


MOST_NAMES = 8
"""The most names that an error lists."""


def closest(name: str, names: Iterable[str], of: str) -> str:
    """The names to write in place of an unknown one: those like it, else all, or some of many.

    Args:
      of: the list of all names, for the error.

    >>> closest("mxfp8", ["MXFP8", "NVFP4"], "names"), closest("int8", ["MXFP8", "NVFP4"], "names")
    ("did you mean 'MXFP8'?", 'choose MXFP8 or NVFP4')
    >>> closest("x", "abcdefghi", "the first letters")
    'choose a, b, c or another of the first letters'
    """
    known = {each.upper(): each for each in names}
    like = [each for upper, each in known.items() if name and upper.startswith(name.upper())]
    like = [known[name.upper()]] if name.upper() in known else like
    like = like or [known[found] for found in difflib.get_close_matches(name.upper(), known, n=3)]
    if like:
        return f"did you mean {join_names(map(repr, like[:MOST_NAMES]))}?"
    few = list(known.values())
    return f"choose {join_names(few if len(few) <= MOST_NAMES else [*few[:3], f'another of {of}'])}"


def _of_element(element: str) -> str:
    element = element.removeprefix("torch.")
    names = [name for name, fmt in FORMATS.items() if element in ELEMENTS and fmt.element.name == element]
    return ", ".join(names[:MOST_NAMES])


def _parse_format(text: str, op: str, name: str) -> Format:
    """The format of a text that is more than a name."""
    what = f"{op}: {name} ({quote(text)})"
    parts = re.fullmatch(r"(\w+)\[(.+)\]", text)
    if parts is None or parts[1] not in FORMATS:
        if by_element := _of_element(text):
            raise ValueError(f"{what} is an element type, not a format; pass a format of that element: {by_element}")
        instead = closest(parts[1] if parts else text, FORMATS, "qshard.formats.FORMATS")
        raise ValueError(f"{what} is not a format name; {instead}")
    options: dict[str, Any] = {}
    for item in re.split(r", (?![^(]*\))", parts[2]):
        option, _, written = item.partition("=")
        try:
            value = ast.literal_eval(written)
        except (ValueError, SyntaxError):
            value = written  # As `str` prints it, without quotes.
        options[option] = value
    return FORMATS[parts[1]].with_options(**options)
