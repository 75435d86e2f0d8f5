// Scales of blocks by any rule, from amaxes.
#ifndef QSHARD_KERNELS_CPU_SCALES_OF_H_
#define QSHARD_KERNELS_CPU_SCALES_OF_H_

#include <algorithm>

#include "kernels/cpu/simd.h"
#include "kernels/quantize_block.h"

namespace qshard::kernels {

// scale[i], scale_inv[i] of blocks first .. first + n of a grid; all pointers are to the first.
template <class Code>
void ScalesOf(const FloatScales& rule, const float* amax, int64_t, int64_t n, float* scale,
              float* scale_inv) {
  Simd().float_scales(amax, n, {Code::kMax, rule.eps, rule.pow2, rule.nonfinite}, scale, scale_inv);
}

template <class Code>
void ScalesOf(const E8M0Scales& rule, const float* amax, int64_t, int64_t n, float* scale,
              uint8_t* scale_inv) {
  Simd().e8m0_scales(amax, n, {Code::kMax, rule.rounding, rule.nonfinite}, scale, scale_inv);
}

template <class Code>
void ScalesOf(const Nvfp4Scales& rule, const float* amax, int64_t first, int64_t n, float* scale,
              uint8_t* scale_inv) {
  for (int64_t i = 0, stop; i < n; i = stop) {
    stop = std::min(n, ((first + i) / rule.run + 1) * rule.run - first);
    Simd().nvfp4_scales(amax + i, stop - i, rule.GlobalScale(first + i), rule.nonfinite, scale + i,
                        scale_inv + i);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SCALES_OF_H_
