#define QSHARD_SIMD_TABLE kSimdAvx512
#define QSHARD_SIMD_NAME "avx512"
#define QSHARD_SIMD_BYTES 64
#include "kernels/cpu/simd_kernels.inc"
