// Portable vector layer: the definitions in core/round.h, one element at a time, for any compiler
// and processor.
#ifndef QSHARD_KERNELS_CPU_SIMD_VECTORS_PLAIN_H_
#define QSHARD_KERNELS_CPU_SIMD_VECTORS_PLAIN_H_

#include "kernels/cpu/simd/vectors.h"

namespace qshard::kernels {
namespace {

constexpr int64_t kBlock = 16;

QSHARD_INLINE void Prefetch(const void*, int64_t, int64_t) {}

// --- scales of kBlock elements: one for all, one each, or one per 16 ---

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

// codes[i] = Encode(x[i] * scale of i) for i < kBlock, one code a byte.
template <class In, class Code>
QSHARD_INLINE void EncodeBlock(const In* __restrict x, const BlockScales& scales,
                               uint8_t* __restrict codes) {
  for (int64_t i = 0; i < kBlock; ++i) codes[i] = Encode<Code>(Widen(x[i]) * scales.each[i]);
}

// x[i] = Narrow(Decode(codes[i]) * scale of i) for i < kBlock.
template <class Code, class Out>
QSHARD_INLINE void DecodeBlock(const uint8_t* __restrict codes, const BlockScales& scales,
                               Out* __restrict x) {
  for (int64_t i = 0; i < kBlock; ++i) x[i] = Narrow<Out>(Decode<Code>(codes[i]) * scales.each[i]);
}

// --- bytes ---

void TransposeTile(const uint8_t* __restrict in, int64_t in_stride, uint8_t* __restrict out,
                   int64_t out_stride) {
  for (int64_t j = 0; j < kByteTile; ++j)
    for (int64_t i = 0; i < kByteTile; ++i) out[j * out_stride + i] = in[i * in_stride + j];
}

// --- amax ---

constexpr int kVectorBytes = 16, kShortBytes = 16;

template <class V>
QSHARD_INLINE int32_t LargestLane(V v) {
  int32_t largest = 0;
  for (size_t i = 0; i < sizeof(v) / sizeof(v[0]); ++i) largest = largest > v[i] ? largest : v[i];
  return largest;
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_VECTORS_PLAIN_H_
