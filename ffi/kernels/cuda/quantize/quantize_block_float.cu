// Fused quantization with fp32 scales. Blocks of 1x128, 128x1 and 128x128 are fast.
#include "kernels/cuda/quantize/quantize_block.cuh"

namespace qshard::kernels {

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_WITH, FloatScales, QSHARD_INSTANTIATE_FOR, Cuda,
                      QuantizeBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_WITH, FloatScales, QSHARD_INSTANTIATE_FOR, Cuda,
                      QuantizeBlockBoth)

}  // namespace qshard::kernels
