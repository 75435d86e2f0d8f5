#define QSHARD_SIMD_TABLE kSimdAvx2
#define QSHARD_SIMD_NAME "avx2"
#define QSHARD_SIMD_BYTES 32
#include "kernels/cpu/simd_kernels.inc"
