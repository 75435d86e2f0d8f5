"""Reference implementation of every format in NumPy: one fp32 rounding per operation, written for clarity, not speed.

It shares no code with the kernels and is the oracle of the tests. NUMERICS.md has the same formulas in words. NaN
results are the canonical quiet NaN (fp32 0x7FC00000), so results can be compared as bytes.
"""

from qshard.reference._elements import decode, encode, encode_stochastic, pack, unpack
from qshard.reference._gemm import gemm, gemm_grouped, gemm_grouped_k, group_slices
from qshard.reference._hadamard import hadamard_transform
from qshard.reference._philox import philox4x32, random_bytes
from qshard.reference._rows import expert_of_rows, gather_rows, group_rows
from qshard.reference._scales import (
    Amax,
    Scales,
    amax,
    amax_or_nan,
    block_amax,
    delayed_scale,
    delayed_scale_update,
    e8m0_from_amax,
    nvfp4_global_scale,
    scale_from_amax,
    scales_from_amax,
)
from qshard.reference._slices import cast_slice, slice_amax
from qshard.reference._swizzle import swizzle_scale
from qshard.reference._tensor import Plane, Quantized, quantize, tensor_of_plane

__all__ = [
    "Amax",
    "Plane",
    "Quantized",
    "Scales",
    "amax",
    "block_amax",
    "cast_slice",
    "decode",
    "delayed_scale",
    "delayed_scale_update",
    "e8m0_from_amax",
    "encode",
    "encode_stochastic",
    "expert_of_rows",
    "gather_rows",
    "gemm",
    "gemm_grouped",
    "gemm_grouped_k",
    "group_rows",
    "group_slices",
    "hadamard_transform",
    "nvfp4_global_scale",
    "pack",
    "philox4x32",
    "quantize",
    "random_bytes",
    "scale_from_amax",
    "scales_from_amax",
    "amax_or_nan",
    "slice_amax",
    "swizzle_scale",
    "unpack",
    "tensor_of_plane",
]
