// Eight elements of x: their magnitudes, and their codes under one scale.
//
// 4-bit blocks always use a scale from their own amax, so x * scale is NaN only if the scale is.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_CODES_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_CODES_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kEight = 8;

template <class In>
using EightOf = Words<kEight * sizeof(In)>;
template <class Code>
using EightCodes = Words<kStoredBits<Code>>;

// Returns element i, a constant. Equals Widen, except for the payload of a float16 NaN. Uses other
// instructions than WidenWords on purpose: with the same ones the compiler would keep all results
// in registers from one plane to the other.
template <class In>
__device__ __forceinline__ float ElementOf(const EightOf<In>& x, int i) {
  if constexpr (std::is_same_v<In, float>) {
    return __uint_as_float(x.w[i]);
  } else {
    const uint32_t w = x.w[i / 2];
    if constexpr (std::is_same_v<In, bfloat16>)
      return __uint_as_float(__byte_perm(w, 0, i % 2 == 0 ? 0x1044 : 0x3244));
    float v;
    if (i % 2 == 0)
      asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo; }" : "=f"(v) : "r"(w));
    else
      asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi; }" : "=f"(v) : "r"(w));
    return v;
  }
}

// --- maxima over lanes ---

// A step of a maximum over lanes that differ in the bits from kOffset down to kTo, for kCount words
// per lane. While a lane has more than one word it sends half of them away and goes on with the
// other half. Leaves the results in the first words of `w`: WordsLeft words, from word FirstWord
// on.
template <class In, int kOffset, int kTo, int kCount, int kSize>
__device__ __forceinline__ void ReduceScatter(uint32_t (&w)[kSize], int lane) {
  if constexpr (kOffset >= kTo) {
    if constexpr (kCount > 1) {
      const bool upper = (lane & kOffset) != 0;
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        const uint32_t lo = w[i], hi = w[kCount / 2 + i];
        const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, upper ? lo : hi, kOffset);
        w[i] = Magnitudes<In>::Max(upper ? hi : lo, got);
      }
      ReduceScatter<In, kOffset / 2, kTo, kCount / 2>(w, lane);
    } else {
      w[0] = Magnitudes<In>::Max(w[0], __shfl_xor_sync(0xFFFFFFFFu, w[0], kOffset));
      ReduceScatter<In, kOffset / 2, kTo, 1>(w, lane);
    }
  }
}
template <int kOffset, int kTo, int kCount>
__device__ __forceinline__ int FirstWord(int lane) {
  if constexpr (kOffset < kTo || kCount == 1)
    return 0;
  else
    return ((lane & kOffset) != 0 ? kCount / 2 : 0) + FirstWord<kOffset / 2, kTo, kCount / 2>(lane);
}
constexpr int WordsLeft(int offset, int to, int count) {
  return offset < to || count == 1 ? count : WordsLeft(offset / 2, to, count / 2);
}

// --- codes of eight elements under one scale ---

// Returns whether products are plain: below 7, so that E2M1 codes need no limit. `kPlain` below
// promises that. It has no effect on other formats.
__device__ __forceinline__ bool IsPlainE2M1(float amax, float scale) {
  return __fmul_rn(amax, scale) < 7.0f;
}

// Encode<Code>(x[i] * scale).
template <class Code, bool kPlain>
__device__ __forceinline__ EightCodes<Code> EncodeEight(const float (&x)[kEight], float scale) {
  float v[kEight];
#pragma unroll
  for (int i = 0; i < kEight; ++i) v[i] = __fmul_rn(x[i], scale);
  if constexpr (kPacked<Code>)
    return {{PackE2M1<!kPlain>(v)}};
  else
    return EncodeWords<Code>(v);
}

// Encodes a row of x.
template <class In, class Code, bool kPlain = false>
__device__ __forceinline__ EightCodes<Code> EncodeRow(const EightOf<In>& x, float scale) {
  float v[kEight];
  WidenWords<In>(x, v);
  return EncodeEight<Code, kPlain>(v, scale);
}

// Encodes a row of x with one scale per element.
template <class In, class Code>
__device__ __forceinline__ EightCodes<Code> EncodeRow(const EightOf<In>& x,
                                                      const float (&scale)[kEight]) {
  float v[kEight];
  WidenWords<In>(x, v);
#pragma unroll
  for (int i = 0; i < kEight; ++i) v[i] = __fmul_rn(v[i], scale[i]);
  return EncodeWords<Code>(v);
}

// Encodes the columns of eight rows, each with its own scale.
template <class In, class Code, bool kPlain = false>
__device__ __forceinline__ void EncodeColumns(const EightOf<In> (&rows)[kEight],
                                              const float (&scale)[kEight],
                                              EightCodes<Code> (&codes)[kEight]) {
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    float v[kEight];
#pragma unroll
    for (int k = 0; k < kEight; ++k) v[k] = ElementOf<In>(rows[k], i);
    codes[i] = EncodeEight<Code, kPlain>(v, scale[i]);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_CODES_CUH_
