// Eight elements of x, their magnitudes, and their codes under one scale.
//
// Of 4-bit codes, scales are those that blocks make of their own amax: x * scale is NaN only where
// the scale is.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_CODES_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_CODES_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/vector.cuh"

// Conversions to FP4 are in code for a family of devices, or for one, from compute capability 10
// on.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000
#define QSHARD_CUDA_FP4
#endif
#endif

namespace qshard::kernels {

constexpr int kEight = 8;

template <class In>
using EightOf = Words<kEight * sizeof(In)>;
template <class Code>
using EightCodes = Words<kStoredBits<Code>>;

// Element i, a constant. Equals Widen, but for the payload of a float16 NaN. WidenWords has other
// instructions for it: of the same ones the compiler would keep the results, all of them, in
// registers from one plane to the other.
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

// A step of a maximum over lanes: of `kCount` words, and the lanes whose numbers differ in the bits
// from kOffset down to kTo. A lane gives half of its words away and goes on with the other half,
// while it has more than one. What is left are the first words of `w`, of those from `FirstWord`
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

// --- signs of eight elements ---

// The highest bytes of both halves of a, and of both halves of b: lows first.
__device__ __forceinline__ uint32_t HalfTops(uint32_t a, uint32_t b) {
  return __byte_perm(a, b, 0x7351);
}
template <class In>
__device__ __forceinline__ uint32_t RowSigns(const EightOf<In>& x) {
  if constexpr (sizeof(In) == 4) {
    return SignNibbles(WordTops(x.w[0], x.w[2], x.w[4], x.w[6]),
                       WordTops(x.w[1], x.w[3], x.w[5], x.w[7]));
  } else {
    const uint32_t a = HalfTops(x.w[0], x.w[1]), b = HalfTops(x.w[2], x.w[3]);
    return SignNibbles(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  }
}

// Of the columns of eight rows.
template <class In>
__device__ __forceinline__ void ColumnSigns(const EightOf<In> (&rows)[kEight],
                                            uint32_t (&signs)[kEight]) {
  if constexpr (sizeof(In) == 4) {
#pragma unroll
    for (int i = 0; i < kEight; ++i)
      signs[i] = SignNibbles(WordTops(rows[0].w[i], rows[2].w[i], rows[4].w[i], rows[6].w[i]),
                             WordTops(rows[1].w[i], rows[3].w[i], rows[5].w[i], rows[7].w[i]));
  } else {
#pragma unroll
    for (int i = 0; i < kEight / 2; ++i) {
      const uint32_t a = HalfTops(rows[0].w[i], rows[2].w[i]);
      const uint32_t b = HalfTops(rows[4].w[i], rows[6].w[i]);
      const uint32_t c = HalfTops(rows[1].w[i], rows[3].w[i]);
      const uint32_t d = HalfTops(rows[5].w[i], rows[7].w[i]);
      signs[2 * i] = SignNibbles(__byte_perm(a, b, 0x5410), __byte_perm(c, d, 0x5410));
      signs[2 * i + 1] = SignNibbles(__byte_perm(a, b, 0x7632), __byte_perm(c, d, 0x7632));
    }
  }
}

// --- codes of eight elements under one scale ---

// Whether all elements of a block are plain: below 7, so that their codes need no limit, and no
// NaN.
__device__ __forceinline__ bool IsPlainE2M1(float amax, float scale) {
  return __fmul_rn(amax, scale) < 7.0f;
}

// Encode<Code>(x[i] * scale). E2M1: x[i] * scale is NaN only if `scale` is; `signs` are those of x;
// `kPlain`: all are.
template <class Code, bool kPlain = false>
__device__ __forceinline__ EightCodes<Code> EncodeEight(const float (&x)[kEight], float scale,
                                                        uint32_t signs) {
  if constexpr (!kPacked<Code>) {
    float v[kEight];
#pragma unroll
    for (int i = 0; i < kEight; ++i) v[i] = __fmul_rn(x[i], scale);
    return EncodeWords<Code>(v);
  } else {
    EightCodes<Code> codes;
#if defined(QSHARD_CUDA_FP4)
    float v[kEight];
#pragma unroll
    for (int i = 0; i < kEight; ++i) v[i] = __fmul_rn(x[i], scale);
    asm("{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; "
        "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3; cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; "
        "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d}; }"
        : "=r"(codes.w[0])
        : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
#else
    const uint32_t magnitudes = PackMagnitudes([&](int i) {
      const int32_t code = e2m1::Nearest(__fmul_rn(fabsf(x[i]), scale));
      return kPlain ? code : min(code, FloatBits(e2m1::kOne) + E2M1::kNan);
    });
    // The code of NaN has no sign.
    codes.w[0] = magnitudes + (!kPlain && isnan(scale) ? 0 : signs);
#endif
    return codes;
  }
}

// Of a row of x.
template <class In, class Code, bool kPlain = false>
__device__ __forceinline__ EightCodes<Code> EncodeRow(const EightOf<In>& x, float scale) {
  float v[kEight];
  WidenWords<In>(x, v);
  return EncodeEight<Code, kPlain>(v, scale, kPacked<Code> ? RowSigns<In>(x) : 0);
}

// Of a row of x under a scale for each element.
template <class In, class Code>
__device__ __forceinline__ EightCodes<Code> EncodeRow(const EightOf<In>& x,
                                                      const float (&scale)[kEight]) {
  float v[kEight];
  WidenWords<In>(x, v);
#pragma unroll
  for (int i = 0; i < kEight; ++i) v[i] = __fmul_rn(v[i], scale[i]);
  return EncodeWords<Code>(v);
}

// Of the columns of eight rows, each under its scale.
template <class In, class Code, bool kPlain = false>
__device__ __forceinline__ void EncodeColumns(const EightOf<In> (&rows)[kEight],
                                              const float (&scale)[kEight],
                                              EightCodes<Code> (&codes)[kEight]) {
  uint32_t signs[kEight] = {};
  if constexpr (kPacked<Code>) ColumnSigns<In>(rows, signs);
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    float v[kEight];
#pragma unroll
    for (int k = 0; k < kEight; ++k) v[k] = ElementOf<In>(rows[k], i);
    codes[i] = EncodeEight<Code, kPlain>(v, scale[i], signs[i]);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_CODES_CUH_
