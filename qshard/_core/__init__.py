"""Rules that both front ends share, without a framework: quantize steps, flat shards, losses, Adam, serialization.

Formats, layouts, recipes, the op table and GEMM dispatch are public and stand beside this package.
"""
