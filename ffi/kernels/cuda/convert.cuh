// Conversions of core/round.h by hardware instructions, two elements each. Results are
// bit-identical. Where the hardware differs, in the bits of a NaN, comments say so and callers fall
// back on core/round.h.
//
// The FP8 conversions need compute capability 8.9.
#ifndef QSHARD_KERNELS_CUDA_CONVERT_CUH_
#define QSHARD_KERNELS_CUDA_CONVERT_CUH_

#include <cstdint>
#include <type_traits>

#include "core/round.h"
#include "kernels/cuda/e2m1.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

// --- widen: the floats of a vector. Equals Widen, except for the payload of a float16 NaN. ---

template <class In, int kBytes>
__device__ __forceinline__ void WidenWords(const Words<kBytes>& x,
                                           float (&v)[kBytes / sizeof(In)]) {
  if constexpr (kBytes < 4) {
    v[0] = Widen(In{x.value});
  } else {
#pragma unroll
    for (int i = 0; i < kBytes / 4; ++i) {
      const uint32_t w = x.w[i];
      if constexpr (std::is_same_v<In, float>) {
        v[i] = __uint_as_float(w);
      } else if constexpr (std::is_same_v<In, bfloat16>) {
        v[2 * i] = __uint_as_float(w << 16);
        v[2 * i + 1] = __uint_as_float(w & 0xFFFF0000u);
      } else {
        asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
            : "=f"(v[2 * i]), "=f"(v[2 * i + 1])
            : "r"(w));
      }
    }
  }
}

// --- storage of codes: two a byte, or one ---

template <class F>
constexpr bool kPacked = F::kBits == 4;
template <class F>
constexpr int kStoredBits = kPacked<F> ? 4 : 8;

// --- 6-bit elements through FP8 ---

// The hardware converts only to FP8. A 6-bit element has the same codes as the FP8 format with as
// many mantissa bits, after multiplication by a power of two and up to its largest value: it has
// fewer exponents at the top, and the same subnormals.
template <class F>
using AsFp8 = std::conditional_t<F::kMantissaBits == E4M3::kMantissaBits, E4M3, E5M2>;
template <class F>
constexpr bool kHasFp8 = F::kMantissaBits >= E5M2::kMantissaBits;
template <class F>
constexpr float kToFp8 = PowerOfTwo(F::kBias - AsFp8<F>::kBias);

// Converts 8-bit codes, one a byte, to 6-bit codes. The sign moves. Codes above the largest
// saturate, and so does NaN, which the hardware gives no sign.
__device__ __forceinline__ uint32_t SixBits(uint32_t codes) {
  const uint32_t above = (codes >> 5 | codes >> 6) & 0x01010101u;
  return (codes & 0x1F1F1F1Fu) | above * 0x1F | (codes >> 2 & 0x20202020u);
}
__device__ __forceinline__ uint32_t EightBits(uint32_t codes) {
  return (codes & 0x1F1F1F1Fu) | (codes & 0x20202020u) << 2;
}

// --- encode: codes as bytes, the first the lowest. Equals Encode<F> for every input. ---

template <class F>
__device__ __forceinline__ uint16_t EncodePair(float lo, float hi) {
  if constexpr (!kHasFp8<F>) {
    return static_cast<uint16_t>(Encode<F>(lo) | Encode<F>(hi) << 8);
  } else if constexpr (F::kBits == 6) {
    return static_cast<uint16_t>(
        SixBits(EncodePair<AsFp8<F>>(__fmul_rn(lo, kToFp8<F>), __fmul_rn(hi, kToFp8<F>))));
  } else {
    uint16_t codes;
    if constexpr (std::is_same_v<F, E4M3>)
      asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
    else
      asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(hi), "f"(lo));
    return codes;
  }
}

// Encode<F>(v).
template <class F>
__device__ __forceinline__ uint32_t EncodeOne(float v) {
  if constexpr (kPacked<F>) return EncodeE2M1(v);
  return EncodePair<F>(v, 0.0f) & 0xFF;
}

