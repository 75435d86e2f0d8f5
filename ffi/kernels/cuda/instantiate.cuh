// The lists of core/format.h in the form that most kernels here are instantiated by: M is a macro
// of the types that a list's name says, T of inputs, or of what codes are decoded to, and Code.
#ifndef QSHARD_KERNELS_CUDA_INSTANTIATE_CUH_
#define QSHARD_KERNELS_CUDA_INSTANTIATE_CUH_

#include "core/format.h"

#define QSHARD_CALL(M, ...) M(__VA_ARGS__)

// M(T)
#define QSHARD_FLOATS(M) QSHARD_FOR_EACH_INPUT(QSHARD_CALL, M)

// M(Code): elements, and with scales.
#define QSHARD_CODES(M) QSHARD_FOR_EACH_CODE(QSHARD_CALL, M)

// M(T, Code): elements of 8 bits; of a byte each; of half a byte; all; and with scales.
#define QSHARD_FLOATS_FP8(M) QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_CALL, M)
#define QSHARD_FLOATS_BYTE_ELEMENTS(M) \
  QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_BYTE_ELEMENT, QSHARD_CALL, M)
#define QSHARD_FLOATS_FP4(M) M(float, E2M1) M(bfloat16, E2M1) M(float16, E2M1)
#define QSHARD_FLOATS_ELEMENTS(M) QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_ELEMENT, QSHARD_CALL, M)
#define QSHARD_FLOATS_CODES(M) QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_CODE, QSHARD_CALL, M)

#endif  // QSHARD_KERNELS_CUDA_INSTANTIATE_CUH_
