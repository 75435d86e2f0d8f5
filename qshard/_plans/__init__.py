"""Plans of formats: which formats fit a tensor in a file, which one each layer should have, and the files that say so.

`qshard._cli` measures layers and carries plans out. Nothing here imports a framework.
"""
