// Quantization of gathered rows to one-byte codes with E8M0 scales. Blocks of 32 are fast.
#include "kernels/cuda/quantize/quantize_block_rows.cuh"

namespace qshard::kernels {

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_BYTE_ELEMENT, QSHARD_WITH, E8M0Scales, QSHARD_INSTANTIATE_FOR,
                      Cuda, QuantizeBlockRows)
QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_BYTE_ELEMENT, QSHARD_WITH, E8M0Scales, QSHARD_INSTANTIATE_FOR,
                      Cuda, QuantizeBlockBothRows)

}  // namespace qshard::kernels
