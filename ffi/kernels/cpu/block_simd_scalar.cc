#define QSHARD_BLOCK_SIMD_TABLE kBlockSimdScalar
#include "kernels/cpu/block_simd_kernels.inc"
