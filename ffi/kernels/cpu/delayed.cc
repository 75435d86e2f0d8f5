// Delayed scaling on the CPU. Casts go through x in pieces that stay in cache between taking their
// amax and encoding them.
#include "kernels/delayed.h"

#include "core/block_scale.h"
#include "kernels/cpu/coded_rows.h"
#include "kernels/cpu/parallel_for.h"
#include "kernels/cpu/raise_amax.h"

namespace qshard::kernels {

template <class In, class Code>
Status CastAmax(const Exec<Cpu>& exec, const In* x, const float* scale, int64_t scale_length,
                Nonfinite nonfinite, int64_t n, int64_t runs, int64_t amax_length, uint8_t* data,
                float* amax) {
  constexpr int64_t kPiece = 1 << 12;
  const auto cast = Simd().cast[kInputIndex<In>][kElementIndex<Code>];
  std::fill_n(amax, runs, 0.0f);
  ParallelRanges(exec, n, sizeof(In) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t stop; begin < end; begin = stop) {
      stop = std::min(end, begin + kPiece);
      const bool finite = RaiseAmaxes(x, begin, stop, amax_length, amax);
      cast(x + begin, stop - begin, {scale, scale_length, begin}, /*ahead=*/0, data + begin);
      if (!finite) ShowInfinite<Code>(nonfinite, x + begin, stop - begin, data + begin);
    }
  });
  return {};
}

Status UpdateDelayedScale(const Exec<Cpu>& exec, const float* amax, const float* history,
                          const float* scale, int64_t n, int64_t length, DelayedRule rule,
                          float* new_history, float* new_scale, float* scale_inv) {
  constexpr int64_t kGrain = 256;
  ParallelRanges(exec, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t shift = amax[i] != 0.0f;  // NaN is an amax too.
      const float* from = history + i * length + shift;
      float* to = new_history + i * length;
      int32_t largest = 0;
      for (int64_t j = 0; j < length; ++j) {
        to[j] = j + shift < length ? from[j] : amax[i];
        largest = std::max(largest, FloatBits(to[j]));
      }
      const float a = rule.most_recent ? amax[i] : FloatFromBits(largest);
      new_scale[i] = shift ? DelayedScale(scale[i], a, rule.target) : scale[i];
      scale_inv[i] = CanonicalNan(ScaleInverse(new_scale[i]));
    }
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cpu, CastAmax)

}  // namespace qshard::kernels
