"""Quantized weights in files of others: how serving engines store them, and how to recognize them.

`qshard._core.serialization` has the form of qshard's own files. `qshard._cli` and the front ends read and write files.
Nothing here imports a framework.
"""
