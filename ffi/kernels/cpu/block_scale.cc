// Scales on the CPU: per tensor, delayed and per block.
#include "kernels/block_scale.h"

#include "kernels/cpu/block_spans.h"
#include "kernels/cpu/scales_of.h"

namespace qshard::kernels {
namespace {
constexpr int64_t kGrain = 32;  // one scale is as slow as moving this many bytes
}

template <class Code, class Scales>
Status BlockScales(const Exec<Cpu>& exec, const float* amax, int64_t n, const Scales& scales,
                   float* scale, typename Scales::Stored* scale_inv) {
  ParallelRanges(exec, n, kGrain, [&](int64_t begin, int64_t end) {
    ScalesOf<Code>(scales, amax + begin, begin, end - begin, scale + begin, scale_inv + begin);
  });
  return {};
}

Status GlobalScaleNvfp4(const Exec<Cpu>& exec, const float* global_amax, int64_t n, float scale_max,
                        float* global_scale, float* global_scale_inv) {
  ParallelRanges(exec, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      global_scale[i] = qshard::GlobalScaleNvfp4(global_amax[i], scale_max);
      global_scale_inv[i] = ScaleInverse(global_scale[i]);
    }
  });
  return {};
}

Status DelayedScales(const Exec<Cpu>& exec, const float* amax, const float* scale, int64_t n,
                     float target, float* new_scale, float* scale_inv) {
  ParallelRanges(exec, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      new_scale[i] = ScaleOrFirst(scale[i], amax[i], target);
      scale_inv[i] = ScaleInverse(new_scale[i]);
    }
  });
  return {};
}

Status UpdateDelayedScale(const Exec<Cpu>& exec, const float* amax, const float* history,
                          const float* scale, int64_t n, int64_t length, DelayedRule rule,
                          float* new_history, float* new_scale, float* scale_inv) {
  ParallelRanges(exec, n, 8 * kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t shift = amax[i] != 0.0f;  // NaN counts as an amax
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

template <class In>
Status ScaleFourOverSix(const Exec<Cpu>& exec, const In* x, const float* amax,
                        const float* global_amax, int64_t run, FourOverSixRule rule,
                        const Blocks& blocks, float* scale, uint8_t* scale_inv) {
  const auto takes_four = Simd().takes_four[kInputIndex<In>];
  FourOverSixBlock shared{};
  shared.stride = blocks.cols;
  shared.rows = blocks.block_rows;
  shared.max = E2M1::kMax * rule.scale_max;
  shared.squared = rule.squared;
  ParallelSpans(exec, blocks, [&](const BlockSpan& span) {
    for (int64_t b = 0; b < span.num_blocks; ++b) {
      const int64_t i = span.grid + b;
      FourOverSixBlock block = shared;
      block.amax = AmaxOrNan(amax[i], rule.nonfinite);
      block.global_amax = global_amax[i / run];
      block.global_scale = qshard::GlobalScaleNvfp4(block.global_amax, rule.scale_max);
      const FourAndSix candidates = FourOverSixCandidates(block.amax, block.global_scale);
      const bool four = takes_four(x + span.start + b * blocks.block_cols, block);
      const BlockScale<uint8_t> s = four ? candidates.four : candidates.six;
      scale[i] = s.scale;
      scale_inv[i] = s.scale_inv;
    }
  });
  return {};
}

QSHARD_FOR_EACH_SCALED_CODE(QSHARD_INSTANTIATE_FOR, Cpu, BlockScales)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, ScaleFourOverSix)

}  // namespace qshard::kernels
