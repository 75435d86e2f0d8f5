// Codes of NVFP4 tiles in shared memory: rows of 8 elements, and 16 rows of two columns.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_CODES_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_CODES_CUH_

#include <cstdint>

#include "kernels/cuda/e2m1.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/quantize/codes.cuh"

namespace qshard::kernels {

constexpr int kBlock16 = kNvfp4Block;

// Reads from shared memory, aligned to kBytes or to 16 if that is less.
template <int kBytes>
__device__ __forceinline__ Words<kBytes> FromShared(const uint8_t* p) {
  constexpr int kOne = kBytes < 16 ? kBytes : 16;
  Words<kBytes> v;
#pragma unroll
  for (int i = 0; i < kBytes / kOne; ++i) {
    const auto one = reinterpret_cast<const MovedAs<kOne>*>(p)[i];
    memcpy(v.w + i * (kOne / 4), &one, kOne);
  }
  return v;
}

// Two neighbours of a row of x, and access to their values and signs.
template <class T>
struct PairOf {
  __device__ __forceinline__ float Value(int i) const {
    float v[2];
    WidenWords<T>(words, v);
    return v[i];
  }
  // Returns the signs in the highest bits of halves.
  __device__ __forceinline__ uint32_t Signs() const {
    return sizeof(T) == 4 ? __byte_perm(words.w[0], words.w[sizeof(T) / 4], 0x7632) : words.w[0];
  }
  Words<2 * sizeof(T)> words;
};

// Encodes eight elements of a row with stochastic rounding under one scale.
template <class In>
__device__ __forceinline__ uint32_t EncodeAtRandom(const EightOf<In>& x, float scale,
                                                   uint32_t random0, uint32_t random1) {
  uint32_t t[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    PairOf<In> pair;
#pragma unroll
    for (int k = 0; k < static_cast<int>(sizeof(In)) / 2; ++k)
      pair.words.w[k] = x.w[i * static_cast<int>(sizeof(In)) / 2 + k];
    const uint32_t random = i < 2 ? random0 : random1;
    t[i] = e2m1::RoundedHalves(
        __fmul_rn(fabsf(pair.Value(0)), scale), __fmul_rn(fabsf(pair.Value(1)), scale),
        i % 2 == 0 ? e2m1::SpreadBytes<0>(random) : e2m1::SpreadBytes<2>(random), pair.Signs());
  }
  const uint32_t a = __byte_perm(t[0], t[1], 0x7351), b = __byte_perm(t[2], t[3], 0x7351);
  const uint32_t codes = e2m1::PackHalves(__byte_perm(a, b, 0x5410), __byte_perm(a, b, 0x7632));
  return isnan(scale) ? codes & 0x77777777u : codes;
}

// Encodes 16 rows of two columns, each column with its own scale. random(k) returns the random
// bytes of row k, one per half.
template <bool kRandom, class T, class Random>
__device__ __forceinline__ void EncodeTwoColumns(const PairOf<T> (&x)[kBlock16],
                                                 const float (&scale)[2], const Random& random,
                                                 Words<8> (&codes)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if constexpr (kRandom) {
      uint32_t t[kEight];
#pragma unroll
      for (int k = 0; k < kEight; ++k) {
        const PairOf<T>& pair = x[h * kEight + k];
        t[k] = e2m1::RoundedHalves(__fmul_rn(fabsf(pair.Value(0)), scale[0]),
                                   __fmul_rn(fabsf(pair.Value(1)), scale[1]),
                                   random(h * kEight + k), pair.Signs());
      }
      // Rows 0, 2, 4, 6 and rows 1, 3, 5, 7 of both columns: the upper bytes of their halves.
      uint32_t even[2], odd[2];
#pragma unroll
      for (int parity = 0; parity < 2; ++parity) {
        const uint32_t a = __byte_perm(t[parity], t[parity + 2], 0x7351);
        const uint32_t b = __byte_perm(t[parity + 4], t[parity + 6], 0x7351);
        (parity == 0 ? even : odd)[0] = __byte_perm(a, b, 0x5410);
        (parity == 0 ? even : odd)[1] = __byte_perm(a, b, 0x7632);
      }
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const uint32_t word = e2m1::PackHalves(even[c], odd[c]);
        codes[c].w[h] = isnan(scale[c]) ? word & 0x77777777u : word;
      }
    } else {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float v[kEight];
#pragma unroll
        for (int k = 0; k < kEight; ++k) v[k] = x[h * kEight + k].Value(c);
        codes[c].w[h] = EncodeEight<E2M1, false>(v, scale[c]).w[0];
      }
    }
  }
}

// Finds the largest magnitudes of two columns.
template <class T>
__device__ __forceinline__ void AmaxOfTwo(const PairOf<T> (&x)[kBlock16], float (&amax)[2]) {
  using Abs = Magnitudes<T>;
  uint32_t m[sizeof(T) / 2];
#pragma unroll
  for (int k = 0; k < kBlock16; ++k) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T)) / 2; ++i)
      m[i] = k == 0 ? x[k].words.w[i] : Abs::MaxAbs(m[i], x[k].words.w[i]);
  }
  const uint32_t lo = Abs::Abs(m[0]), hi = Abs::Abs(m[sizeof(T) / 2 - 1]);
  amax[0] = Abs::Value(Abs::kPerWord == 2 ? lo & 0xFFFFu : lo);
  amax[1] = Abs::Value(Abs::kPerWord == 2 ? hi >> 16 : hi);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_CODES_CUH_
