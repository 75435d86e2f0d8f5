// The random Hadamard transform of rows of blocks.
#ifndef QSHARD_KERNELS_CPU_SIMD_HADAMARD_H_
#define QSHARD_KERNELS_CPU_SIMD_HADAMARD_H_

#include "core/hadamard.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

// HadamardTransform of kTogether blocks at once: element i of all of them is x[i].
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
    wide[lane] = hadamard::IsWide(low[lane], high[lane]);
    any_wide |= wide[lane];
    low[lane] = Select(high[lane] == 0, 1, low[lane]);
  }
  Lanes y;
  for (int i = 0; i < kHadamardSize; ++i)
    for (int lane = 0; lane < kTogether; ++lane)
      sum[i][lane] = hadamard::Multiple({x[i][lane]}, i, low[lane]);
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
      y[i][lane] = hadamard::RoundSum(sum[i][lane], low[lane]).bits;
  for (int lane = 0; any_wide && lane < kTogether; ++lane) {
    if (!wide[lane]) continue;
    bfloat16 block[kHadamardSize], rotated[kHadamardSize];
    for (int i = 0; i < kHadamardSize; ++i) block[i] = {x[i][lane]};
    hadamard::TransformWide(block, rotated);
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
