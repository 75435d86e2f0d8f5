// Fused quantization with E8M0 scales: blocks 1x32, 32x1 and 32x32 are fast.
//
// Reads x once; Hopper's conversions to FP8 need compute capability 8.9. Blocks of other sizes, or
// in buffers that are not aligned to vectors, are read more than once (quantize_block_any.cuh).
#include "kernels/cuda/quantize_block_launch.cuh"

namespace qshard::kernels {

QSHARD_INSTANTIATE_QUANTIZE(float, E4M3, E8M0Scales)
QSHARD_INSTANTIATE_QUANTIZE(float, E5M2, E8M0Scales)
QSHARD_INSTANTIATE_QUANTIZE(bfloat16, E4M3, E8M0Scales)
QSHARD_INSTANTIATE_QUANTIZE(bfloat16, E5M2, E8M0Scales)
QSHARD_INSTANTIATE_QUANTIZE(float16, E4M3, E8M0Scales)
QSHARD_INSTANTIATE_QUANTIZE(float16, E5M2, E8M0Scales)

}  // namespace qshard::kernels
