// RMSNorm of a row, the same on host and device: fp32, one rounding an operation, fused where it
// says so, and sums in one order.
//
// A sum of products over a row has kSumLanes partial sums, element i adding to that of i %
// kSumLanes, and then halves: of eight lanes side by side, of 32 such sums, of the four that are
// left. So a thread can hold eight lanes, a warp 256, and a block of four warps all of them.
// Products over rows are summed over kSumRows rows, one after the other; then likewise over
// kRowLanes partial sums of such parts.
#ifndef QSHARD_CORE_NORM_H_
#define QSHARD_CORE_NORM_H_

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

constexpr int kSumLanes = 1024, kLanesOfThread = 8, kLanesOfWarp = 256;
constexpr int kSumRows = 16, kRowLanes = 16;

// v[0] becomes the sum of v, of a power of two of numbers: the upper half is added to the lower.
template <int kCount>
QSHARD_INLINE float SumHalves(float* v) {
  if constexpr (kCount > 1) {
    for (int i = 0; i < kCount / 2; ++i) v[i] = v[i] + v[i + kCount / 2];
    SumHalves<kCount / 2>(v);
  }
  return v[0];
}

// What a row is multiplied by, from the sum of its squares.
QSHARD_INLINE float RmsInverse(float squares, int64_t n, float eps) {
  const float mean = Divide(squares, static_cast<float>(n));
  return Reciprocal(SquareRoot(mean + eps));
}

QSHARD_INLINE float RmsNorm(float x, float rstd, float weight) { return x * rstd * weight; }

// Of the gradient of y: `along`, the mean over the row of grad * weight * x * rstd.
QSHARD_INLINE float RmsNormGrad(float x, float rstd, float weight, float grad, float along) {
  return rstd * (grad * weight - x * rstd * along);
}

}  // namespace qshard

#endif  // QSHARD_CORE_NORM_H_
