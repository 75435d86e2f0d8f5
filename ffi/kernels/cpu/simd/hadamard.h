// Random Hadamard transform of rows of blocks.
#ifndef QSHARD_KERNELS_CPU_SIMD_HADAMARD_H_
#define QSHARD_KERNELS_CPU_SIMD_HADAMARD_H_

#include "core/hadamard.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

// All 16 numbers are integer multiples of the smallest one's unit. If exponents span at most kSpan,
// which is nearly always the case, the multiples and their sums fit in 32 bits.
constexpr int32_t kSpan = 18;  // 8 bits of significand + 18 + 4 for summing 16 numbers = 30

// Returns whether exponents low to high (without zeros) need HadamardTransform. All zeros have
// (255, 0).
QSHARD_INLINE bool IsWide(int32_t low, int32_t high) { return high == 255 || high - low > kSpan; }

// x[i] * s[i] in units of 2^(low - 134). Does not overflow, even if IsWide makes it meaningless.
QSHARD_INLINE int32_t Multiple(bfloat16 x, int i, int32_t low) {
  const int32_t significand = hadamard::Significand(x);
  const int32_t shift = Select(significand == 0, 0, hadamard::Exponent(x) - low);
  const int32_t multiple = significand << Select(shift < kSpan, shift, kSpan);
  return Select(((x.bits >> 15) ^ (kHadamardSigns >> i)) & 1, -multiple, multiple);
}

// Returns sum * 2^(exponent - 136), rounded once. 136 is the unit's 134 plus 2 for the division by
// 4.
QSHARD_INLINE bfloat16 RoundSum(int32_t sum, int32_t exponent) {
  const int32_t sign = sum >> 31;
  const int32_t magnitude = (sum ^ sign) - sign;
  // Reduce to 24 bits for fp32, with a sticky last bit, so that rounding the result rounds the sum.
  const int32_t odd = (magnitude & ~0x3F) | (static_cast<int32_t>((magnitude & 0x3F) != 0) << 6);
  const float exact = static_cast<float>(Select(magnitude >= (1 << 24), odd, magnitude));
  const float value = exact * PowerOfTwo(-9) * FloatFromBits(exponent << 23);  // 2^(exponent - 127)
  return {static_cast<uint16_t>(Narrow<bfloat16>(value).bits | (sign & 0x8000))};
}

// HadamardTransform of kTogether blocks at once. x[i] has element i of all blocks.
constexpr int kTogether = 16;
using Lanes = uint16_t[kHadamardSize][kTogether];

QSHARD_INLINE void HadamardLanes(Lanes x) {
  int32_t low[kTogether], high[kTogether], sum[kHadamardSize][kTogether];
  for (int lane = 0; lane < kTogether; ++lane) low[lane] = 255, high[lane] = 0;
  for (int i = 0; i < kHadamardSize; ++i) {
    for (int lane = 0; lane < kTogether; ++lane) {
      const int32_t e = hadamard::Exponent({x[i][lane]});
      const bool zero = (x[i][lane] & 0x7FFF) == 0;
      low[lane] = Select(zero || e >= low[lane], low[lane], e);
      high[lane] = Select(zero || e <= high[lane], high[lane], e);
    }
  }
  int32_t wide[kTogether], any_wide = 0;
  for (int lane = 0; lane < kTogether; ++lane) {
    wide[lane] = IsWide(low[lane], high[lane]);
    any_wide |= wide[lane];
    low[lane] = Select(high[lane] == 0, 1, low[lane]);
  }
  Lanes y;
  for (int i = 0; i < kHadamardSize; ++i)
    for (int lane = 0; lane < kTogether; ++lane)
      sum[i][lane] = Multiple({x[i][lane]}, i, low[lane]);
  for (int half = 1; half < kHadamardSize; half *= 2) {
    for (int i = 0; i < kHadamardSize; ++i) {
      if (i & half) continue;
      for (int lane = 0; lane < kTogether; ++lane) {
        const int32_t a = sum[i][lane], b = sum[i + half][lane];
        sum[i][lane] = a + b;
        sum[i + half][lane] = a - b;
      }
    }
  }
  for (int i = 0; i < kHadamardSize; ++i)
    for (int lane = 0; lane < kTogether; ++lane)
      y[i][lane] = RoundSum(sum[i][lane], low[lane]).bits;
  for (int lane = 0; any_wide && lane < kTogether; ++lane) {
    if (!wide[lane]) continue;
    bfloat16 block[kHadamardSize], rotated[kHadamardSize];
    for (int i = 0; i < kHadamardSize; ++i) block[i] = {x[i][lane]};
    HadamardTransform(block, rotated);
    for (int i = 0; i < kHadamardSize; ++i) y[i][lane] = rotated[i].bits;
  }
  __builtin_memcpy(x, y, sizeof(y));
}

template <class In>
void HadamardBlocks(const void* data, int64_t n, int64_t element_step, int64_t block_step,
                    bfloat16* y) {
  const In* x = static_cast<const In*>(data);
  for (int64_t first = 0; first < n; first += kTogether) {
    const int64_t start = first * block_step;
    const int lanes = static_cast<int>(n - first < kTogether ? n - first : kTogether);
    Lanes values = {};
    if (lanes == kTogether && block_step == 1) {
      for (int i = 0; i < kHadamardSize; ++i)
        for (int lane = 0; lane < kTogether; ++lane)
          values[i][lane] = Narrow<bfloat16>(Widen(x[start + i * element_step + lane])).bits;
      HadamardLanes(values);
      for (int i = 0; i < kHadamardSize; ++i)
        __builtin_memcpy(y + start + i * element_step, values[i], sizeof(values[i]));
      continue;
    }
    for (int lane = 0; lane < lanes; ++lane) {
      uint16_t block[kHadamardSize];
      for (int i = 0; i < kHadamardSize; ++i)
        block[i] = Narrow<bfloat16>(Widen(x[start + i * element_step + lane * block_step])).bits;
      for (int i = 0; i < kHadamardSize; ++i) values[i][lane] = block[i];
    }
    HadamardLanes(values);
    for (int lane = 0; lane < lanes; ++lane)
      for (int i = 0; i < kHadamardSize; ++i)
        y[start + i * element_step + lane * block_step] = {values[i][lane]};
  }
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_HADAMARD_H_
