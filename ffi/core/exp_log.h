// Exponentials and logarithms, the same on host and device, whose library functions do not agree to
// the bit: fp32, one rounding an operation, fused where it says so; logarithms in fp64.
#ifndef QSHARD_CORE_EXP_LOG_H_
#define QSHARD_CORE_EXP_LOG_H_

#include <cstdint>

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// e^y is 2^n * 2^f, with n the integer nearest to y * log2(e), which an addition rounds to, and a
// polynomial for 2^f. `power` is n in the place of an exponent.
//
// kLog2E is off by 2^-26, times |y|: e^y is off by up to 20 units in the last place. `kWithRest`
// adds the rest of y * log2(e) to f.
struct ExpParts {
  float fraction;
  uint32_t power;
};
template <bool kWithRest>
QSHARD_INLINE ExpParts ExpInParts(float y) {
  constexpr float kLog2E = 0x1.715476p+0f, kInteger = 12582912.0f;  // 3 * 2^22
  constexpr float kRest = 0x1.4ae0cp-26f;                           // log2(e) - kLog2E
  // 2^f - 1 over f, of the least relative error in 2^f for |f| up to 1/2.
  constexpr float k1 = 0x1.62e42ap-1f, k2 = 0x1.ebf9bcp-3f, k3 = 0x1.c6b752p-5f,
                  k4 = 0x1.3cea88p-7f, k5 = 0x1.5bba14p-10f;
  const float shifted = FusedMultiplyAdd(y, kLog2E, kInteger);
  float f = FusedMultiplyAdd(y, kLog2E, -(shifted - kInteger));
  if constexpr (kWithRest) f = FusedMultiplyAdd(y, kRest, f);
  float p = FusedMultiplyAdd(k5, f, k4);
  p = FusedMultiplyAdd(p, f, k3);
  p = FusedMultiplyAdd(p, f, k2);
  p = FusedMultiplyAdd(p, f, k1);
  p = FusedMultiplyAdd(p, f, 1.0f);
  return {p, static_cast<uint32_t>(FloatBits(shifted)) << 23};
}

// e^x for x <= 0, 0 below kLeastExp, where 2^n would not be normal and is not taken; NaN for NaN.
// It leaves out the rest of log2(e): the error grows with |x|, and such terms of a softmax are
// small.
constexpr float kLeastExp = -87.0f;
QSHARD_INLINE float ExpOfNegative(float x) {
  constexpr uint32_t kOneBits = 0x3F800000;
  const ExpParts e = ExpInParts<false>(x);
  const float power = FloatFromBits(static_cast<int32_t>(e.power + kOneBits));
  return FloatFromBits(Select(x < kLeastExp, 0, FloatBits(e.fraction * power)));
}

// The natural logarithm in fp64, off by less than half of an fp32 unit in the last place; of what
// is below all normal numbers that of 0, of negative ones NaN. It is 2 atanh((m - 1) / (m + 1)) of
// the significand m between sqrt(1/2) and sqrt(2), by its series.
QSHARD_INLINE double LogOf(float x) {
  constexpr int32_t kNormal = 1 << 23;  // Bits of the least.
  if (!(x >= 0.0f)) return FloatFromBits(kNanBits);
  if (FloatBits(x + 0.0f) < kNormal) return -FloatFromBits(kFloatInfinityBits);
  if (FloatBits(x) == kFloatInfinityBits) return x;
  constexpr int32_t kSqrtHalf = 0x3F3504F3;  // Bits of sqrt(1/2).
  const int32_t bits = FloatBits(x), exponent = (bits - kSqrtHalf) >> 23;
  const double m = FloatFromBits(bits - exponent * (1 << 23));
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double sum = 0.0;
  for (int k = 17; k > 0; k -= 2) sum = sum * square + 1.0 / k;
  return exponent * 0x1.62e42fefa39efp-1 + 2.0 * s * sum;
}

}  // namespace qshard

#endif  // QSHARD_CORE_EXP_LOG_H_
