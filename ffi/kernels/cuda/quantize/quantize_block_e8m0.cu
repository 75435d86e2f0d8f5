// Fused quantization to one-byte codes with E8M0 scales. Blocks of 1x32, 32x1 and 32x32 are fast.
#include "kernels/cuda/quantize/quantize_block.cuh"

namespace qshard::kernels {

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_BYTE_ELEMENT, QSHARD_WITH, E8M0Scales, QSHARD_INSTANTIATE_FOR,
                      Cuda, QuantizeBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_BYTE_ELEMENT, QSHARD_WITH, E8M0Scales, QSHARD_INSTANTIATE_FOR,
                      Cuda, QuantizeBlockBoth)

}  // namespace qshard::kernels
