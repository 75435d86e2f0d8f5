// Block scales from amaxes, by any scale rule.
#ifndef QSHARD_KERNELS_CPU_SCALES_OF_H_
#define QSHARD_KERNELS_CPU_SCALES_OF_H_

#include <algorithm>

#include "kernels/cpu/simd.h"

namespace qshard::kernels {

inline auto ScalesEntry(const FloatScales&) { return Simd().float_scales; }
inline auto ScalesEntry(const E8M0Scales&) { return Simd().e8m0_scales; }
inline auto ScalesEntry(const Nvfp4Scales&) { return Simd().nvfp4_scales; }

// Computes scale[i] and scale_inv[i] for blocks first to first + n of a grid. All pointers point to
// block `first`.
template <class Code, class Scales>
void ScalesOf(const Scales& scales, const float* amax, int64_t first, int64_t n, float* scale,
              typename Scales::Stored* scale_inv) {
  for (int64_t i = 0, stop; i < n; i = stop) {
    stop = std::min(n, ((first + i) / scales.run + 1) * scales.run - first);
    ScalesEntry(scales)(amax + i, stop - i, scales, scales.template Shared<Code>(first + i),
                        scale + i, scale_inv + i);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SCALES_OF_H_
