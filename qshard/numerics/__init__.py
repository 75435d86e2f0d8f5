"""The error that a format makes: in a tensor, a product, a model and a training step.

`stats` measures one format, `compare` several, `report` shows them as a table and plots. The bits are those of the
compiled kernels, and so of every front end and of `qshard.reference`. No framework lives here: a front end turns its
arrays into shards in NumPy. The report needs the extra `qshard[notebooks]`, the rest NumPy alone.
"""

from qshard.numerics._gemm_error import GemmError, gemm_error
from qshard.numerics._histogram import Histogram, histogram
from qshard.numerics._report import Report, report
from qshard.numerics._sensitivity import LayerSensitivity, Sensitivity, sensitivity
from qshard.numerics._statistics import Note, Stats, compare, stats
from qshard.numerics._training_steps import LayerStats, Log, StepStats, read_log, write_log

__all__ = [
    "GemmError",
    "Histogram",
    "LayerSensitivity",
    "LayerStats",
    "Log",
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
