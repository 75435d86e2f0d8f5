// RMSNorm of a row, the same on host and device: fp32, one rounding per operation, fused where
// written, with a fixed order of summation.
//
// A sum over a row has kSumLanes partial sums: element i is added to partial sum i % kSumLanes.
// Partial sums are then added in halves: over eight neighbours, over 32 such sums, over the last
// four. So a thread can take eight lanes, a warp 256, and a thread block of four warps all of them.
//
// A sum over rows first adds kSumRows rows in order. The results go to kRowLanes partial sums in
// the same way.
#ifndef QSHARD_CORE_NORM_H_
#define QSHARD_CORE_NORM_H_

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

constexpr int kSumLanes = 1024, kLanesOfThread = 8, kLanesOfWarp = 256;
constexpr int kSumRows = 16, kRowLanes = 16;

// Sums kCount numbers, a power of two, into v[0] by repeatedly adding the upper half to the lower.
template <int kCount>
QSHARD_INLINE float SumHalves(float* v) {
  if constexpr (kCount > 1) {
    for (int i = 0; i < kCount / 2; ++i) v[i] = v[i] + v[i + kCount / 2];
    SumHalves<kCount / 2>(v);
  }
  return v[0];
}

// Returns 1 / sqrt(mean of squares + eps), the factor of a row, from its sum of squares.
QSHARD_INLINE float RmsInverse(float squares, int64_t n, float eps) {
  const float mean = Divide(squares, static_cast<float>(n));
  return Reciprocal(SquareRoot(mean + eps));
}

QSHARD_INLINE float RmsNorm(float x, float rstd, float weight) { return x * rstd * weight; }

// Gradient of x for gradient `grad` of y. `along` is the mean over the row of grad * weight * x *
// rstd.
QSHARD_INLINE float RmsNormGrad(float x, float rstd, float weight, float grad, float along) {
  return rstd * (grad * weight - x * rstd * along);
}

}  // namespace qshard

#endif  // QSHARD_CORE_NORM_H_
