// Loops over rows of elements and codes, in blocks of the vector layer.
#ifndef QSHARD_KERNELS_CPU_SIMD_ROWS_H_
#define QSHARD_KERNELS_CPU_SIMD_ROWS_H_

#include "core/ceil_div.h"
#include "core/stochastic.h"
#include "kernels/cpu/simd/vectors.h"

namespace qshard::kernels {
namespace {

// --- codes with scales ---

template <class InType, class Code>
struct Casting {
  using In = InType;
  using Out = uint8_t;
  using ScaledIn = In;  // scales are in the order of this input type
  static QSHARD_INLINE void Block(const In* x, const BlockScales& scales, uint8_t* codes) {
    EncodeBlock<In, Code>(x, scales, codes);
  }
};

template <class Code, class OutType>
struct Dequantizing {
  using In = uint8_t;
  using Out = OutType;
  using ScaledIn = float;
  static QSHARD_INLINE void Block(const uint8_t* codes, const BlockScales& scales, Out* x) {
    DecodeBlock<Code, Out>(codes, scales, x);
  }
};

// Runs an op on n < kBlock elements, through padded buffers.
template <class Op>
QSHARD_INLINE void PaddedBlock(const typename Op::In* in, int64_t n, const BlockScales& scales,
                               typename Op::Out* out) {
  typename Op::In padded[kBlock] = {};
  typename Op::Out results[kBlock];
  __builtin_memcpy(padded, in, n * sizeof(*in));
  Op::Block(padded, scales, results);
  __builtin_memcpy(out, results, n * sizeof(*out));
}

// Runs an op on n elements with one scale. The last block ends at the last element, so some
// elements are computed twice.
template <class Op>
QSHARD_INLINE void OneRun(const typename Op::In* in, int64_t n, float scale, int64_t ahead,
                          typename Op::Out* out) {
  const BlockScales one = OneScale(scale);
  if (n < kBlock) {
    PaddedBlock<Op>(in, n, one, out);
    return;
  }
  for (int64_t i = 0; i <= n - kBlock; i += kBlock) {
    if (ahead != 0) Prefetch(in + i, ahead * sizeof(*in), kBlock * sizeof(*in));
    Op::Block(in + i, one, out + i);
  }
  if (n % kBlock != 0) Op::Block(in + n - kBlock, one, out + n - kBlock);
}

// each[i] = scale of element first + i * unit, for i < n. No unit crosses a run.
QSHARD_INLINE void SpreadScales(const RowScales& scales, int64_t first, int64_t n, int64_t unit,
                                float* each) {
  const int64_t begin = scales.begin + first;
  const float* scale = scales.scale + begin / scales.length;
  int64_t left = scales.length - begin % scales.length;  // in this run
  for (int64_t i = 0; i < n; ++i, left -= unit) {
    if (left == 0) {
      ++scale;
      left = scales.length;
    }
    each[i] = *scale;
  }
}

// Runs an op on n elements in runs shorter than a block.
template <class Op>
QSHARD_INLINE void ShortRuns(const typename Op::In* in, int64_t n, const RowScales& scales,
                             typename Op::Out* out) {
  using ScaledIn = typename Op::ScaledIn;
  const bool sixteens = scales.length % 16 == 0 && scales.begin % 16 == 0;
  const int64_t unit = sixteens ? 16 : 1;
  float spread[kChunk];
  for (int64_t first = 0, count; first < n; first += count, in += count, out += count) {
    count = n - first < kChunk ? n - first : kChunk;
    const float* each = spread;
    if (scales.length == unit)
      each = scales.scale + (scales.begin + first) / unit;
    else
      SpreadScales(scales, first, CeilDiv(count, unit), unit, spread);
    const int64_t whole = count - count % kBlock;
    if (sixteens)
      for (int64_t i = 0; i < whole; i += kBlock)
        Op::Block(in + i, SixteenScales<ScaledIn>(each + i / 16), out + i);
    else
      for (int64_t i = 0; i < whole; i += kBlock)
        Op::Block(in + i, EachScales<ScaledIn>(each + i), out + i);
    if (whole == count) continue;
    float last[kBlock] = {};
    for (int64_t i = whole; i < count; ++i) last[i - whole] = each[i / unit];
    PaddedBlock<Op>(in + whole, count - whole, EachScales<ScaledIn>(last), out + whole);
  }
}

template <class Op>
QSHARD_INLINE void AllRuns(const void* from, int64_t n, const RowScales& scales, int64_t ahead,
                           void* to) {
  const auto* in = static_cast<const typename Op::In*>(from);
  auto* out = static_cast<typename Op::Out*>(to);
  if (scales.length < kBlock) {
    ShortRuns<Op>(in, n, scales, out);
    return;
  }
  // A division is as slow as a block, so skip it if possible.
  const int64_t run = scales.begin < scales.length ? 0 : scales.begin / scales.length;
  const float* scale = scales.scale + run;
  int64_t left = (run + 1) * scales.length - scales.begin;               // in this run
  if (ahead == 0 && (scales.length | scales.begin | n) % kBlock == 0) {  // whole blocks only
    for (int64_t i = 0; i < n; left += scales.length) {
      const BlockScales one = OneScale(*scale++);
      const int64_t stop = left < n ? left : n;
      for (; i < stop; i += kBlock) Op::Block(in + i, one, out + i);
    }
    return;
  }
  for (int64_t count; n > 0; n -= count, in += count, out += count, left = scales.length) {
    count = left < n ? left : n;
    OneRun<Op>(in, count, *scale++, ahead, out);
  }
}

template <class In, class Code>
void Cast(const void* x, int64_t n, const RowScales& scales, int64_t ahead, uint8_t* codes) {
  AllRuns<Casting<In, Code>>(x, n, scales, ahead, codes);
}

template <class Code, class Out>
void Dequantize(const uint8_t* codes, int64_t n, const RowScales& scales, int64_t ahead, void* x) {
  AllRuns<Dequantizing<Code, Out>>(codes, n, scales, ahead, x);
}

// --- stochastic rounding ---

template <class In>
void CastStochastic(const void* data, int64_t n, const RowScales& scales,
                    const uint8_t* __restrict random, uint8_t* __restrict codes) {
  const In* __restrict x = static_cast<const In*>(data);
  float scale[kChunk];
  for (int64_t first = 0; first < n; first += kChunk) {
    const int64_t count = n - first < kChunk ? n - first : kChunk;
    SpreadScales(scales, first, count, 1, scale);
    for (int64_t i = 0; i < count; ++i)
      codes[first + i] = EncodeStochastic(Widen(x[first + i]) * scale[i], random[first + i]);
  }
}

// Computes `calls` consecutive Philox calls, for 16 elements each, starting at `counter`.
void RandomCalls(uint64_t seed, uint64_t counter, int64_t calls, uint32_t* __restrict words) {
  for (int64_t c = 0; c < calls; ++c) {
    const PhiloxWords w = Philox4x32(counter + c, seed);
    for (int i = 0; i < 4; ++i) words[4 * c + i] = w.word[i];
  }
}

void Random(uint64_t seed, uint64_t first, uint64_t step, int64_t n, uint8_t* __restrict random) {
  if (step != 1) {  // nearly always, each element needs its own call
    for (int64_t i = 0; i < n; ++i) {
      const uint64_t index = first + static_cast<uint64_t>(i) * step;
      random[i] = RandomByte(Philox4x32(index >> 4, seed), index);
    }
    return;
  }
  constexpr int64_t kCalls = kChunk / 16;
  uint32_t words[4 * kCalls];
  for (int64_t i = 0; i < n;) {
    const uint64_t index = first + static_cast<uint64_t>(i);
    const int64_t skip = static_cast<int64_t>(index & 15);
    const int64_t count = n - i < kChunk - skip ? n - i : kChunk - skip;
    RandomCalls(seed, index >> 4, CeilDiv(skip + count, 16), words);
    for (int64_t j = 0; j < count; ++j)
      random[i + j] = static_cast<uint8_t>(words[(skip + j) >> 2] >> (8 * ((skip + j) & 3)));
    i += count;
  }
}

// --- 4-bit codes ---

void PackPairs(const uint8_t* __restrict codes, int64_t n, uint8_t* __restrict packed) {
  for (int64_t i = 0; i < n; ++i)
    packed[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

void UnpackPairs(const uint8_t* __restrict packed, int64_t n, uint8_t* __restrict codes) {
  for (int64_t i = 0; i < n; ++i) {
    codes[2 * i] = packed[i] & 0xF;
    codes[2 * i + 1] = packed[i] >> 4;
  }
}

void PackRows(const uint8_t* even, const uint8_t* odd, int64_t n, uint8_t* packed) {
  for (int64_t i = 0; i < n; ++i) packed[i] = static_cast<uint8_t>(even[i] | odd[i] << 4);
}

void TransposePairs(const uint8_t* __restrict even, const uint8_t* __restrict odd, int64_t n,
                    uint8_t* __restrict transposed) {
  for (int64_t i = 0; i < n; ++i) {
    transposed[2 * i] = static_cast<uint8_t>((even[i] & 0xF) | odd[i] << 4);
    transposed[2 * i + 1] = static_cast<uint8_t>(even[i] >> 4 | (odd[i] & 0xF0));
  }
}

// --- sums ---

template <class In>
void AddAll(const void* x, int64_t n, bool first, float* __restrict sums) {
  const In* __restrict in = static_cast<const In*>(x);
  if (first)
    for (int64_t i = 0; i < n; ++i) sums[i] = Widen(in[i]);
  else
    for (int64_t i = 0; i < n; ++i) sums[i] = sums[i] + Widen(in[i]);
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_ROWS_H_
