// Fused quantization of codes of a byte with E8M0 scales: blocks 1x32, 32x1 and 32x32 are fast.
//
// Reads x once; Hopper's conversions to FP8 need compute capability 8.9. Blocks of other sizes, or
// in buffers that are not aligned to vectors, are read more than once (quantize_block_any.cuh).
#include "kernels/cuda/quantize_block_launch.cuh"

namespace qshard::kernels {

#define QSHARD_QUANTIZE_E8M0(In, Code) QSHARD_QUANTIZE(In, Code, E8M0Scales)
QSHARD_FLOATS_BYTE_ELEMENTS(QSHARD_QUANTIZE_E8M0)

}  // namespace qshard::kernels
