#define QSHARD_ADAM_SIMD_TABLE kAdamSimdAvx2
#include "kernels/cpu/adam_simd_kernels.inc"
