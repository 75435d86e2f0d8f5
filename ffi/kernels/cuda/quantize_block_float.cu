// Fused quantization with FP32 scales: blocks 1x128, 128x1 and 128x128 are fast.
//
// Reads x once; Hopper's conversions to FP8 need compute capability 8.9. Blocks of other sizes, or
// in buffers that are not aligned to vectors, are read more than once (quantize_block_any.cuh).
#include "kernels/cuda/quantize_block_launch.cuh"

namespace qshard::kernels {

#define QSHARD_QUANTIZE_FLOAT(In, Code) QSHARD_QUANTIZE(In, Code, FloatScales)
QSHARD_FLOATS_FP8(QSHARD_QUANTIZE_FLOAT)

}  // namespace qshard::kernels
