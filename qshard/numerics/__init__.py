"""What a format does to the numbers of a tensor: how much error, where, and why.

`stats` measures one format, `compare` several, `report` shows them as a table and plots. The bits are those of the
compiled kernels, and so of every front end and of `qshard.reference`. The report needs the extra `qshard[notebooks]`,
the rest NumPy alone.
"""

from qshard.numerics.measures import Note, Stats, compare, stats
from qshard.numerics.reports import Report, report
from qshard.numerics.steps import LayerStats, Logged, StepStats, read_log, write_log

__all__ = [
    "LayerStats",
    "Logged",
    "Note",
    "Report",
    "Stats",
    "StepStats",
    "compare",
    "read_log",
    "report",
    "stats",
    "write_log",
]
