#define QSHARD_BLOCK_SIMD_TABLE kBlockSimdAvx512
#define QSHARD_SIMD_BYTES 64
#include "kernels/cpu/block_simd_kernels.inc"
