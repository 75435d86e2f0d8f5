#define QSHARD_BLOCK_SIMD_TABLE kBlockSimdAvx2
#define QSHARD_SIMD_BYTES 32
#include "kernels/cpu/block_simd_kernels.inc"
