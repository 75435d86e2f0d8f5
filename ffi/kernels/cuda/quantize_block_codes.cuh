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

// What is known of elements and their scale, beyond that only the scale makes a product NaN.
enum class Known {
  kNothing,
  kPlain,      // products are below 7, so that codes of E2M1 need no limit, and no NaN
  kPowerOfTwo  // the scale is one, or NaN
};

__device__ __forceinline__ bool IsPlainE2M1(float amax, float scale) {
  return __fmul_rn(amax, scale) < 7.0f;
}

// Encode<Code>(x[i] * scale). E2M1: `signs` are those of x.
template <class Code, Known kKnown>
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
      return kKnown == Known::kPlain ? code : min(code, FloatBits(e2m1::kOne) + E2M1::kNan);
    });
    // The code of NaN has no sign.
    codes.w[0] = magnitudes + (kKnown != Known::kPlain && isnan(scale) ? 0 : signs);
#endif
    return codes;
  }
}

// Whether elements go two at a time.
template <class In, class Code, Known kKnown>
constexpr bool kPairs = kPacked<Code> && std::is_same_v<In, bfloat16> &&
                        kKnown == Known::kPowerOfTwo && !e2m1::kIsInHardware;

// Of a row of x.
template <class In, class Code, Known kKnown = Known::kNothing>
__device__ __forceinline__ EightCodes<Code> EncodeRow(const EightOf<In>& x, float scale) {
  if constexpr (kPairs<In, Code, kKnown>) {
    const uint32_t scales = e2m1::PowersOfTwo(scale, scale);
    uint32_t c[kEight / 2];
#pragma unroll
    for (int i = 0; i < kEight / 2; ++i) c[i] = e2m1::NearestOfTwo(x.w[i], scales);
    const uint32_t lo = __byte_perm(c[0], c[1], 0x6420), hi = __byte_perm(c[2], c[3], 0x6420);
    const uint32_t codes = __byte_perm(lo | lo >> 4, hi | hi >> 4, 0x6420);
    return {{codes | (isnan(scale) ? 0 : RowSigns<In>(x))}};
  } else {
    float v[kEight];
    WidenWords<In>(x, v);
    return EncodeEight<Code, kKnown>(v, scale, kPacked<Code> ? RowSigns<In>(x) : 0);
  }
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
template <class In, class Code, Known kKnown = Known::kNothing>
__device__ __forceinline__ void EncodeColumns(const EightOf<In> (&rows)[kEight],
                                              const float (&scale)[kEight],
                                              EightCodes<Code> (&codes)[kEight]) {
  uint32_t signs[kEight] = {};
  if constexpr (kPacked<Code>) ColumnSigns<In>(rows, signs);
  if constexpr (kPairs<In, Code, kKnown>) {
#pragma unroll
    for (int i = 0; i < kEight; i += 2) {
      const uint32_t scales = e2m1::PowersOfTwo(scale[i], scale[i + 1]);
      const auto four = [&](int first) {
        uint32_t c = e2m1::NearestOfTwo(rows[first + 3].w[i / 2], scales);
#pragma unroll
        for (int k = 2; k >= 0; --k)
          c = c * 16 + e2m1::NearestOfTwo(rows[first + k].w[i / 2], scales);
        return c - e2m1::kOneOfTwo * 0x1111;
      };
      const uint32_t lo = four(0), hi = four(4);
      codes[i].w[0] = __byte_perm(lo, hi, 0x5410) | (isnan(scale[i]) ? 0 : signs[i]);
      codes[i + 1].w[0] = __byte_perm(lo, hi, 0x7632) | (isnan(scale[i + 1]) ? 0 : signs[i + 1]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      float v[kEight];
#pragma unroll
      for (int k = 0; k < kEight; ++k) v[k] = ElementOf<In>(rows[k], i);
      codes[i] = EncodeEight<Code, kKnown>(v, scale[i], signs[i]);
    }
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_BLOCK_CODES_CUH_
