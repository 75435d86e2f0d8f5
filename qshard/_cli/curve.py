"""The trade-off as a picture: SVG that stands in a page of HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence

from qshard._cli.choose import Point
from qshard._cli.findings import HARM, Findings

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 28, 52
TICKS = 6
"""On an axis, about."""
LINE = 15
"""Between two lines of text."""
LETTER = 7.0
"""The width of a letter, about."""
DROP = 4
"""From the middle of a line of text down to where its letters stand."""
DOT = 4
STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)


def svg(findings: Findings) -> str:
    """Bytes an element to the right, dB of noise for signal upwards: the curve, one format for all layers as dots, the
    recommendation as a ring. What has no noise has no place on it."""
    curve = [point for point in findings.tradeoff.curve if point.harm]
    uniform = {name: point for name, point in findings.tradeoff.uniform.items() if point.harm}
    chosen = findings.recommendation.point if findings.recommendation else None
    every = [*curve, *uniform.values()]
    if not every:
        return "<p>No choice has any noise, so there is no curve.</p>"
    return "\n".join(_drawn(every, curve, uniform, chosen if chosen and chosen.harm else None))


def _drawn(
    every: Sequence[Point], curve: Sequence[Point], uniform: dict[str, Point], chosen: Point | None
) -> Iterator[str]:
    across = ticks([point.bytes_per_element for point in every])
    up = ticks([_level(point) for point in every])

    def at(point: Point) -> tuple[float, float]:
        x = (point.bytes_per_element - across[0]) / (across[-1] - across[0])
        y = (_level(point) - up[0]) / (up[-1] - up[0])
        return LEFT + x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM)

    yield f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="bytes an element against noise">'
    for value in across:
        x, _ = at(Point(value, 1.0))
        yield f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{HEIGHT - BOTTOM}"/>'
        yield f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + LINE + 3}" text-anchor="middle">{value:g}</text>'
    for value in up:
        _, y = at(Point(across[0], 10 ** (value / 10)))
        yield f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'
        yield f'<text x="{LEFT - 8}" y="{y + DROP:.1f}" text-anchor="end">{value:g}</text>'
    yield f'<text x="{WIDTH / 2}" y="{HEIGHT - 10}" text-anchor="middle">bytes an element</text>'
    yield f'<text x="{LEFT}" y="{TOP - 12}">dB of {html.escape(HARM)}</text>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(at, curve))
    yield f'<polyline class="curve" points="{path}"/>'
    # Dots are in the way of names, too.
    taken = [(x - DOT, x + DOT, y + DROP) for x, y in map(at, uniform.values())]
    words = []
    for name, point in sorted(uniform.items(), key=lambda each: at(each[1])[1]):
        x, y = at(point)
        lead, text = _label(name, x, y, taken)
        yield lead
        what = f"{html.escape(name)}: {point.bytes_per_element:.3f} bytes, {_level(point):.1f} dB"
        words += [f'<circle class="uniform" cx="{x:.1f}" cy="{y:.1f}" r="{DOT}"><title>{what}</title></circle>', text]
    yield from words  # Over all that leads to them.
    if chosen is not None:
        x, y = at(chosen)
        yield f'<circle class="chosen" cx="{x:.1f}" cy="{y:.1f}" r="8"><title>the recommendation</title></circle>'
    yield "</svg>"


def _label(name: str, x: float, y: float, taken: list[tuple[float, float, float]]) -> tuple[str, str]:
    """A line where it is far, and a name beside its dot, on the side that has room, as near as others leave it."""
    width = LETTER * len(name)
    right = x + 2 * DOT + width < WIDTH - RIGHT
    edge = x + 2 * DOT if right else x - 2 * DOT
    start = edge if right else edge - width
    beside = y + DROP
    near = [other for begin, end, other in taken if start < end and begin < start + width]
    free = [row for row in _rows(beside) if all(abs(row - other) >= LINE for other in near)]
    row = min(free, key=lambda row: abs(row - beside), default=beside)
    taken.append((start, start + width, row))
    line = f'<line class="lead" x1="{x:.1f}" y1="{y:.1f}" x2="{edge:.1f}" y2="{row - DROP:.1f}"/>'
    text = f'<text x="{edge:.1f}" y="{row:.1f}" text-anchor="{"start" if right else "end"}">{html.escape(name)}</text>'
    return line if row != beside else "", text


def _rows(row: float) -> list[float]:
    """Where a name may stand: at that height, and every unit up and down from it that lies in the picture."""
    return [row + i for i in range(-HEIGHT, HEIGHT) if TOP + LINE <= row + i <= HEIGHT - BOTTOM - DROP or not i]


def _level(point: Point) -> float:
    return 10 * math.log10(point.harm)


def ticks(values: Sequence[float]) -> list[float]:
    """Round numbers around some values, two at least.

    >>> ticks([0.53, 2.0]), ticks([3.0])
    ([0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0], [3.0, 4.0])
    """
    low, high = min(values), max(values)
    rough = (high - low) / TICKS or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(each for each in STEPS if each * power >= rough * (1 - 1e-9)) * power
    first = math.floor(low / step + 1e-9)
    last = max(math.ceil(high / step - 1e-9), first + 1)
    return [round(i * step, 12) for i in range(first, last + 1)]
