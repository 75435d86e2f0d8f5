// Scales of blocks on the CPU.
#include "kernels/block_scale.h"

#include "core/block_scale.h"
#include "kernels/cpu/block_pieces.h"
#include "kernels/cpu/block_simd.h"

namespace qshard::kernels {
namespace {
constexpr int64_t kGrain = 1 << 13;  // scales a task
}

Status ScaleE8M0(const Exec<Cpu>& exec, const float* amax, int64_t n, PowerRule rule, float* scale,
                 uint8_t* scale_inv) {
  ParallelRanges(exec, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      scale_inv[i] = E8M0FromAmax(amax[i], rule.max, rule.rounding);
      scale[i] = MultiplierE8M0(scale_inv[i]);
    }
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

Status ScaleNvfp4(const Exec<Cpu>& exec, const float* amax, int64_t n, const float* global_amax,
                  int64_t run, float scale_max, float* scale, uint8_t* scale_inv) {
  ParallelRanges(exec, n, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end;) {
      const float global_scale = qshard::GlobalScaleNvfp4(global_amax[i / run], scale_max);
      for (const int64_t stop = std::min(end, (i / run + 1) * run); i < stop; ++i) {
        const BlockScaleNvfp4 s = qshard::ScaleNvfp4(amax[i], global_scale);
        scale[i] = s.scale;
        scale_inv[i] = s.scale_inv;
      }
    }
  });
  return {};
}

template <class In>
Status ScaleFourOverSix(const Exec<Cpu>& exec, const In* x, const float* amax,
                        const float* global_amax, int64_t run, FourOverSixRule rule,
                        const Blocks& blocks, float* scale, uint8_t* scale_inv) {
  const auto takes_four = BlockSimd().takes_four[kInTypeOf<In>];
  FourOverSixBlock shared{};
  shared.stride = blocks.cols;
  shared.rows = blocks.block_rows;
  shared.max = E2M1::kMax * rule.scale_max;
  shared.squared = rule.squared;
  ParallelPieces(exec, blocks, [&](const Piece& piece) {
    for (int64_t b = 0; b < piece.num_blocks; ++b) {
      const int64_t i = piece.grid + b;
      FourOverSixBlock block = shared;
      block.amax = amax[i];
      block.global_amax = global_amax[i / run];
      block.global_scale = qshard::GlobalScaleNvfp4(block.global_amax, rule.scale_max);
      const FourAndSix candidates = FourOverSixCandidates(block.amax, block.global_scale);
      const bool four = takes_four(x + piece.start + b * blocks.block_cols, block);
      const BlockScaleNvfp4 s = four ? candidates.four : candidates.six;
      scale[i] = s.scale;
      scale_inv[i] = s.scale_inv;
    }
  });
  return {};
}

#define QSHARD_INSTANTIATE(In)                                                              \
  template Status ScaleFourOverSix(const Exec<Cpu>&, const In*, const float*, const float*, \
                                   int64_t, FourOverSixRule, const Blocks&, float*, uint8_t*);
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
