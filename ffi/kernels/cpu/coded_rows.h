// Rows of codes as stored: one code a byte, or two for 4-bit codes. A row of 4-bit codes starts at
// a whole byte and has an even number of codes.
#ifndef QSHARD_KERNELS_CPU_CODED_ROWS_H_
#define QSHARD_KERNELS_CPU_CODED_ROWS_H_

#include <algorithm>

#include "kernels/cpu/simd.h"

namespace qshard::kernels {

// Stores n codes. make(begin, count, codes) computes some of them, one a byte.
template <class Code, class Make>
void StoreCodes(int64_t n, uint8_t* data, const Make& make) {
  if constexpr (kCodesPerByte<Code> == 1) {
    make(0, n, data);
  } else {
    uint8_t codes[kChunk];
    for (int64_t begin = 0; begin < n; begin += kChunk) {
      const int64_t count = std::min(kChunk, n - begin);
      make(begin, count, codes);
      Simd().pack_pairs(codes, count / 2, data + begin / 2);
    }
  }
}

// Returns the scales of a row from element `begin` on.
inline RowScales From(const RowScales& scales, int64_t begin) {
  return {scales.scale, scales.length, scales.begin + begin};
}

template <class Code, class In>
void CastRow(const In* x, int64_t n, const RowScales& scales, uint8_t* data) {
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  StoreCodes<Code>(n, data, [&](int64_t begin, int64_t count, uint8_t* codes) {
    cast(x + begin, count, From(scales, begin), /*ahead=*/0, codes);
  });
}

// Casts a row to E2M1 with stochastic rounding. `random` has one byte per element.
template <class Code, class In>
void CastRowStochastic(const In* x, int64_t n, const RowScales& scales, const uint8_t* random,
                       uint8_t* data) {
  const auto cast = Simd().cast_stochastic[kInputIndex<In>];
  StoreCodes<Code>(n, data, [&](int64_t begin, int64_t count, uint8_t* codes) {
    cast(x + begin, count, From(scales, begin), random + begin, codes);
  });
}

// Stores one code. The other code in its byte keeps its value.
template <class Code>
void StoreCode(uint8_t* data, int64_t i, uint8_t code) {
  constexpr int kBits = 8 / kCodesPerByte<Code>;  // bits of storage per code
  uint8_t& byte = data[i / kCodesPerByte<Code>];
  const int shift = static_cast<int>(i % kCodesPerByte<Code>) * kBits;
  byte = static_cast<uint8_t>((byte & ~(((1 << kBits) - 1) << shift)) | code << shift);
}

// With Nonfinite::kNan, replaces the codes of infinite elements by NaN.
template <class Code, class In>
void ReplaceInfinityByNan(Nonfinite nonfinite, const In* x, int64_t n, uint8_t* data) {
  if (nonfinite == Nonfinite::kSaturate) return;
  for (int64_t i = 0; i < n; ++i)
    if ((FloatBits(Widen(x[i])) & kFloatMagnitudeMask) == kFloatInfinityBits)
      StoreCode<Code>(data, i, Code::kNan);
}

template <class Code, class Out>
void DequantizeRow(const uint8_t* data, int64_t n, const RowScales& scales, Out* x) {
  const auto dequantize = Simd().dequantize[kElementIndex<Code>][kInputIndex<Out>];
  if constexpr (kCodesPerByte<Code> == 1) {
    dequantize(data, n, scales, /*ahead=*/0, x);
  } else {
    uint8_t codes[kChunk];
    for (int64_t begin = 0; begin < n; begin += kChunk) {
      const int64_t count = std::min(kChunk, n - begin);
      Simd().unpack_pairs(data + begin / 2, count / 2, codes);
      dequantize(codes, count, From(scales, begin), /*ahead=*/0, x + begin);
    }
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_CODED_ROWS_H_
