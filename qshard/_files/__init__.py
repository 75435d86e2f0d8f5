"""Safetensors checkpoints, and quantized weights in those of others: how engines store them, how to recognize them.

`qshard._core.serialization` has the form of qshard's own files. `qshard._cli` and the front ends write files.
Nothing here imports a framework.
"""
