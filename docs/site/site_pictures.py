"""SVG pictures of formats, computed from `qshard.formats`, `qshard.layout` and `qshard.reference`.

The comment `<!-- picture: NAME ARGUMENTS -->` in a page is replaced by the picture of the function NAME.
"""

from __future__ import annotations

import itertools
import math
import re
from html import escape

import numpy as np

from qshard import reference
from qshard.formats import E8M0, ELEMENTS, FORMATS, ElementFormat, Format, Usage
from qshard.layout import PlaneLayout, plane

_PLACE = re.compile(r"^<!-- picture: (\w+) ?(.*?) -->$", re.MULTILINE)

BIT = 26
"""Side of a bit, in pixels."""
BYTE = 8
MATRIX = 132
"""Longer side of a matrix, in pixels."""
CELL = 14
"""Side of a scale, in pixels."""
SHOWN = 8
"""Blocks of an axis that are drawn. Of more blocks, those in the middle are left out."""
BLOCKS = (2, 3)
"""Rows and columns of a drawn matrix, in longer sides of a block. They differ, so that a transpose is visible."""
WIDTH = 720


def draw_pictures(markdown: str) -> str:
    """Replace the picture comments of a page by pictures.

    Raises:
      KeyError: a name is unknown.
    """
    return _PLACE.sub(lambda place: PICTURES[place[1]](*place[2].split()), markdown)


# --- SVG ---


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{kind}"/>'


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(words)}</text>'


def figure(name: str, caption: str, height: float, parts: list[str]) -> str:
    """Wrap SVG parts in one HTML block, without an empty line, which would end the block."""
    picture = f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(caption)}">{"".join(parts)}</svg>'
    return f'<figure class="picture" id="picture-{name}">{picture}<figcaption>{escape(caption)}</figcaption></figure>'


# --- elements ---


def numbers(element: ElementFormat) -> list[float]:
    """Return the positive finite numbers of an element, in order."""
    codes = np.arange(element.max_code + 1, dtype=np.uint8)
    return sorted(float(value) for value in reference.decode(codes, element) if 0 < value < math.inf)


def fields(element: ElementFormat) -> list[str]:
    """Return the field of each bit of a code, from the high bit down."""
    sign = ["sign"] * element.signed
    return [*sign, *["exponent"] * element.exponent_bits, *["mantissa"] * element.mantissa_bits]


def byte_of(element: ElementFormat) -> list[str]:
    """Return the field of each bit of a byte, from the high bit down. The code with the even index is low."""
    bits = fields(element) * element.codes_per_byte
    return ["unused"] * (BYTE - len(bits)) + bits


def power(value: float) -> str:
    mantissa, exponent = math.frexp(value)
    return f"2^{exponent - 1}" if mantissa == 0.5 and not 1 <= value <= 1024 else f"{value:g}"


def elements() -> str:
    """Draw the bits of a byte of each element, with the range of its numbers."""
    parts, y = [], 24
    for place, kind in enumerate(("sign", "exponent", "mantissa", "unused")):
        parts += [rect(190 + 120 * place, y - 14, 16, 16, kind), text(212 + 120 * place, y, kind)]
    y += 14
    for element in ELEMENTS.values():
        bits = byte_of(element)
        parts.append(text(0, y + 18, element.name, "name"))
        for place, kind in enumerate(bits):
            parts.append(rect(190 + BIT * place, y, BIT, BIT, kind))
            parts.append(text(190 + BIT * (place + 0.5), y + 18, kind[0] if kind != "unused" else "0", "middle"))
        every = numbers(element)
        notes = [f"{power(every[0])} to {power(every[-1])}", f"bias {element.bias}"]
        if element.codes_per_byte > 1:
            parts.append(line(190 + BIT * BYTE / 2, y - 3, 190 + BIT * BYTE / 2, y + BIT + 3, "cut"))
            parts.append(text(190, y + BIT + 13, "element 1", "small"))
            parts.append(text(190 + BIT * BYTE / 2 + 2, y + BIT + 13, "element 0", "small"))
        parts.append(text(190 + BIT * BYTE + 16, y + 18, ", ".join(notes)))
        y += BIT + (30 if element.codes_per_byte > 1 else 16)
    caption = "A byte of each element, the high bit first; its least and largest positive numbers"
    return figure("elements", caption, y, parts)


