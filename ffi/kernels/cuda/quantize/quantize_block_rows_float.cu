// Quantization of gathered rows with fp32 scales. Blocks of 128 are fast.
#include "kernels/cuda/quantize/quantize_block_rows.cuh"

namespace qshard::kernels {

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_WITH, FloatScales, QSHARD_INSTANTIATE_FOR, Cuda,
                      QuantizeBlockRows)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_WITH, FloatScales, QSHARD_INSTANTIATE_FOR, Cuda,
                      QuantizeBlockBothRows)

}  // namespace qshard::kernels
