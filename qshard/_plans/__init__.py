"""Plans of formats: which formats fit a tensor in a file, and which one each measured layer should have.

`qshard._cli` measures layers, and reads, writes and carries out plans. Nothing here imports it, or a framework.
"""
