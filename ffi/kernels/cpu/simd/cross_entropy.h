// Loops of cross entropy.
#ifndef QSHARD_KERNELS_CPU_SIMD_CROSS_ENTROPY_H_
#define QSHARD_KERNELS_CPU_SIMD_CROSS_ENTROPY_H_

#include "core/cross_entropy.h"
#include "core/norm.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

// Sums kPartLanes partial sums in halves: eight neighbours, then 32 such sums.
QSHARD_INLINE float SumOfLanes(float* lanes) {
  constexpr int kEights = kPartLanes / kLanesOfThread;
  float sums[kEights];
  for (int i = 0; i < kEights; ++i) sums[i] = SumHalves<kLanesOfThread>(lanes + kLanesOfThread * i);
  return SumHalves<kEights>(sums);
}

template <class In>
void SoftmaxPart(const void* x, int64_t n, bool total, RowStats* stats) {
  const In* __restrict in = static_cast<const In*>(x);
  float lanes[kPartLanes];
  for (float& lane : lanes) lane = NoLogits().max;
  for (int64_t at = 0; at < n; at += kPartLanes) {
    const int64_t count = n - at < kPartLanes ? n - at : kPartLanes;
    for (int64_t i = 0; i < count; ++i) {
      const float v = Widen(in[at + i]);
      lanes[i] = v > lanes[i] ? v : lanes[i];
    }
  }
  float max = lanes[0];
  for (float lane : lanes) max = lane > max ? lane : max;
  max = max + 0.0f;  // no -0
  const float shift = Shift(max);
  float sums[kPartLanes] = {}, totals[kPartLanes] = {};
  for (int64_t at = 0; at < n; at += kPartLanes) {
    const int64_t count = n - at < kPartLanes ? n - at : kPartLanes;
    for (int64_t i = 0; i < count; ++i)
      sums[i] = sums[i] + ExpOfNegative(Widen(in[at + i]) - shift);
    if (total)
      for (int64_t i = 0; i < count; ++i) totals[i] = totals[i] + Widen(in[at + i]);
  }
  *stats = {max, SumOfLanes(sums), SumOfLanes(totals)};
}

template <class In>
void SoftmaxGrad(const void* logits, int64_t n, const CrossEntropyGrad& of, void* d) {
  const In* in = static_cast<const In*>(logits);
  In* out = static_cast<In*>(d);
  for (int64_t i = 0; i < n; ++i) out[i] = Narrow<In>(of.Of(Widen(in[i])));
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_CROSS_ENTROPY_H_
