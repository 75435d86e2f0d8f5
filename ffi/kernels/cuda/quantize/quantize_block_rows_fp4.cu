// Quantization of gathered rows to E2M1 with E8M0 scales. Blocks of 32 are fast.
#include "kernels/cuda/quantize/quantize_block_rows.cuh"

namespace qshard::kernels {

#define QSHARD_INSTANTIATE_FP4(...) QSHARD_INSTANTIATE_FOR(Cuda, __VA_ARGS__, E2M1, E8M0Scales)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FP4, QuantizeBlockRows)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FP4, QuantizeBlockBothRows)

}  // namespace qshard::kernels
