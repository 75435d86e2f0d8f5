// Fused quantization to E2M1. MXFP4 has E8M0 scales, with fast blocks of 1x32, 32x1 and 32x32.
// NVFP4 has fast blocks of 1x16, 16x1 and 16x16.
#include "kernels/cuda/quantize/quantize_block.cuh"

namespace qshard::kernels {

#define QSHARD_INSTANTIATE_FP4(...)                           \
  QSHARD_INSTANTIATE_FOR(Cuda, __VA_ARGS__, E2M1, E8M0Scales) \
  QSHARD_INSTANTIATE_FOR(Cuda, __VA_ARGS__, E2M1, Nvfp4Scales)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FP4, QuantizeBlock)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FP4, QuantizeBlockBoth)

}  // namespace qshard::kernels
