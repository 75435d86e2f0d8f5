// Block scales in few instructions, for threads that have few elements per scale. Equals
// core/scale.h and core/block_scale.h bit for bit.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_SCALES_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_SCALES_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/quantize/codes.cuh"
#include "kernels/quantize_block.h"

namespace qshard::kernels {

// Values that blocks take from the tensor: none, or for NVFP4 those that follow from the global
// scale S.
struct NoGlobal {};
struct GlobalNvfp4 {
  float sixth, inverse;  // fl(S * fl(1/6)), fl(1/S)
  float largest;         // larger amaxes give a NaN scale
};

// Returns the largest amax that does not give a NaN scale: FLT_MAX with kNan, else infinity.
__device__ __forceinline__ float LargestAmax(Nonfinite nonfinite) {
  return nonfinite == Nonfinite::kNan ? kFloatMax : FloatFromBits(kFloatInfinityBits);
}

// A scale passed for whole matrices, instead of one computed per block. With kWithAmax the kernel
// also raises amaxes (unless null), replaces infinities by NaN if `nonfinite` is kNan, and applies
// ScaleOrFirst.
template <bool kWithAmax>
struct GivenScales {
  using Stored = float;
  const float* scale;
  int64_t matrices;  // matrices per scale; 0: all
  // If kWithAmax:
  float* amax;
  float target;
  Nonfinite nonfinite;
};

// Properties of scales for fast kernels: the side of blocks in formats with these scales, the
// values that blocks take from the tensor, whether scales are passed, and whether the kernel needs
// amaxes.
template <int kSide, bool kWithGlobal = false, bool kAreGiven = false, bool kWithAmax = true>
struct FastScales {
  static constexpr int kBlock = kSide;
  static constexpr bool kGlobal = kWithGlobal, kGiven = kAreGiven, kAmax = kWithAmax;
  using Global = std::conditional_t<kGlobal, GlobalNvfp4, NoGlobal>;
};
template <class Scales>
struct Fast : FastScales<0> {};  // no fast kernels
template <>
struct Fast<FloatScales> : FastScales<128> {};
template <>
struct Fast<E8M0Scales> : FastScales<32> {};
template <>
struct Fast<Nvfp4Scales> : FastScales<kNvfp4Block, true> {};
template <bool kWithAmax>
struct Fast<GivenScales<kWithAmax>> : FastScales<128, false, true, kWithAmax> {};
template <class Scales>
constexpr int kFastBlock = Fast<Scales>::kBlock;

// Returns how many consecutive matrices share a global scale, or 0 if a matrix has more than one.
template <class Scales>
int64_t MatricesOfGlobal(const Scales& scales, const Blocks& b) {
  if constexpr (Fast<Scales>::kGlobal) {
    const int64_t grid = b.GridRows() * b.GridCols();
    return scales.run % grid == 0 ? scales.run / grid : 0;
  } else {
    return 1;
  }
}

// Returns the values of the global scale at `place`, an index of runs of blocks.
template <class Scales>
__device__ __forceinline__ NoGlobal GlobalAt(const Scales&, int64_t) {
  return {};
}
__device__ __forceinline__ GlobalNvfp4 GlobalOf(float amax, float scale_max, Nonfinite nonfinite) {
  const float s = qshard::GlobalScaleNvfp4(amax, scale_max);
  return {__fmul_rn(s, Divide(1.0f, E2M1::kMax)), ScaleInverse(s), LargestAmax(nonfinite)};
}
__device__ __forceinline__ GlobalNvfp4 GlobalAt(const Nvfp4Scales& scales, int64_t place) {
  return GlobalOf(__ldg(scales.global_amax + place * scales.step), scales.scale_max,
                  scales.nonfinite);
}

// Returns the scale of a block. `amax` is a magnitude or any NaN.
//
// A power of two needs no division. Let a = 2^i (1 + p) and max = 2^j (1 + q). The quotient is in
// [2^(j - i), 2^(j - i + 1)) if p <= q, and else in [2^(j - i - 1), 2^(j - i)). That also holds
// after rounding: for q = 3/4, as in both formats, no quotient is within half an ulp below a power
// of two. Scales of 2^127 and above, including FLT_MAX, become 2^127.
template <class Code>
__device__ __forceinline__ BlockScale<float> ScaleOf(const FloatScales& scales, NoGlobal,
                                                     float amax) {
  if (!scales.pow2) return scales.Of(amax, Code::kMax);
  constexpr int32_t kMaxQ = 0x600000;
  constexpr int kMaxJ = (1 << (Code::kExponentBits - 1)) - (Code::kInfinity ? 1 : 0);
  static_assert(Code::kMax == 1.75f * (1 << kMaxJ));
  const float a = amax <= scales.eps ? scales.eps : amax;  // keeps NaN
  const int32_t bits = __float_as_int(a);
  // 127 plus the exponent of the scale.
  const int32_t e =
      min(127 + 127 + kMaxJ - (bits >> 23) - ((bits & kFloatMantissaMask) > kMaxQ), 254);
  const bool plain = bits != 0 && static_cast<uint32_t>(bits) < 0x7F800000u;
  const int32_t other =
      scales.nonfinite == Nonfinite::kNan && bits != 0 ? kNanBits : 127 << 23;  // 1
  const int32_t scale = plain ? e << 23 : other;
  const int32_t inverse = e == 254 ? kTwoToMinus127Bits : (254 - e) << 23;
  return {__int_as_float(scale), __int_as_float(plain ? inverse : other)};
}

template <class Code>
__device__ __forceinline__ BlockScale<uint8_t> ScaleOf(const E8M0Scales& scales, NoGlobal,
                                                       float amax) {
  uint32_t e;
  if (scales.rounding == PowerRounding::kUp) {
    constexpr float kInverseMax = 1.0f / Code::kMax;
    // Round up to a power of two, except that subnormals up to 2^-127 have code 0.
    const uint32_t bits = __float_as_uint(__fmul_rn(amax, kInverseMax)) & kFloatMagnitudeMask;
    e = min((bits + kFloatMantissaMask) >> 23, uint32_t{E8M0::kMaxCode});
    if (bits <= uint32_t{kTwoToMinus127Bits}) e = 0;
    if (!(amax <= LargestAmax(scales.nonfinite))) e = E8M0::kNan;
  } else {
    e = E8M0FromAmax(AmaxOrNan(amax, scales.nonfinite), Code::kMax, PowerRounding::kFloor);
  }
  return {MultiplierE8M0(static_cast<uint8_t>(e)), static_cast<uint8_t>(e)};
}

// Returns fl(amax * sixth), or NaN for an amax above `largest`.
__device__ __forceinline__ float UnderSixth(float amax, GlobalNvfp4 global) {
  return __fmul_rn(amax <= global.largest ? amax : FloatFromBits(kNanBits), global.sixth);
}

// Returns the multiplier of elements in a block with this E4M3 scale.
__device__ __forceinline__ float MultiplierOf(uint16_t code, GlobalNvfp4 global) {
  float d, zero;
  DecodePair<E4M3>(code, d, zero);
  const float inverse = __frcp_rn(__fmul_rn(d, global.inverse));
  return __float_as_int(inverse) == kFloatInfinityBits ? kFloatMax : inverse;
}

template <class Code>
__device__ __forceinline__ BlockScale<uint8_t> ScaleOf(const Nvfp4Scales&, GlobalNvfp4 global,
                                                       float amax) {
  const uint16_t code = EncodePair<E4M3>(UnderSixth(amax, global), 0.0f);
  return {MultiplierOf(code, global), static_cast<uint8_t>(code)};
}

// Number of E4M3 codes of scales without a sign. Their multipliers are tabulated, because a tile
// has far more blocks than there are codes.
constexpr int kScaleCodes = 128;

// Fills the table. Run by the first threads of the thread block.
__device__ __forceinline__ void FillMultipliers(GlobalNvfp4 global, float (&table)[kScaleCodes]) {
  if (threadIdx.x < kScaleCodes)
    table[threadIdx.x] = MultiplierOf(static_cast<uint16_t>(threadIdx.x), global);
}

// Returns the codes of four blocks' scales. Without kMayExceed no amax may be above `largest`.
template <bool kMayExceed>
__device__ __forceinline__ uint32_t FourScalesNvfp4(const float (&amax)[4], GlobalNvfp4 global) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = kMayExceed ? UnderSixth(amax[i], global) : __fmul_rn(amax[i], global.sixth);
  return EncodePair<E4M3>(v[0], v[1]) | EncodePair<E4M3>(v[2], v[3]) << 16;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_SCALES_CUH_
