// Block scales, the same on host and device: E8M0, and NVFP4's E4M3 scales under a global fp32
// scale. The `amax` of a block is AmaxOrNan, which keeps NaN.
//
// Formulas are sequences of single fp32 operations, with no contraction and no approximate
// division. A NaN scale is always the canonical NaN.
#ifndef QSHARD_CORE_BLOCK_SCALE_H_
#define QSHARD_CORE_BLOCK_SCALE_H_

#include <cmath>
#include <cstdint>

#include "core/scale.h"

namespace qshard {

// Returns 1 / v rounded to fp32, at most FLT_MAX, for v >= 0 or NaN.
QSHARD_INLINE float FiniteInverse(float v) {
  const float inverse = Divide(1.0f, v);
  return FloatBits(inverse) == kFloatInfinityBits ? kFloatMax : CanonicalNan(inverse);
}

// The scale of a block, and the inverse scale as stored.
template <class Stored>
struct BlockScale {
  float scale;
  Stored scale_inv;
};

// --- type of a stored scale_inv, and its value ---

template <class Scale>
struct StoredScale {  // a code of format Scale
  using Type = uint8_t;
  static QSHARD_INLINE float Value(uint8_t code) { return Decode<Scale>(code); }
};
template <>
struct StoredScale<float> {
  using Type = float;
  static QSHARD_INLINE float Value(float scale_inv) { return scale_inv; }
};

// --- E8M0 ---

enum class PowerRounding { kUp, kFloor };

// Returns the E8M0 code of scale_inv. `max` is the format's largest element. kUp gives the smallest
// power of two that is at least fl(amax * fl(1 / max)), so nothing saturates. kFloor is OCP's rule:
// the exponent of amax minus the exponent of `max`.
QSHARD_INLINE uint8_t E8M0FromAmax(float amax, float max, PowerRounding rounding) {
  if (rounding == PowerRounding::kUp) return Encode<E8M0>(amax * Divide(1.0f, max));
  const int32_t bits = FloatBits(amax) & kFloatMagnitudeMask;
  if (bits >= kFloatInfinityBits) return bits > kFloatInfinityBits ? E8M0::kNan : E8M0::kMaxCode;
  const int32_t e = (bits >> 23) - ((FloatBits(max) >> 23) - E8M0::kBias);
  return static_cast<uint8_t>(e > 0 ? e : 0);
}

// Returns 2^(127 - code), exactly: the multiplier of a block's elements. NaN for code 255.
QSHARD_INLINE float MultiplierE8M0(uint8_t code) {
  const int32_t power =
      Select(code == E8M0::kMaxCode, kTwoToMinus127Bits, (E8M0::kMaxCode - code) * (1 << 23));
  return FloatFromBits(Select(code == E8M0::kNan, kNanBits, power));
}

// --- NVFP4 ---

// Global scale S. It maps the largest block of the tensor, or row, to the scale `scale_max` (448 or
// 256) and the block's largest element to 6. Returns 1 if amax is 0 or not finite.
QSHARD_INLINE float GlobalScaleNvfp4(float amax, float scale_max) {
  return ScaleFromAmax(amax, E2M1::kMax * scale_max, 0.0f, false);
}

// Stores a block scale as d = E4M3(min(v, 448)), and returns the multiplier that belongs to the
// rounded d. The encoder's saturation gives the minimum.
QSHARD_INLINE BlockScale<uint8_t> RoundScaleNvfp4(float v, float global_scale) {
  const uint8_t code = Encode<E4M3>(v);
  return {FiniteInverse(Decode<E4M3>(code) * ScaleInverse(global_scale)), code};
}

QSHARD_INLINE BlockScale<uint8_t> ScaleNvfp4(float amax, float global_scale) {
  return RoundScaleNvfp4(amax * (global_scale * Divide(1.0f, E2M1::kMax)), global_scale);
}

// The two candidates of four over six, which map the block's amax to 4 and to 6. The order of
// operations differs from ScaleNvfp4.
struct FourAndSix {
  BlockScale<uint8_t> four, six;
};

QSHARD_INLINE FourAndSix FourOverSixCandidates(float amax, float global_scale) {
  const float base = Divide(amax, E2M1::kMax) * global_scale;
  return {RoundScaleNvfp4(base * 1.5f, global_scale), RoundScaleNvfp4(base, global_scale)};
}

// Returns the error of one element under a candidate, before the absolute value or square:
// fl(fl(fl(q * d) * global_amax) / max) - x. Here q is x as the candidate stores it, and `max` is 6
// * scale_max. The errors in a row of the block are summed in element order. Rows are summed as a
// binary tree: row i with row i + 8, then + 4, + 2, + 1.
QSHARD_INLINE float FourOverSixDifference(float x, BlockScale<uint8_t> candidate, float global_amax,
                                          float max) {
  const float q = Decode<E2M1>(Encode<E2M1>(x * candidate.scale));
  return Divide(q * Decode<E4M3>(candidate.scale_inv) * global_amax, max) - x;
}

// Factor of dequantization: value = fl(q * factor).
QSHARD_INLINE float ScaleInverseNvfp4(uint8_t scale_inv, float global_scale_inv) {
  return Decode<E4M3>(scale_inv) * global_scale_inv;
}

// --- delayed scaling ---

// Returns the next scale from amax `a` of the history window: fl(target / a), at most FLT_MAX, with
// target = DelayedTarget. Keeps `scale` if a is 0, infinite or NaN.
QSHARD_INLINE float DelayedScale(float scale, float a, float target) {
  const int32_t bits = FloatBits(a);
  if (bits <= 0 || bits >= kFloatInfinityBits) return scale;
  const float s = Divide(target, a);
  return FloatBits(s) == kFloatInfinityBits ? kFloatMax : s;
}

// Returns fl(max * 2^-margin), the value that the largest element is scaled to.
template <class Code>
inline float DelayedTarget(int64_t margin) {
  return std::ldexp(Code::kMax, -static_cast<int>(margin));
}

// Returns the scale to cast with. A scale of 0 marks a tensor without history, which takes the
// scale that an update with its own amax would give, or 1 if that amax is 0 or not finite.
QSHARD_INLINE float ScaleOrFirst(float scale, float amax, float target) {
  return scale != 0.0f ? scale : DelayedScale(1.0f, amax, target);
}

}  // namespace qshard

#endif  // QSHARD_CORE_BLOCK_SCALE_H_
