"""Framework-independent rules that both front ends share: quantize steps, flat shards, losses, Adam, serialization.

Formats, layouts, recipes, the op table and GEMM dispatch are public modules beside this package.
"""
