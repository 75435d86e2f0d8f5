#define QSHARD_ADAM_SIMD_TABLE kAdamSimdScalar
#include "kernels/cpu/adam_simd_kernels.inc"
