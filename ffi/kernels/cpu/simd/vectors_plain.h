// The vector layer by the definitions in core/round.h, one element at a time, for any compiler and
// processor.
#ifndef QSHARD_KERNELS_CPU_SIMD_VECTORS_PLAIN_H_
#define QSHARD_KERNELS_CPU_SIMD_VECTORS_PLAIN_H_

#include "core/round.h"
#include "kernels/cpu/simd/magnitude.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kBlock = 16;

QSHARD_INLINE void Prefetch(const void*, int64_t, int64_t) {}

// --- scales of kBlock elements: one for all, for each, for each 16 ---

struct BlockScales {
  float each[kBlock];
};

QSHARD_INLINE BlockScales OneScale(float scale) {
  BlockScales one;
  for (float& s : one.each) s = scale;
  return one;
}

template <class In>
QSHARD_INLINE BlockScales EachScales(const float* scale) {
  BlockScales each;
  __builtin_memcpy(each.each, scale, sizeof(each));
  return each;
}

template <class In>
QSHARD_INLINE BlockScales SixteenScales(const float* scale) {
  return OneScale(*scale);
}

// --- codes ---

// codes[i] = Encode(x[i] * scale of i), i < kBlock, one code a byte.
template <class In, class Code>
QSHARD_INLINE void EncodeBlock(const In* __restrict x, const BlockScales& scales,
                               uint8_t* __restrict codes) {
  for (int64_t i = 0; i < kBlock; ++i) codes[i] = Encode<Code>(Widen(x[i]) * scales.each[i]);
}

// x[i] = Narrow(Decode(codes[i]) * scale of i), i < kBlock.
template <class Code, class Out>
QSHARD_INLINE void DecodeBlock(const uint8_t* __restrict codes, const BlockScales& scales,
                               Out* __restrict x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] = Narrow<Out>(Decode<Code>(codes[i]) * scales.each[i]);
}

// --- bytes ---

void TransposeTile(const uint8_t* __restrict in, int64_t in_stride, uint8_t* __restrict out,
                   int64_t out_stride) {
  for (int64_t j = 0; j < kTile; ++j)
    for (int64_t i = 0; i < kTile; ++i) out[j * out_stride + i] = in[i * in_stride + j];
}

// --- amax ---

// The largest |x[i]|, i < n; 0 if there is none. NaN is larger than all. Widening keeps the order
// of bits, so x's own are compared.
template <class In>
QSHARD_INLINE float LargestOf(const In* x, int64_t n) {
  using Bits = MagnitudeOf<In>;
  constexpr int kWidth = 16;
  Bits lanes[kWidth] = {};
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    for (int j = 0; j < kWidth; ++j) {
      const Bits m = Magnitude(x[i + j]);
      lanes[j] = lanes[j] > m ? lanes[j] : m;
    }
  }
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j)
      lanes[j] = lanes[j] > lanes[j + half] ? lanes[j] : lanes[j + half];
  Bits largest = lanes[0];
  for (; i < n; ++i) largest = largest > Magnitude(x[i]) ? largest : Magnitude(x[i]);
  In v;
  __builtin_memcpy(&v, &largest, sizeof(v));
  return Widen(v);
}

// down[i] = the largest |x[r * stride + i]|, r < rows; i < n <= kChunk.
template <class In>
QSHARD_INLINE void LargestDown(const In* __restrict x, int64_t stride, int64_t rows, int64_t n,
                               In* __restrict down) {
  MagnitudeOf<In> largest[kChunk] = {};
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < n; ++i) {
      const auto m = Magnitude(x[r * stride + i]);
      largest[i] = largest[i] > m ? largest[i] : m;
    }
  }
  __builtin_memcpy(down, largest, n * sizeof(In));
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_VECTORS_PLAIN_H_
