// What kernels are instantiated for, listed once. M is a macro of the types that a list's name
// says: T of inputs, or of what codes are decoded to, and Code.
#ifndef QSHARD_KERNELS_CUDA_INSTANTIATE_CUH_
#define QSHARD_KERNELS_CUDA_INSTANTIATE_CUH_

// M(T)
#define QSHARD_FLOATS(M) M(float) M(bfloat16) M(float16)

// M(Code): elements, and with scales.
#define QSHARD_CODES(M) M(E4M3) M(E5M2) M(E2M1) M(E8M0)

// M(T, Code): elements of a byte; those of half a byte; all; and with scales.
#define QSHARD_FP8_OF(M, T) M(T, E4M3) M(T, E5M2)
#define QSHARD_FLOATS_FP8(M) \
  QSHARD_FP8_OF(M, float) QSHARD_FP8_OF(M, bfloat16) QSHARD_FP8_OF(M, float16)
#define QSHARD_FLOATS_FP4(M) M(float, E2M1) M(bfloat16, E2M1) M(float16, E2M1)
#define QSHARD_FLOATS_ELEMENTS(M) QSHARD_FLOATS_FP8(M) QSHARD_FLOATS_FP4(M)
#define QSHARD_FLOATS_CODES(M) \
  QSHARD_FLOATS_ELEMENTS(M) M(float, E8M0) M(bfloat16, E8M0) M(float16, E8M0)

#endif  // QSHARD_KERNELS_CUDA_INSTANTIATE_CUH_
