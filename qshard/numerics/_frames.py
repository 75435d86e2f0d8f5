"""What results have in common: rows as records, for pandas and for notebooks."""

from __future__ import annotations

import html
import math
from typing import Any

from qshard.numerics._progress import load


class Frame:
    """A result with rows."""

    def records(self) -> list[dict[str, Any]]:
        """A dict for each row, with the names of its columns."""
        raise NotImplementedError

    def to_pandas(self) -> Any:
        """The rows as a `pandas.DataFrame`.

        Raises:
          ImportError: pandas is not installed.
        """
        return load("pandas", f"{type(self).__name__}.to_pandas", "pandas").DataFrame(self.records())

    def _repr_html_(self) -> str:
        records = self.records()
        names = list(dict.fromkeys(name for record in records for name in record))
        head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(_shown(record.get(name, '')))}</td>" for name in names) + "</tr>"
            for record in records
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    return str(value)
