"""Statistics to look at: a rich table and matplotlib plots, both imported only when they are drawn."""

from __future__ import annotations

import base64
import importlib
import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qshard.formats import Format, Usage
from qshard.numerics.measures import Stats, as_float, compare, fitting

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table


def report(
    x: Any,
    formats: Iterable[Format] | None = None,
    usage: Usage = Usage.ROWWISE,
    *,
    title: str | None = None,
    seed: int = 0,
) -> Report:
    """`compare`, to be looked at: `print` it, or leave it as the last line of a notebook cell.

    Args:
      x, formats, usage, seed: as for `compare`.
      title: by default, the shape and dtype of `x`.

    Returns:
      A report, which is a rich renderable and has a rich table and three plots in Jupyter.

    Raises:
      ImportError: rich is not installed.
      TypeError, ValueError: as for `stats`, for formats that were asked for.

    Sharded arrays: as for `stats`.

    >>> from qshard.formats import FP8_E4M3
    >>> print(report([[0.1, 0.2, 0.3]], [FP8_E4M3], title="three numbers").stats[0].format)
    FP8_E4M3
    """
    _import("rich", "report")
    array = as_float(x, "report")
    left_out: dict[str, str] = {}
    if formats is None:
        formats, left_out = fitting(array.shape, usage)
    shape = " x ".join(map(str, array.shape)) or "one number"
    return Report(
        title=f"{shape}, {getattr(x, 'dtype', array.dtype)}" if title is None else title,
        stats=tuple(compare(array, formats, usage, seed=seed)),
        left_out=left_out,
    )


@dataclass(frozen=True, kw_only=True, repr=False)
class Report:
    """What `report` returns.

    Attributes:
      title: above the table.
      stats: a row each.
      left_out: name of each format that cannot hold the tensor -> why.
    """

    title: str
    stats: tuple[Stats, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    def __rich__(self) -> Table:
        _import("rich", "report")
        from rich import box
        from rich.table import Table
        from rich.text import Text

        caption = Text("\n".join(f"left out: {reason}" for reason in self.left_out.values()), justify="left")
        table = Table(title=self.title, caption=caption, box=box.SIMPLE_HEAD)
        table.add_column("format")
        for heading in ("bits", "SQNR dB", "mean error", "max error", "zeros made", "saturated", "subnormal"):
            table.add_column(heading, justify="right")
        lossy = any(row.nonfinite_made for row in self.stats)
        if lossy:
            table.add_column("non-finite made", justify="right")
        table.add_column("exponents of scales")
        for row in self.stats:
            shares = [row.zeros_made, row.saturated, row.subnormal, *([row.nonfinite_made] if lossy else [])]
            table.add_row(
                Text(str(row.format)),
                f"{row.bits_per_element:.3f}",
                f"{row.sqnr_db:.1f}",
                f"{row.mean_relative_error:.2%}",
                f"{row.max_relative_error:.1%}",
                *(_percent(share) for share in shares),
                _range(row.scale_histogram),
            )
        return table

    def __repr__(self) -> str:
        """The table as text, as wide as it needs."""
        lines = self._printed(color_system=None).file.getvalue().splitlines()
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        page = '<pre style="white-space:pre;overflow-x:auto;line-height:normal">{code}</pre>'
        table = self._printed(record=True).export_html(inline_styles=True, code_format=page)
        png = io.BytesIO()
        self.figure().savefig(png, format="png", dpi=100)
        image = base64.b64encode(png.getvalue()).decode()
        return f'{table}<img alt="SQNR, errors and scales" src="data:image/png;base64,{image}">'

    def _printed(self, **options: Any) -> Any:
        # Jupyter is told apart so that rich prints into the file, not into the notebook.
        console = _import("rich.console", "report").Console(
            file=io.StringIO(), width=160, force_jupyter=False, **options
        )
        console.print(self)
        return console

    def figure(self) -> Figure:
        """Three plots: SQNR, relative error by size of element, histogram of scales.

        Raises:
          ImportError: matplotlib is not installed.
        """
        # Not pyplot, which would keep the figure alive and choose a backend for the whole process.
        figure: Figure = _import("matplotlib.figure", "report").Figure(figsize=(15, 4), layout="constrained")
        bars, errors, scales = figure.subplots(1, 3)
        colors = [f"C{i % 10}" for i in range(len(self.stats))]
        decibels, names = [row.sqnr_db for row in self.stats], [str(row.format) for row in self.stats]
        drawn = bars.barh(range(len(names)), [db if math.isfinite(db) else 0 for db in decibels], color=colors)
        bars.bar_label(drawn, [f" {db:.1f}" for db in decibels])
        bars.set_yticks(range(len(names)), names)
        bars.invert_yaxis()
        bars.margins(x=0.15)
        bars.set_axisbelow(True)
        bars.set(title="SQNR, dB")
        for row, color in zip(self.stats, colors, strict=True):
            style: dict[str, Any] = {"color": color, "marker": ".", "linewidth": 1, "label": str(row.format)}
            errors.plot(list(row.error_by_exponent), list(row.error_by_exponent.values()), **style)
            blocks = sum(row.scale_histogram.values())
            scales.plot(list(row.scale_histogram), [n / blocks for n in row.scale_histogram.values()], **style)
        for axes in (errors, scales):
            axes.xaxis.get_major_locator().set_params(integer=True)
        errors.set(title="mean relative error by size", xlabel="floor(log2 |x|)", yscale="log")
        scales.set(title="scales", xlabel="floor(log2 scale)", ylabel="share of blocks", ylim=(0, None))
        return figure


def _percent(share: float) -> str:
    return f"{share:.2%}" if share else "-"


def _range(histogram: Mapping[int, int]) -> str:
    if not histogram:
        return "-"
    low, high = min(histogram), max(histogram)
    return f"{low}" if low == high else f"{low} to {high}"


def _import(module: str, op: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        raise ImportError(f"{op}: {package} is not installed; pip install 'qshard[notebooks]'") from error
