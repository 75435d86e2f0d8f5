// Bit-exact conversions, the same on host and device: widen inputs, encode to a format, decode a
// code.
//
// All fp32 arithmetic assumes rounding to nearest even and no flushing of subnormals. The CPU side
// enforces both (cpu/parallel_for.h), and nvcc does both by default. Every function is forced
// inline, because each SIMD target compiles its own copy and a shared out-of-line copy would
// violate the one-definition rule.
#ifndef QSHARD_CORE_ROUND_H_
#define QSHARD_CORE_ROUND_H_

#include <cstdint>
#include <cstring>

#include "core/format.h"

#if defined(__CUDACC__)
#define QSHARD_INLINE __host__ __device__ __forceinline__
#elif defined(__GNUC__)
#define QSHARD_INLINE inline __attribute__((always_inline))
#else
#define QSHARD_INLINE inline
#endif

namespace qshard {

constexpr int32_t kFloatInfinityBits = 0x7F800000;
constexpr int32_t kFloatMagnitudeMask = 0x7FFFFFFF;
constexpr int32_t kFloatMantissaMask = 0x7FFFFF;
constexpr int32_t kTwoToMinus127Bits = 0x400000;  // a subnormal; E8M0 code 0
constexpr int32_t kNanBits = 0x7FC00000;          // the NaN of every fp32 result
constexpr float kFloatMax = 3.402823466e+38f;

QSHARD_INLINE int32_t FloatBits(float v) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(v);
#else
  int32_t bits;
  std::memcpy(&bits, &v, sizeof(bits));
  return bits;
#endif
}

QSHARD_INLINE float FloatFromBits(int32_t bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(bits);
#else
  float v;
  std::memcpy(&v, &bits, sizeof(v));
  return v;
#endif
}

// Returns condition ? a : b as mask arithmetic. g++ compiles a plain `?:` to a branch in some of
// these loops, and then does not vectorize them.
QSHARD_INLINE int32_t Select(bool condition, int32_t a, int32_t b) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// Returns v, with kNanBits for any NaN. Hardware differs in the NaN bits that it produces or
// propagates, and results must not.
QSHARD_INLINE float CanonicalNan(float v) {
  const int32_t w = FloatBits(v);
  return FloatFromBits(Select((w & kFloatMagnitudeMask) > kFloatInfinityBits, kNanBits, w));
}

// Returns 2^exponent, for exponents of normal fp32 numbers.
constexpr float PowerOfTwo(int exponent) {
  float v = 1.0f;
  for (int i = 0; i < exponent; ++i) v *= 2.0f;
  for (int i = 0; i > exponent; --i) v *= 0.5f;
  return v;
}

// --- widen to fp32, exactly ---

QSHARD_INLINE float Widen(float x) { return x; }

QSHARD_INLINE float Widen(bfloat16 x) {
  return FloatFromBits(static_cast<int32_t>(static_cast<uint32_t>(x.bits) << 16));
}

QSHARD_INLINE float Widen(float16 x) {
  constexpr int32_t kMinNormalBits = (127 - 14) << 23;
  const int32_t magnitude = x.bits & 0x7FFF;
  const int32_t shifted = magnitude << 13;
  const int32_t normal = shifted + (112 << 23);
  // Put the mantissa of a subnormal half under the exponent of 2^-14, then subtract 2^-14.
  const int32_t subnormal =
      FloatBits(FloatFromBits(shifted + kMinNormalBits) - FloatFromBits(kMinNormalBits));
  int32_t wide = Select(magnitude < 0x400, subnormal, normal);
  wide = Select(magnitude >= 0x7C00, shifted | kFloatInfinityBits, wide);
  return FloatFromBits(wide | static_cast<int32_t>(static_cast<uint32_t>(x.bits & 0x8000) << 16));
}

// --- narrow from fp32: nearest even, overflow to infinity as in IEEE conversions. NaN becomes
// kNanBits, or the same NaN of the narrower type. ---

template <class T>
T Narrow(float v);

template <>
QSHARD_INLINE float Narrow<float>(float v) {
  return CanonicalNan(v);
}

template <>
QSHARD_INLINE bfloat16 Narrow<bfloat16>(float v) {
  const int32_t w = FloatBits(v);
  const uint32_t u = static_cast<uint32_t>(w);
  const uint32_t rounded = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
  return {static_cast<uint16_t>(Select((w & kFloatMagnitudeMask) > kFloatInfinityBits,
                                       kNanBits >> 16, static_cast<int32_t>(rounded)))};
}

template <>
QSHARD_INLINE float16 Narrow<float16>(float v) {
  const int32_t w = FloatBits(v);
  const int32_t sign = static_cast<int32_t>(static_cast<uint32_t>(w) >> 16) & 0x8000;
  const int32_t u = w & kFloatMagnitudeMask;
  // Below 2^-14, the smallest normal half, the fp32 addition rounds to a multiple of 2^-24.
  const int32_t subnormal =
      FloatBits(FloatFromBits(u) + PowerOfTwo(-1)) - FloatBits(PowerOfTwo(-1));
  const int32_t normal = (u - (112 << 23) + 0xFFF + ((u >> 13) & 1)) >> 13;
  int32_t h = Select(u < (113 << 23), subnormal, normal);
  h = Select(h > 0x7C00, 0x7C00, h);
  h = Select(u >= kFloatInfinityBits, 0x7C00, h);
  return {static_cast<uint16_t>(Select(u > kFloatInfinityBits, 0x7E00, h | sign))};
}

