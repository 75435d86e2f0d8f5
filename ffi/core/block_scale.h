// Scales of blocks: E8M0, and NVFP4's E4M3 under a global fp32 scale. The same on host and device.
// `amax` of a block is ShownAmax: that of NaN is NaN.
//
// Each formula is one fp32 operation at a time: no contraction, no approximate division. Scales
// that are NaN are the canonical one.
#ifndef QSHARD_CORE_BLOCK_SCALE_H_
#define QSHARD_CORE_BLOCK_SCALE_H_

#include <cmath>
#include <cstdint>

#include "core/scale.h"

namespace qshard {

// fl(1 / v), at most FLT_MAX, for v >= 0 or NaN.
QSHARD_INLINE float FiniteInverse(float v) {
  const float inverse = Divide(1.0f, v);
  return FloatBits(inverse) == kFloatInfinityBits ? kFloatMax : CanonicalNan(inverse);
}

// The scale of a block, and its inverse as it is stored.
template <class Stored>
struct BlockScale {
  float scale;
  Stored scale_inv;
};

// --- stored scales: what scale_inv holds, and the value it stands for ---

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

// The E8M0 code of scale_inv. kUp: the least power of two that is not below fl(amax * fl(1 / max)),
// so that nothing saturates. kFloor, OCP's rule: amax's own exponent less that of `max`. `max` is
// the largest element.
QSHARD_INLINE uint8_t E8M0FromAmax(float amax, float max, PowerRounding rounding) {
  if (rounding == PowerRounding::kUp) return Encode<E8M0>(amax * Divide(1.0f, max));
  const int32_t bits = FloatBits(amax) & kFloatMagnitudeMask;
  if (bits >= kFloatInfinityBits) return bits > kFloatInfinityBits ? E8M0::kNan : E8M0::kMaxCode;
  const int32_t e = (bits >> 23) - ((FloatBits(max) >> 23) - E8M0::kBias);
  return static_cast<uint8_t>(e > 0 ? e : 0);
}

// 2^(127 - code), exact: what elements are multiplied by. NaN for code 255.
QSHARD_INLINE float MultiplierE8M0(uint8_t code) {
  const int32_t power =
      Select(code == E8M0::kMaxCode, kTwoToMinus127Bits, (E8M0::kMaxCode - code) * (1 << 23));
  return FloatFromBits(Select(code == E8M0::kNan, kNanBits, power));
}

// --- NVFP4 ---

// S: takes the largest block of the tensor, or row, to `scale_max` (448 or 256), and its largest
// element to 6. 1 where amax says nothing.
QSHARD_INLINE float GlobalScaleNvfp4(float amax, float scale_max) {
  return ScaleFromAmax(amax, E2M1::kMax * scale_max, 0.0f, false);
}

// The stored code of a block scale, d = E4M3(min(v, 448)), and the multiplier of d as it was
// rounded. The encoder's saturation is the minimum.
QSHARD_INLINE BlockScale<uint8_t> StoreScaleNvfp4(float v, float global_scale) {
  const uint8_t code = Encode<E4M3>(v);
  return {FiniteInverse(Decode<E4M3>(code) * ScaleInverse(global_scale)), code};
}

QSHARD_INLINE BlockScale<uint8_t> ScaleNvfp4(float amax, float global_scale) {
  return StoreScaleNvfp4(amax * (global_scale * Divide(1.0f, E2M1::kMax)), global_scale);
}

// Four over six: the two candidates, which take the amax of the block to 4 and to 6. The order of
// operations is not that of ScaleNvfp4.
struct FourAndSix {
  BlockScale<uint8_t> four, six;
};

QSHARD_INLINE FourAndSix FourOverSixCandidates(float amax, float global_scale) {
  const float base = Divide(amax, E2M1::kMax) * global_scale;
  return {StoreScaleNvfp4(base * 1.5f, global_scale), StoreScaleNvfp4(base, global_scale)};
}

// What an element adds to the error of a candidate, before absolute value or square:
// fl(fl(fl(q * d) * global_amax) / max) - x, where q is x as the candidate stores it and `max` is
// 6 * scale_max. Errors of a row of the block are summed in the order of elements; rows are summed
// as a binary tree, row i with row i + 8, then + 4, + 2, + 1.
QSHARD_INLINE float FourOverSixDifference(float x, BlockScale<uint8_t> candidate, float global_amax,
                                          float max) {
  const float q = Decode<E2M1>(Encode<E2M1>(x * candidate.scale));
  return Divide(q * Decode<E4M3>(candidate.scale_inv) * global_amax, max) - x;
}

// value = fl(q * this).
QSHARD_INLINE float ScaleInverseNvfp4(uint8_t scale_inv, float global_scale_inv) {
  return Decode<E4M3>(scale_inv) * global_scale_inv;
}

// --- delayed scaling ---

// The next scale from the window's amax `a`: fl(target / a) with target = fl(max * 2^-margin), at
// most FLT_MAX. `scale` stays where a is 0, infinite or NaN.
QSHARD_INLINE float DelayedScale(float scale, float a, float target) {
  const int32_t bits = FloatBits(a);
  if (bits <= 0 || bits >= kFloatInfinityBits) return scale;
  const float s = Divide(target, a);
  return FloatBits(s) == kFloatInfinityBits ? kFloatMax : s;
}

// fl(max * 2^-margin): what the largest element is taken to.
template <class Code>
inline float DelayedTarget(int64_t margin) {
  return std::ldexp(Code::kMax, -static_cast<int>(margin));
}

// The scale to cast with. A tensor without history has scale 0, and takes the one that its own amax
// makes, as an update with this amax alone would; 1 where that says nothing.
QSHARD_INLINE float ScaleOrFirst(float scale, float amax, float target) {
  return scale != 0.0f ? scale : DelayedScale(1.0f, amax, target);
}

}  // namespace qshard

#endif  // QSHARD_CORE_BLOCK_SCALE_H_
