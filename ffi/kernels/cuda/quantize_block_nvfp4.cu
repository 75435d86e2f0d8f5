// Fused quantization with NVFP4's scales: blocks 1x16, 16x1 and 16x16 are fast.
//
// Reads x once; Hopper's conversions to FP8 need compute capability 8.9. Blocks of other sizes, or
// in buffers that are not aligned to vectors, are read more than once (quantize_block_any.cuh).
#include "kernels/cuda/quantize_block_launch.cuh"

namespace qshard::kernels {

#define QSHARD_QUANTIZE_NVFP4(In, Code) QSHARD_QUANTIZE(In, Code, Nvfp4Scales)
QSHARD_FLOATS_FP4(QSHARD_QUANTIZE_NVFP4)

}  // namespace qshard::kernels