def values() -> str:
    """Draw the positive numbers of each element on a scale of powers of two."""
    shown = [element for element in ELEMENTS.values() if element is not E8M0]
    low = math.floor(min(math.log2(numbers(element)[0]) for element in shown))
    high = math.ceil(max(math.log2(numbers(element)[-1]) for element in shown))
    left, step = 130, (WIDTH - 150) / (high - low)
    parts, y = [], 14
    for element in shown:
        parts += [text(0, y + 14, element.name, "name"), line(left, y + 20, WIDTH - 20, y + 20, "thin")]
        for value in numbers(element):
            x = left + (math.log2(value) - low) * step
            parts.append(line(x, y, x, y + 20, "tick"))
        y += 34
    for exponent in range(low, high + 1, 4):
        parts.append(text(left + (exponent - low) * step, y + 8, f"2^{exponent}", "small middle"))
    return figure("values", "The positive numbers of each element, on a scale of powers of two", y + 16, parts)


# --- planes ---


def spans(count: int, length: float) -> list[tuple[float, float]]:
    """Return the begin and end of blocks along an axis: of all, or of many blocks the first ones and the last."""
    if count <= SHOWN:
        return [(length / count * i, length / count * (i + 1)) for i in range(count)]
    size = length / SHOWN
    return [*((size * i, size * (i + 1)) for i in range(SHOWN - 2)), (length - size, length)]


def grid(x: float, y: float, rows: list[tuple[float, float]], cols: list[tuple[float, float]], kind: str) -> list[str]:
    """Draw blocks as rectangles, the first one filled. Three dots stand for blocks that are left out."""
    parts = [rect(x, y, cols[-1][1], rows[-1][1], f"{kind} open")]
    for row, (top, bottom) in enumerate(rows):
        for col, (left, right) in enumerate(cols):
            parts.append(rect(x + left, y + top, right - left, bottom - top, kind if row + col else "first"))
    for before, after in itertools.pairwise(rows):
        if after[0] - before[1] > 1:
            parts.append(text(x + cols[-1][1] / 2, y + (before[1] + after[0]) / 2 + 4, "\u22ee", "middle"))
    for before, after in itertools.pairwise(cols):
        if after[0] - before[1] > 1:
            parts.append(text(x + (before[1] + after[0]) / 2, y + rows[-1][1] / 2 + 4, "\u22ef", "middle"))
    return parts


def shape_of(fmt: Format) -> tuple[int, int]:
    unit = max(fmt.block) if fmt.block else 32
    return BLOCKS[0] * unit, BLOCKS[1] * unit


def bytes_of(where: PlaneLayout, fmt: Format) -> int:
    wide = np.dtype(fmt.stored_scale_dtype).itemsize
    scales = math.prod(where.scale_shape) * wide
    above = (
        0 if where.global_scale_shape is None else math.prod(where.global_scale_shape) * np.dtype(np.float32).itemsize
    )
    return math.prod(where.data_shape) + scales + above


