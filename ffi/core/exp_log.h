// Exponentials and logarithms, because the library functions of host and device differ. Results are
// the same bits on both, except in ExpOfNegative. Exponentials are fp32 with one rounding per
// operation, fused where written. Logarithms are fp64.
#ifndef QSHARD_CORE_EXP_LOG_H_
#define QSHARD_CORE_EXP_LOG_H_

#include <cstdint>

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// e^y as 2^n * 2^f. n is the integer nearest to y * log2(e), rounded by adding 3 * 2^22. A
// polynomial gives 2^f. `power` is n shifted into the exponent field.
//
// kLog2E is off by about 2^-26, so for large |y| e^y is off by up to 20 ulp. kWithRest adds the
// remainder of y * log2(e) to f.
constexpr float kLog2E = 0x1.715476p+0f;
struct ExpParts {
  float fraction;
  uint32_t power;
};
template <bool kWithRest>
QSHARD_INLINE ExpParts ExpInParts(float y) {
  constexpr float kInteger = 12582912.0f;  // 3 * 2^22
  constexpr float kRest = 0x1.4ae0cp-26f;  // log2(e) - kLog2E
  // Minimax coefficients of (2^f - 1) / f: least relative error in 2^f for |f| <= 1/2.
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

// Returns e^x for x <= 0. Returns 0 below kLeastExp, where 2^n would be subnormal, and NaN for NaN.
// Uses no remainder of log2(e): the error grows with |x|, where terms of a softmax are small.
//
// A device uses its instruction for 2^x, with other bits, and 0 for subnormals. The polynomial
// would take longer than the loads and stores of cross entropy.
constexpr float kLeastExp = -87.0f;
QSHARD_INLINE float ExpOfNegative(float x) {
#if defined(__CUDA_ARCH__)
  float power_of_two;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power_of_two) : "f"(x * kLog2E));
  return power_of_two;
#else
  constexpr uint32_t kOneBits = 0x3F800000;
  const ExpParts e = ExpInParts<false>(x);
  const float power = FloatFromBits(static_cast<int32_t>(e.power + kOneBits));
  return FloatFromBits(Select(x < kLeastExp, 0, FloatBits(e.fraction * power)));
#endif
}

// Returns the natural logarithm in fp64, with an error below half an fp32 ulp. Subnormals count as
// 0, and negative numbers give NaN. Computes 2 atanh((m - 1) / (m + 1)) by its series, with the
// significand m between sqrt(1/2) and sqrt(2).
QSHARD_INLINE double LogOf(float x) {
  constexpr int32_t kNormal = 1 << 23;  // bits of the smallest normal number
  if (!(x >= 0.0f)) return FloatFromBits(kNanBits);
  if (FloatBits(x + 0.0f) < kNormal) return -FloatFromBits(kFloatInfinityBits);
  if (FloatBits(x) == kFloatInfinityBits) return x;
  constexpr int32_t kSqrtHalf = 0x3F3504F3;  // bits of sqrt(1/2)
  const int32_t bits = FloatBits(x), exponent = (bits - kSqrtHalf) >> 23;
  const double m = FloatFromBits(bits - exponent * (1 << 23));
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double sum = 0.0;
  for (int k = 17; k > 0; k -= 2) sum = sum * square + 1.0 / k;
  return exponent * 0x1.62e42fefa39efp-1 + 2.0 * s * sum;
}

}  // namespace qshard

#endif  // QSHARD_CORE_EXP_LOG_H_