// Returns the codes of v as stored, the first in the lowest bits.
template <class F, int kCount>
__device__ __forceinline__ Words<kCount * kStoredBits<F> / 8> EncodeWords(
    const float (&v)[kCount]) {
  Words<kCount * kStoredBits<F> / 8> codes;
  if constexpr (kCount == 1) {
    codes.value = static_cast<uint8_t>(EncodeOne<F>(v[0]));
  } else if constexpr (kPacked<F>) {
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) codes.w[i] = PackE2M1(v + 8 * i);
  } else if constexpr (F::kBits == 6) {
    float down[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) down[i] = __fmul_rn(v[i], kToFp8<F>);
    codes = EncodeWords<AsFp8<F>>(down);
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) codes.w[i] = SixBits(codes.w[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const uint16_t lo = EncodePair<F>(v[4 * i], v[4 * i + 1]);
      const uint16_t hi = EncodePair<F>(v[4 * i + 2], v[4 * i + 3]);
      asm("mov.b32 %0, {%1, %2};" : "=r"(codes.w[i]) : "h"(lo), "h"(hi));
    }
  }
  return codes;
}

// --- decode: equals Decode<F>, except for the bits of a NaN ---

template <class F>
__device__ __forceinline__ void DecodePair(uint16_t codes, float& lo, float& hi) {
  if constexpr (!kHasFp8<F>) {
    lo = Decode<F>(static_cast<uint8_t>(codes)), hi = Decode<F>(static_cast<uint8_t>(codes >> 8));
  } else if constexpr (F::kBits == 6) {
    DecodePair<AsFp8<F>>(static_cast<uint16_t>(EightBits(codes)), lo, hi);
    lo = __fmul_rn(lo, 1.0f / kToFp8<F>), hi = __fmul_rn(hi, 1.0f / kToFp8<F>);
  } else {
    uint32_t halves;  // every FP8 value is a half
    if constexpr (std::is_same_v<F, E4M3>)
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(codes));
    else
      asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(codes));
    float v[2];
    WidenWords<float16>(Words<4>{{halves}}, v);
    lo = v[0], hi = v[1];
  }
}

// Decodes a vector of codes as stored.
template <class F, int kCount>
__device__ __forceinline__ void DecodeWords(const Words<kCount * kStoredBits<F> / 8>& codes,
                                            float (&v)[kCount]) {
  if constexpr (kCount == 1) {
    float zero;
    DecodePair<F>(codes.value, v[0], zero);
  } else if constexpr (kPacked<F>) {
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) UnpackE2M1(codes.w[i], v + 8 * i);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 4; ++i) {
      const uint32_t w = codes.w[i];
      DecodePair<F>(static_cast<uint16_t>(w), v[4 * i], v[4 * i + 1]);
      DecodePair<F>(static_cast<uint16_t>(w >> 16), v[4 * i + 2], v[4 * i + 3]);
    }
  }
}

// --- narrow: v rounded to Out. Equals Narrow<Out>, except for the bits of a NaN. ---

template <class Out, int kCount>
__device__ __forceinline__ Words<kCount * sizeof(Out)> NarrowWords(const float (&v)[kCount]) {
  Words<kCount * sizeof(Out)> x;
  if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x.w[i] = __float_as_uint(v[i]);
  } else if constexpr (kCount == 1) {
    x.value = Narrow<Out>(v[0]).bits;
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if constexpr (std::is_same_v<Out, bfloat16>)
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x.w[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
      else
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(x.w[i]) : "f"(v[2 * i + 1]), "f"(v[2 * i]));
    }
  }
  return x;
}

// NarrowWords that equals Narrow<Out> for every input. `any_nan` selects the rare path that
// replaces NaNs.
template <class Out, int kCount>
__device__ __forceinline__ Words<kCount * sizeof(Out)> NarrowExactly(const float (&v)[kCount],
                                                                     bool any_nan) {
  Words<kCount * sizeof(Out)> x = NarrowWords<Out>(v);
  if (any_nan) {
    const Out nan = Narrow<Out>(FloatFromBits(kNanBits));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (!isnan(v[i])) continue;
      if constexpr (sizeof(Out) == 4)
        x.w[i] = __float_as_uint(nan);
      else if constexpr (kCount == 1)
        x.value = nan.bits;
      else
        x.w[i / 2] = __byte_perm(x.w[i / 2], nan.bits, i % 2 == 0 ? 0x3254 : 0x5410);
    }
  }
  return x;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_CONVERT_CUH_
