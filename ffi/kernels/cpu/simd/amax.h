// Amaxes of rows and columns, as maxima of bit patterns. Widening keeps their order, so an input's
// own bits are compared.
#ifndef QSHARD_KERNELS_CPU_SIMD_AMAX_H_
#define QSHARD_KERNELS_CPU_SIMD_AMAX_H_

#include <type_traits>

#include "kernels/cpu/simd/vectors.h"

namespace qshard::kernels {
namespace {

template <class In>
using Lane = std::conditional_t<sizeof(In) == 2, int16_t, int32_t>;
template <class In>
constexpr Lane<In> kMagnitudeMask = static_cast<Lane<In>>(sizeof(In) == 2 ? 0x7FFF : 0x7FFFFFFF);

// A vector of kBytes of input magnitudes.
template <class In, int kBytes>
struct MagnitudesOf {
  typedef Lane<In> Vector __attribute__((vector_size(kBytes)));
};
template <class In, int kBytes>
using Magnitudes = typename MagnitudesOf<In, kBytes>::Vector;

// Raises each lane to |x| at that lane.
template <class V, class In>
QSHARD_INLINE V RaiseLanes(V largest, const In* x) {
  const V v = Load<V>(x) & kMagnitudeMask<In>;
  return largest > v ? largest : v;
}

// Raises the first n lanes, with n less than the number of lanes.
template <class V, class In>
QSHARD_INLINE V RaiseLanes(V largest, const In* x, int64_t n) {
  In padded[sizeof(V) / sizeof(In)] = {};
  __builtin_memcpy(padded, x, n * sizeof(In));
  return RaiseLanes(largest, padded);
}

// Returns max |x[i]| for i < n, or 0 for n = 0. NaN is larger than any number.
template <class In>
QSHARD_INLINE float LargestOf(const In* x, int64_t n) {
  using V = Magnitudes<In, kShortBytes>;
  constexpr int64_t kWidth = kShortBytes / sizeof(In);
  V largest{};
  int64_t i = 0;
  if (n >= 4 * kWidth) {  // four chains, because each maximum waits for the one before
    V four[4] = {};
    for (; i + 4 * kWidth <= n; i += 4 * kWidth)
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k) four[k] = RaiseLanes(four[k], x + i + k * kWidth);
    for (const V& v : four) largest = largest > v ? largest : v;
  }
  for (; i + kWidth <= n; i += kWidth) largest = RaiseLanes(largest, x + i);
  if (i < n) largest = RaiseLanes(largest, x + i, n - i);
  const auto bits = static_cast<Lane<In>>(LargestLane(largest));
  In result;
  __builtin_memcpy(&result, &bits, sizeof(result));
  return Widen(result);
}

// down[i] = max |x[r * stride + i]| over r < rows, for i < n <= kChunk. `down` has kChunk elements.
// Reads four rows at a time from left to right, so memory is read in order.
template <class In>
QSHARD_INLINE void LargestDown(const In* x, int64_t stride, int64_t rows, int64_t n, In* down) {
  using V = Magnitudes<In, kVectorBytes>;
  constexpr int64_t kWidth = kVectorBytes / sizeof(In);
  __builtin_memset(down, 0, kChunk * sizeof(In));
  for (int64_t r = 0; r < rows; r += 4) {
    const In* row[4];  // the last may repeat
    for (int64_t k = 0; k < 4; ++k) row[k] = x + (r + k < rows ? r + k : rows - 1) * stride;
    for (int64_t i = 0; i < n; i += kWidth) {
      V largest = Load<V>(down + i);
#pragma GCC unroll 4
      for (int64_t k = 0; k < 4; ++k)
        largest = n - i < kWidth ? RaiseLanes(largest, row[k] + i, n - i)
                                 : RaiseLanes(largest, row[k] + i);
      Store(down + i, largest);
    }
  }
}

QSHARD_INLINE float Larger(float a, float b) {
  return FloatFromBits(FloatBits(a) > FloatBits(b) ? FloatBits(a) : FloatBits(b));
}

// amax[i / block_cols] = max |x[i]|.
template <class In>
QSHARD_INLINE void AmaxRow(const In* x, int64_t n, int64_t block_cols, float* __restrict amax) {
  int64_t begin = 0;
  if (block_cols == 16)  // a constant, so the loop over one vector is unrolled
    for (; begin + 16 <= n; begin += 16) *amax++ = LargestOf(x + begin, 16);
  for (; begin < n; begin += block_cols)
    *amax++ = LargestOf(x + begin, n - begin < block_cols ? n - begin : block_cols);
}

template <class In>
void Amax(const void* data, int64_t stride, int64_t rows, int64_t n, int64_t block_cols,
          float* __restrict amax) {
  const In* x = static_cast<const In*>(data);
  if (rows == 1 && block_cols > 1) {
    AmaxRow(x, n, block_cols, amax);
    return;
  }
  // Reduce columns first. Chunks are whole blocks, or parts of one.
  const int64_t whole = kChunk / block_cols * block_cols;
  In down[kChunk];
  for (int64_t begin = 0, count; begin < n; begin += count) {
    const int64_t block = begin / block_cols, into = begin % block_cols;
    const int64_t most = whole > 0                    ? whole
                         : block_cols - into < kChunk ? block_cols - into
                                                      : kChunk;
    count = n - begin < most ? n - begin : most;
    LargestDown(x + begin, stride, rows, count, down);
    if (block_cols == 1)
      for (int64_t i = 0; i < count; ++i) amax[begin + i] = Widen(down[i]);
    else if (into == 0)
      AmaxRow(down, count, block_cols, amax + block);
    else
      amax[block] = Larger(amax[block], LargestOf(down, count));
  }
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_AMAX_H_
