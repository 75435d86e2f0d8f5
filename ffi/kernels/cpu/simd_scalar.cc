#define QSHARD_SIMD_TABLE kSimdScalar
#define QSHARD_SIMD_NAME "scalar"
#include "kernels/cpu/simd_kernels.inc"
