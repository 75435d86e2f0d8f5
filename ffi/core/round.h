// Bit-exact conversions, the same on host and device: widen inputs, encode to a format, decode a
// code.
//
// All fp32 arithmetic assumes round-to-nearest-even and no flushing of subnormals (the CPU side
// enforces both, see cpu/parallel_for.h; nvcc's default is both). Every function is forced
// inline: each SIMD target compiles its own copy, and an out-of-line copy shared between targets
// would be an ODR trap.
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
constexpr int32_t kNanBits = 0x7FC00000;          // what every result that is NaN looks like
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

// condition ? a : b as mask arithmetic. g++ leaves a plain `?:` as a branch in some of these loops,
// and a loop with a branch is not vectorized.
QSHARD_INLINE int32_t Select(bool condition, int32_t a, int32_t b) {
  const int32_t mask = -static_cast<int32_t>(condition);
  return (a & mask) | (b & ~mask);
}

// Hardware differs in the bits of a NaN that it makes or passes on; results may not.
QSHARD_INLINE float CanonicalNan(float v) {
  const int32_t w = FloatBits(v);
  return FloatFromBits(Select((w & kFloatMagnitudeMask) > kFloatInfinityBits, kNanBits, w));
}

// 2^exponent, for exponents of normal fp32 numbers.
constexpr float PowerOfTwo(int exponent) {
  float v = 1.0f;
  for (int i = 0; i < exponent; ++i) v *= 2.0f;
  for (int i = 0; i > exponent; --i) v *= 0.5f;
  return v;
}

// --- widen: exact ---

QSHARD_INLINE float Widen(float x) { return x; }

QSHARD_INLINE float Widen(bfloat16 x) {
  return FloatFromBits(static_cast<int32_t>(static_cast<uint32_t>(x.bits) << 16));
}

QSHARD_INLINE float Widen(float16 x) {
  constexpr int32_t kMinNormalBits = (127 - 14) << 23;
  const int32_t magnitude = x.bits & 0x7FFF;
  const int32_t shifted = magnitude << 13;
  const int32_t normal = shifted + (112 << 23);
  // 2^-14 with the bits of a subnormal half as its mantissa, less 2^-14.
  const int32_t subnormal =
      FloatBits(FloatFromBits(shifted + kMinNormalBits) - FloatFromBits(kMinNormalBits));
  int32_t wide = Select(magnitude < 0x400, subnormal, normal);
  wide = Select(magnitude >= 0x7C00, shifted | kFloatInfinityBits, wide);
  return FloatFromBits(wide | static_cast<int32_t>(static_cast<uint32_t>(x.bits & 0x8000) << 16));
}

// --- narrow: nearest even, overflow to infinity, as IEEE conversions do; NaN becomes kNanBits, or
// the same NaN of a narrower type ---

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
  // Below the smallest normal half (2^-14) the fp32 adder rounds to a multiple of 2^-24.
  const int32_t subnormal =
      FloatBits(FloatFromBits(u) + PowerOfTwo(-1)) - FloatBits(PowerOfTwo(-1));
  const int32_t normal = (u - (112 << 23) + 0xFFF + ((u >> 13) & 1)) >> 13;
  int32_t h = Select(u < (113 << 23), subnormal, normal);
  h = Select(h > 0x7C00, 0x7C00, h);
  h = Select(u >= kFloatInfinityBits, 0x7C00, h);
  return {static_cast<uint16_t>(Select(u > kFloatInfinityBits, 0x7E00, h | sign))};
}

// --- elements ---

// Encodes v as a code of F: nearest even, saturating (|v| > max and +-inf give +-max), NaN gives
// F::kNan, the sign of zero is kept.
//
// Why it is right: on magnitudes at or above F's smallest normal, adding half an output unit (minus
// one, plus the lowest kept bit) to the fp32 pattern and shifting rounds to nearest even, a carry
// running into the exponent as it should. Below it, adding C = 2^23 output units makes the fp32
// adder itself round to a whole number of units.
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

// Decodes a code of F to fp32, exactly; NaN as kNanBits.
template <class F>
QSHARD_INLINE float Decode(uint8_t code) {
  constexpr int32_t kSign = 1 << (F::kBits - 1);
  constexpr int kShift = 23 - F::kMantissaBits;
  constexpr int32_t kMinNormalBits = (127 - F::kBias + 1) << 23;
  constexpr int32_t kFull = ((1 << F::kExponentBits) - 1) << F::kMantissaBits;
  const int32_t magnitude = code & (kSign - 1);
  const int32_t shifted = magnitude << kShift;
  const int32_t normal = shifted + ((127 - F::kBias) << 23);
  // The smallest normal with the bits of a subnormal as its mantissa, less the smallest normal.
  const int32_t subnormal =
      FloatBits(FloatFromBits(shifted + kMinNormalBits) - FloatFromBits(kMinNormalBits));
  int32_t w = Select(magnitude < (1 << F::kMantissaBits), subnormal, normal);
  if (F::kInfinity) w = Select(magnitude == kFull, kFloatInfinityBits, w);
  w |= static_cast<int32_t>(static_cast<uint32_t>(code & kSign) << (32 - F::kBits));
  if (F::kBits == 8)  // Without infinity only the code of all ones is NaN.
    w = Select(magnitude > (F::kInfinity ? kFull : kSign - 2), kNanBits, w);
  return FloatFromBits(w);
}

// E8M0 encodes a non-negative scale, rounded up to a power of two (arXiv:2506.08027). NaN gives
// 255, inf and everything above 2^127 give 254; 0 gives 0 (2^-127, the smallest there is).
template <>
QSHARD_INLINE uint8_t Encode<E8M0>(float v) {
  const int32_t w = FloatBits(v) & kFloatMagnitudeMask;
  const int32_t exponent = w >> 23;
  const int32_t mantissa = w & kFloatMantissaMask;
  // A subnormal up to 2^-127 is what byte 0 stands for.
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
