// The serial inner loops of Adam, one set for each SIMD target: blocks of up to kAdamBlock elements
// go through buffers of floats.
#ifndef QSHARD_KERNELS_CPU_ADAM_SIMD_H_
#define QSHARD_KERNELS_CPU_ADAM_SIMD_H_

#include "kernels/adam.h"

namespace qshard::kernels {

struct AdamSimdKernels {
  // x[i] = the value of from[i], in the type as it is or as a code of it with this scale.
  void (*widen[kNumAdamFloats])(const void* from, int64_t n, float* x);
  void (*decode[kNumAdamTypes])(const void* from, int64_t n, float scale_inv, float* x);
  void (*join)(const void* upper, const void* lower, int64_t n, float* x);

  // The reverse. `encode` makes the scale of x first; `positive`: codes of second moments.
  void (*narrow[kNumAdamFloats])(const float* x, int64_t n, void* to);
  void (*encode[kNumAdamTypes])(const float* x, int64_t n, bool positive, void* to,
                                float* scale_inv);
  void (*halve)(const float* x, int64_t n, void* upper, void* lower);

  // p, m and v after a step with gradients g; `update`: lr * u, which p became less by.
  void (*step[3])(const AdamConstants& constants, const float* g, int64_t n, float* p, float* m,
                  float* v, float* update);
};

// Those of the target of Simd().
const AdamSimdKernels& AdamSimd();

extern const AdamSimdKernels kAdamSimdScalar;
#if defined(QSHARD_X86_TARGETS)
extern const AdamSimdKernels kAdamSimdAvx2;
extern const AdamSimdKernels kAdamSimdAvx512;
#endif

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_ADAM_SIMD_H_
