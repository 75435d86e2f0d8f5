// Scales of blocks in few instructions: the formulas of core/scale.h and core/block_scale.h, bit
// for bit, where a thread has few elements to share the work.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_SCALES_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_SCALES_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/quantize/codes.cuh"
#include "kernels/quantize_block.h"

namespace qshard::kernels {

// What blocks take from the tensor: nothing, or what follows from the global scale S of NVFP4.
struct NoGlobal {};
struct GlobalNvfp4 {
  float sixth, inverse;  // fl(S * fl(1/6)), fl(1/S)
  float largest;         // amaxes above make NaN
};

// The largest amax that does not show: FLT_MAX, or infinity.
__device__ __forceinline__ float LargestAmax(Nonfinite nonfinite) {
  return nonfinite == Nonfinite::kNan ? kFloatMax : FloatFromBits(kFloatInfinityBits);
}

// One scale for some whole matrices, which is not made of blocks. With amaxes, which are raised
// unless there is no place for them, infinities can show, and ScaleOrFirst makes the scale.
template <bool kWithAmax>
struct GivenScales {
  using Stored = float;
  const float* scale;
  int64_t matrices;  // that share a scale; 0: all
  // If kWithAmax:
  float* amax;
  float target;
  Nonfinite nonfinite;
};

// What fast kernels know of scales: the side of blocks, those of the formats with these scales;
// what blocks take from the tensor; whether scales are given, and whether the kernel needs amaxes.
template <int kSide, bool kWithGlobal = false, bool kAreGiven = false, bool kWithAmax = true>
struct FastScales {
  static constexpr int kBlock = kSide;
  static constexpr bool kGlobal = kWithGlobal, kGiven = kAreGiven, kAmax = kWithAmax;
  using Global = std::conditional_t<kGlobal, GlobalNvfp4, NoGlobal>;
};
template <class Scales>
struct Fast : FastScales<0> {};  // has no fast kernels
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

// How many matrices in a row have one global scale; 0 if a matrix has more than one.
template <class Scales>
int64_t MatricesOfGlobal(const Scales& scales, const Blocks& b) {
  if constexpr (Fast<Scales>::kGlobal) {
    const int64_t grid = b.GridRows() * b.GridCols();
    return scales.run % grid == 0 ? scales.run / grid : 0;
  } else {
    return 1;
  }
}

// `place`: which run of blocks.
template <class Scales>
__device__ __forceinline__ NoGlobal GlobalAt(const Scales&, int64_t) {
  return {};
}
__device__ __forceinline__ GlobalNvfp4 GlobalAt(const Nvfp4Scales& scales, int64_t place) {
  const float s =
      qshard::GlobalScaleNvfp4(__ldg(scales.global_amax + place * scales.step), scales.scale_max);
  return {__fmul_rn(s, Divide(1.0f, E2M1::kMax)), ScaleInverse(s), LargestAmax(scales.nonfinite)};
}

// `amax` is a magnitude, or any NaN.
//
// A power of two needs no division. With a = 2^i (1 + p) and max = 2^j (1 + q), the quotient is in
// [2^(j - i), 2^(j - i + 1)) if p <= q and else in [2^(j - i - 1), 2^(j - i)), also when rounded:
// for q = 3/4, which is that of both formats, no quotient is within half a unit below a power of
// two. Those of 2^127 and above, FLT_MAX with them, go to 2^127.
template <class Code>
__device__ __forceinline__ BlockScale<float> ScaleOf(const FloatScales& scales, NoGlobal,
                                                     float amax) {
  if (!scales.pow2) return scales.Of(amax, Code::kMax);
  constexpr int32_t kMaxQ = 0x600000;
  constexpr int kMaxJ = (1 << (Code::kExponentBits - 1)) - (Code::kInfinity ? 1 : 0);
  static_assert(Code::kMax == 1.75f * (1 << kMaxJ));
  const float a = amax <= scales.eps ? scales.eps : amax;  // keeps NaN
  const int32_t bits = __float_as_int(a);
  // 127 more than the exponent of the scale.
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
    // Rounded up to a power of two, but subnormals up to 2^-127 have code 0.
    const uint32_t bits = __float_as_uint(__fmul_rn(amax, kInverseMax)) & kFloatMagnitudeMask;
    e = min((bits + kFloatMantissaMask) >> 23, uint32_t{E8M0::kMaxCode});
    if (bits <= uint32_t{kTwoToMinus127Bits}) e = 0;
    if (!(amax <= LargestAmax(scales.nonfinite))) e = E8M0::kNan;
  } else {
    e = E8M0FromAmax(ShownAmax(amax, scales.nonfinite), Code::kMax, PowerRounding::kFloor);
  }
  return {MultiplierE8M0(static_cast<uint8_t>(e)), static_cast<uint8_t>(e)};
}

// fl(amax * sixth), NaN for an amax that is to show.
__device__ __forceinline__ float UnderSixth(float amax, GlobalNvfp4 global) {
  return __fmul_rn(amax <= global.largest ? amax : FloatFromBits(kNanBits), global.sixth);
}

// What elements of a block with this E4M3 scale are multiplied by.
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

// What the E4M3 codes of NVFP4's scales, without NaN's sign, multiply elements by: a tile has far
// more blocks than there are codes.
constexpr int kScaleCodes = 128;

// By the first threads of the block.
__device__ __forceinline__ void FillMultipliers(GlobalNvfp4 global, float (&table)[kScaleCodes]) {
  if (threadIdx.x < kScaleCodes)
    table[threadIdx.x] = MultiplierOf(static_cast<uint16_t>(threadIdx.x), global);
}

// The codes of four blocks' scales. Without kShows no amax is above the largest that does not show.
template <bool kShows>
__device__ __forceinline__ uint32_t FourScalesNvfp4(const float (&amax)[4], GlobalNvfp4 global) {
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
    v[i] = kShows ? UnderSixth(amax[i], global) : __fmul_rn(amax[i], global.sixth);
  return EncodePair<E4M3>(v[0], v[1]) | EncodePair<E4M3>(v[2], v[3]) << 16;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_SCALES_CUH_
