"""Quantization error of a format: in a tensor, a matrix product, a model and a training step.

`stats` measures one format, `compare` several, and `report` shows them as a table and plots. The compiled kernels
compute the values, so the bits match every front end and `qshard.reference`. The front ends convert their arrays to
NumPy shards; this package imports neither framework. `report` needs the extra `qshard[notebooks]`, everything else only
NumPy.
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
