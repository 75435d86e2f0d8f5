// How a scale comes from an amax, the same on host and device. The multiplication and division may
// not be contracted or approximated.
#ifndef QSHARD_CORE_SCALE_H_
#define QSHARD_CORE_SCALE_H_

#include "core/round.h"

namespace qshard {

QSHARD_INLINE float Divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// max / amax, so that amax encodes to max. 1 where that says nothing: amax 0, infinite or NaN.
// `pow2` clears the mantissa: rounds the scale down, so nothing saturates.
QSHARD_INLINE float ScaleFromAmax(float amax, float max, float eps, bool pow2) {
  const bool nan = (FloatBits(amax) & kFloatMagnitudeMask) > kFloatInfinityBits;
  const float a = FloatFromBits(Select(nan | (amax > eps), FloatBits(amax), FloatBits(eps)));
  const int32_t bits = FloatBits(a) & kFloatMagnitudeMask;
  int32_t s = FloatBits(Divide(max, a));
  s = Select(s == kFloatInfinityBits, FloatBits(kFloatMax), s);
  s = Select(pow2, s & kFloatInfinityBits, s);
  const bool says_nothing = (bits == 0) | (bits >= kFloatInfinityBits);
  return FloatFromBits(Select(says_nothing, FloatBits(1.0f), s));
}

QSHARD_INLINE float ScaleInverse(float scale) { return Divide(1.0f, scale); }

}  // namespace qshard

#endif  // QSHARD_CORE_SCALE_H_
