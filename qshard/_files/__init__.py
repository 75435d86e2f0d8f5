"""Safetensors checkpoints, and the quantized weights that serving engines store in them: names, dtypes, recognition.

`recipe_records` encodes the recipes of a model for the metadata of training checkpoints.
`qshard._core.serialization` has the form of qshard's own files. `qshard._cli` and the front ends write files.
Nothing here imports a framework.
"""