// --- elements ---

// Encodes v as a code of F: nearest even, saturating (|v| > max and +-inf give +-max). NaN gives
// F::kNan, and the sign of zero is kept.
//
// From F's smallest normal number up, it adds half an output unit (minus one, plus the lowest kept
// bit) to the fp32 bits and shifts. That rounds to nearest even, and a carry runs into the exponent
// as it should. Below, it adds C = 2^23 output units, so that the fp32 addition itself rounds to a
// whole number of units.
template <class F>
QSHARD_INLINE uint8_t Encode(float v) {
  constexpr int kShift = 23 - F::kMantissaBits;
  constexpr int32_t kRebias = (127 - F::kBias) << 23;
  constexpr int32_t kHalfUnit = (1 << (kShift - 1)) - 1;
  constexpr int32_t kMinNormalBits = (127 - F::kBias + 1) << 23;
  constexpr float kAlign = PowerOfTwo(23 + 1 - F::kBias - F::kMantissaBits);
  constexpr int kSignShift = 31 - (F::kBits - 1);

  const int32_t w = FloatBits(v);
  const int32_t magnitude = w & kFloatMagnitudeMask;
  const int32_t sign =
      static_cast<int32_t>(static_cast<uint32_t>(w) >> kSignShift) & (1 << (F::kBits - 1));
  const int32_t max_bits = FloatBits(F::kMax);
  const int32_t u = Select(magnitude < max_bits, magnitude, max_bits);
  const int32_t subnormal = FloatBits(FloatFromBits(u) + kAlign) - FloatBits(kAlign);
  const int32_t normal = (u - kRebias + kHalfUnit + ((u >> kShift) & 1)) >> kShift;
  const int32_t code = Select(u < kMinNormalBits, subnormal, normal) | sign;
  return static_cast<uint8_t>(
      Select(magnitude > kFloatInfinityBits, static_cast<int32_t>(F::kNan), code));
}

// Decodes a code of F to fp32, exactly. NaN gives kNanBits.
template <class F>
QSHARD_INLINE float Decode(uint8_t code) {
  constexpr int32_t kSign = 1 << (F::kBits - 1);
  constexpr int kShift = 23 - F::kMantissaBits;
  constexpr int32_t kMinNormalBits = (127 - F::kBias + 1) << 23;
  constexpr int32_t kFull = ((1 << F::kExponentBits) - 1) << F::kMantissaBits;
  const int32_t magnitude = code & (kSign - 1);
  const int32_t shifted = magnitude << kShift;
  const int32_t normal = shifted + ((127 - F::kBias) << 23);
  // Put the mantissa of a subnormal under the smallest normal exponent, then subtract that normal
  // number.
  const int32_t subnormal =
      FloatBits(FloatFromBits(shifted + kMinNormalBits) - FloatFromBits(kMinNormalBits));
  int32_t w = Select(magnitude < (1 << F::kMantissaBits), subnormal, normal);
  if (F::kInfinity) w = Select(magnitude == kFull, kFloatInfinityBits, w);
  w |= static_cast<int32_t>(static_cast<uint32_t>(code & kSign) << (32 - F::kBits));
  if (F::kBits == 8)  // without infinity only the code of all ones is NaN
    w = Select(magnitude > (F::kInfinity ? kFull : kSign - 2), kNanBits, w);
  return FloatFromBits(w);
}

// Encodes a non-negative scale as E8M0, rounded up to a power of two (arXiv:2506.08027). NaN gives
// 255. Infinity and values above 2^127 give 254. 0 gives 0, which is 2^-127, the smallest value.
template <>
QSHARD_INLINE uint8_t Encode<E8M0>(float v) {
  const int32_t w = FloatBits(v) & kFloatMagnitudeMask;
  const int32_t exponent = w >> 23;
  const int32_t mantissa = w & kFloatMantissaMask;
  // Byte 0 covers every subnormal up to 2^-127.
  const int32_t up = Select(exponent == 0, mantissa > kTwoToMinus127Bits, mantissa != 0);
  int32_t e = exponent + Select(exponent < E8M0::kMaxCode, up, 0);
  e = Select(w >= kFloatInfinityBits, static_cast<int32_t>(E8M0::kMaxCode), e);
  return static_cast<uint8_t>(Select(w > kFloatInfinityBits, static_cast<int32_t>(E8M0::kNan), e));
}

template <>
QSHARD_INLINE float Decode<E8M0>(uint8_t code) {
  const int32_t w = Select(code == 0, kTwoToMinus127Bits, static_cast<int32_t>(code) << 23);
  return FloatFromBits(Select(code == E8M0::kNan, kNanBits, w));
}

}  // namespace qshard

#endif  // QSHARD_CORE_ROUND_H_
