"""Safetensors checkpoints, and the quantized weights that serving engines store in them: names, dtypes, recognition.

`qshard._core.serialization` has the form of qshard's own files. `qshard._cli` and the front ends write files.
Nothing here imports a framework.
"""
