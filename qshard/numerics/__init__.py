"""What a format does to the numbers of a tensor: how much error, where, and why.

`stats` measures one format, `compare` several, `report` shows them as a table and plots. The bits are those of the
compiled kernels, and so of every front end and of `qshard.reference`. The report needs the extra `qshard[notebooks]`,
the rest NumPy alone.
"""

from qshard.numerics._analysis import (
    GemmError,
    Histogram,
    LayerSensitivity,
    Sensitivity,
    gemm_error,
    histogram,
    sensitivity,
)
from qshard.numerics._measures import Note, Stats, compare, stats
from qshard.numerics._reports import Report, report
from qshard.numerics._steps import LayerStats, Logged, StepStats, read_log, write_log

__all__ = [
    "GemmError",
    "Histogram",
    "LayerSensitivity",
    "LayerStats",
    "Logged",
    "Note",
    "Report",
    "Sensitivity",
    "Stats",
    "StepStats",
    "compare",
    "gemm_error",
    "histogram",
    "read_log",
    "report",
    "sensitivity",
    "stats",
    "write_log",
]
