"""Linear layers of experts: padded rows, their quantization, and grouped products.

Routers and whole layers of experts are not here.
"""