def panel(x: float, fmt: Format, where: PlaneLayout) -> list[str]:
    """Draw a plane: codes on the left and scales on the right, with the first block and its scale filled."""
    rows, cols = where.shape[::-1] if where.transposed else where.shape
    side = MATRIX / max(rows, cols)
    # One scale is drawn as a grid of one block.
    scales = where.scale_shape if where.scale_shape else (1, 1)
    assert len(scales) == 2
    title = str(where.usage.name).lower()
    if fmt.shares_codes and where.usage is Usage.COLUMNWISE:
        title += ", the same numbers"
    parts = [text(x, 14, title + (", stored as x.T" if where.transposed else ""), "name")]
    top, left, height, width = 42, x + 28, rows * side, cols * side
    parts += grid(left, top, spans(scales[0], height), spans(scales[1], width), "codes")
    down, across = ("K", "M") if where.transposed else ("M", "K")
    parts.append(text(left + width / 2, top - 8, f"{across} = {cols}", "small middle"))
    parts += [text(x, top + height / 2, down, "small"), text(x, top + height / 2 + 12, str(rows), "small")]
    beside = left + width + 22
    # If there are many scales, each is as high or as wide as its block; otherwise it is a small square.
    many = [height if scales[0] > SHOWN else scales[0] * CELL, width if scales[1] > SHOWN else scales[1] * CELL]
    parts += grid(beside, top, spans(scales[0], many[0]), spans(scales[1], many[1]), "scales")
    if where.global_scale_shape is not None:
        parts += [
            rect(beside, top + many[0] + 8, CELL, CELL, "first"),
            text(beside + CELL + 4, top + many[0] + 19, "global", "small"),
        ]
    below = top + MATRIX + 18
    packed = f", {fmt.element.codes_per_byte} codes a byte" if fmt.element.codes_per_byte > 1 else ""
    said = [
        f"data: {fmt.data_dtype} {list(where.data_shape)}{packed}",
        f"scale_inv: {fmt.scale_dtype} {list(where.scale_shape)}",
    ]
    if where.global_scale_shape is not None:
        said.append(f"global_scale_inv: float32 {list(where.global_scale_shape)}")
    said.append(
        f"{bytes_of(where, fmt)} bytes, {8 * bytes_of(where, fmt) / math.prod(where.shape):.4g} bits an element"
    )
    return parts + [text(x, below + 16 * i, words, "small") for i, words in enumerate(said)]


def planes(name: str) -> str:
    """Draw both planes of a format, with one block and its scale filled."""
    fmt = FORMATS[name]
    shape = shape_of(fmt)
    parts = []
    for place, usage in enumerate(Usage.BOTH.planes):
        parts += panel(WIDTH / 2 * place, fmt, plane(fmt, shape, usage))
    block = "all of it" if fmt.block is None else "each {}x{}".format(*fmt.block)
    caption = f"{name} of {list(shape)}: a scale for {block}. Filled: the first block, and its scale"
    return figure(f"planes-{name}", caption, 42 + MATRIX + 18 + 16 * 4, parts)


# --- shards ---


def cuts(name: str, rows: str, cols: str, ranks: str) -> str:
    """Draw a weight, its shards under FSDP2, and the blocks that shard boundaries split."""
    fmt, height, width, count = FORMATS[name], int(rows), int(cols), int(ranks)
    assert fmt.block is not None
    block_rows, block_cols = fmt.block
    share = math.ceil(height / count)
    side, left, top = 0.75, 90, 16
    starts = [min(rank * share, height) for rank in range(count + 1)]
    parts, shared = [], {start // block_rows for start in starts[1:-1] if start % block_rows and start < height}
    for rank, (start, stop) in enumerate(itertools.pairwise(starts)):
        parts.append(rect(left, top + start * side, width * side, (stop - start) * side, f"rank{rank % 2}"))
        held = f"rows {start} to {stop - 1}" if stop > start else "no rows"
        at = top + (start + stop) / 2 * side + 4 + (14 if stop == start else 0)
        parts.append(text(0, at, f"rank {rank}", "name"))
        parts.append(text(left + width * side + 20, at, f"{held}"))
    for index in range(math.ceil(height / block_rows)):
        begin, end = index * block_rows, min((index + 1) * block_rows, height)
        for column in range(math.ceil(width / block_cols)):
            across = min(block_cols, width - column * block_cols)
            kind = "shared" if index in shared else "block"
            x = left + column * block_cols * side
            parts.append(rect(x, top + begin * side, across * side, (end - begin) * side, kind))
    parts += [line(left - 8, top + s * side, left + width * side + 8, top + s * side, "cut") for s in starts[1:-1]]
    many = len(shared) * math.ceil(width / block_cols)
    of = f"{name} of [{rows}, {cols}] on {ranks} ranks"
    caption = f"{of}: {many} blocks (filled) have rows of several ranks, which share their amaxes"
    return figure(f"cuts-{name}", caption, top + height * side + 34, parts)


PICTURES = {"elements": elements, "values": values, "planes": planes, "cuts": cuts}
