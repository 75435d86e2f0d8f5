"""Validation of arguments, formats passed by name, and texts of errors that both front ends share.

Every function that takes a format also takes its name, and converts it with `as_format` before anything else.
`as_recipe` in `qshard.recipes` does the same for recipes.
"""

from __future__ import annotations

import ast
import difflib
import operator
import re
from collections.abc import Collection, Iterable
from typing import Any, Literal, SupportsIndex

from qshard.formats import ELEMENTS, FLOATS, FORMATS, MXFP8_E4M3, MXFP8_E5M2, Format, Usage

FormatLike = Format | str  # a format, or its string as `str` prints it

WeightLayout = Literal["NK", "KN"]
"""The axis order of a weight. "NK": `[N, K]`, as in `nn.Linear` and equinox; "KN": `[K, N]`, as in flax."""


def as_format(value: Any, op: str, name: str = "fmt") -> Format:
    """Return the format that a caller of `op` passed as its argument `name`.

    `value` is a `Format` or its string: a key of `FORMATS`, optionally followed by options in brackets.

    Raises:
      TypeError: `value` is something else, such as a recipe.
      ValueError: the name is unknown, or the format does not have these options.

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
    if isinstance(getattr(value, "weight", None), Format):  # qshard.recipes imports this module
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


def as_formats(values: Any, op: str) -> list[Format]:
    """Return a list of formats; a single format becomes a list of one.

    >>> [str(fmt) for fmt in as_formats(["FP8_E4M3", "NVFP4"], "compare")]
    ['FP8_E4M3', 'NVFP4']
    """
    if isinstance(values, str) or not isinstance(values, Iterable):
        return [as_format(values, op, "formats")]
    return [as_format(value, op, f"formats[{i}]") for i, value in enumerate(values)]


def as_wire_format(value: Any, op: str, name: str) -> Format:
    """Return the format of gradients on the wire that a caller of `op` passed as its argument `name`.

    These formats need no communication of scales, have blocks of consecutive elements, and keep infinities and NaN.

    >>> as_wire_format("NVFP4", "linear", "grad_dtype")
    Traceback (most recent call last):
    ValueError: linear: grad_dtype (NVFP4) is not a format of gradients; pass MXFP8_E4M3, MXFP8_E5M2 or a float dtype
    """
    fmt = as_format(value, op, name)
    if fmt not in (MXFP8_E4M3, MXFP8_E5M2):
        raise ValueError(
            f"{op}: {name} ({fmt}) is not a format of gradients; pass {MXFP8_E4M3}, {MXFP8_E5M2} or a float dtype"
        )
    return fmt


def as_usage(value: Any, op: str) -> Usage:
    """Return the planes that a caller of `op` requested."""
    if isinstance(value, Usage) and value:
        return value
    raise TypeError(f"{op}: usage ({quote(value)}) is not a Usage; pass Usage.ROWWISE, Usage.COLUMNWISE or Usage.BOTH")


def as_plane(value: Any, op: str, there: Collection[Usage]) -> Usage:
    """Return the plane that a caller of `op` requested, if it is among the planes of `there`."""
    if isinstance(value, Usage) and value in there:
        return value
    usage = as_usage(value, op)
    if usage is Usage.BOTH:
        raise ValueError(f"{op}: usage ({usage}) selects both planes; pass Usage.ROWWISE or Usage.COLUMNWISE")
    raise ValueError(
        f"{op}: usage ({usage}) is not a plane of this tensor; quantize with that usage, or with Usage.BOTH"
    )


def as_layout(op: str, value: Any, name: str = "w") -> WeightLayout:
    """Return the layout of the weight `name` that a caller of `op` passed."""
    if value not in ("NK", "KN"):
        raise ValueError(
            f"{op}: weight_layout ({quote(value)}) is not a layout; pass 'NK' for {name} [N, K] or 'KN' for {name} "
            "[K, N]"
        )
    layout: WeightLayout = value
    return layout


def check_float(op: str, name: str, dtype: str) -> None:
    """Raise TypeError unless ops accept this dtype as high precision."""
    if dtype not in FLOATS:
        raise TypeError(f"{op}: {name} ({dtype}) is not {join_names(FLOATS)}; cast it first")


def seed_missing(op: str, what: object) -> str:
    return f"{op}: {what} uses stochastic rounding and needs `seed`; pass a new seed on each call"


def already_quantized(op: str, name: str, x: Any) -> str:
    """Return the error text for a quantized tensor where a high-precision array is needed."""
    kind = type(x).__name__
    return f"{op}: {name} ({kind}, {x.format}) is already quantized; pass {name}.dequantize(), or use it as it is"


def no_second_derivative(op: str, instead: str) -> str:
    """Return the error text for differentiating a gradient that has no derivative."""
    return f"{op}: second derivatives (gradient penalty, Hessian) are not supported; {instead}"


def no_graph_of_gradients(op: str, version: str) -> str:
    """Return the error text for gradients with a graph, where DTensors of this version of PyTorch lose the graph."""
    return (
        f"{op}: second derivatives would be incomplete, because DTensors of torch {version} lose them; "
        "leave out create_graph=True, or install torch 2.13 or newer"
    )


def join_names(names: Iterable[str]) -> str:
    """Join names as `a, b or c`."""
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last


def quote(value: Any) -> str:
    """Describe a value for an error: a short `repr` as it is; else the type; for an array its dtype and shape.

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


MOST_NAMES = 8  # maximum number of names in an error


def closest(name: str, names: Iterable[str], of: str) -> str:
    """Suggest replacements for an unknown name: similar names, else all names, or a few of many. `of` describes all.

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
            value = written  # an unquoted string, as `str` prints it
        options[option] = value
    return FORMATS[parts[1]].with_options(**options)


def uint32_pair(what: str, number: SupportsIndex) -> tuple[int, int]:
    """Split a uint64 into two uint32, low first, as ops take starts and seeds. `what` names the number in errors.

    >>> uint32_pair("quantize: seed", 2**32 + 5)
    (5, 1)
    """
    try:
        number = operator.index(number)
    except TypeError:
        raise TypeError(f"{what} ({quote(number)}) is not an integer; pass one in [0, 2**64)") from None
    if not 0 <= number < 2**64:
        raise ValueError(f"{what} ({number}) is not in [0, 2**64); pass an integer in that range")
    return number & 0xFFFFFFFF, number >> 32
