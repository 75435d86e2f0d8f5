// Scale from an amax, the same on host and device. Multiplications and divisions must not be
// contracted or approximated.
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

// Returns 1 / a with the rounding of Divide.
QSHARD_INLINE float Reciprocal(float a) {
#if defined(__CUDA_ARCH__)
  return __frcp_rn(a);
#else
  return 1.0f / a;
#endif
}

// Returns 1 / a with the same rounding, if neither a nor 1 / a is subnormal. This is __frcp_rn
// without its range check.
QSHARD_INLINE float ReciprocalOfNormal(float a) {
#if defined(__CUDA_ARCH__)
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(a));
  return __fmaf_rn(r, __fmaf_rn(-a, r, 1.0f), r);
#else
  return 1.0f / a;
#endif
}

QSHARD_INLINE float SquareRoot(float v) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(v);
#else
  return __builtin_sqrtf(v);
#endif
}

// Returns a * b + c, rounded once.
QSHARD_INLINE float FusedMultiplyAdd(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

// Result of an infinite element. kSaturate: the largest code. kNan: its scale is NaN, and so is
// everything that shares it.
enum class Nonfinite { kSaturate, kNan };

// Returns the amax that a block's scale is computed from: `amax`, or NaN if it is infinite and
// `nonfinite` is kNan.
QSHARD_INLINE float AmaxOrNan(float amax, Nonfinite nonfinite) {
  const bool keeps = nonfinite == Nonfinite::kSaturate || FloatBits(amax) != kFloatInfinityBits;
  return FloatFromBits(Select(keeps, FloatBits(amax), kNanBits));
}

// Returns fl(x * scale), or NaN for an infinite x: the value to encode under a passed scale with
// Nonfinite::kNan. For finite x, x * 0 is a zero with the sign of the product, so adding it changes
// nothing.
QSHARD_INLINE float ScaledOrNan(float x, float scale) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(x, 0.0f, __fmul_rn(x, scale));
#else
  return x * scale + x * 0.0f;
#endif
}

// Returns max / amax, so that amax encodes to max. Returns 1 if amax is 0. An infinite or NaN amax
// gives 1, or NaN with Nonfinite::kNan. `pow2` clears the mantissa, which rounds the scale down to
// a power of two, so nothing saturates.
QSHARD_INLINE float ScaleFromAmax(float amax, float max, float eps, bool pow2,
                                  Nonfinite nonfinite = Nonfinite::kSaturate) {
  const bool nan = (FloatBits(amax) & kFloatMagnitudeMask) > kFloatInfinityBits;
  const float a = FloatFromBits(Select(nan | (amax > eps), FloatBits(amax), FloatBits(eps)));
  const int32_t bits = FloatBits(a) & kFloatMagnitudeMask;
  int32_t s = FloatBits(Divide(max, a));
  s = Select(s == kFloatInfinityBits, FloatBits(kFloatMax), s);
  s = Select(pow2, s & kFloatInfinityBits, s);
  const bool not_finite = bits >= kFloatInfinityBits;
  s = Select((bits == 0) | not_finite, FloatBits(1.0f), s);
  return FloatFromBits(Select(not_finite & (nonfinite == Nonfinite::kNan), kNanBits, s));
}

QSHARD_INLINE float ScaleInverse(float scale) { return CanonicalNan(Divide(1.0f, scale)); }

}  // namespace qshard

#endif  // QSHARD_CORE_SCALE_H_
