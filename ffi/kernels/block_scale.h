#ifndef QSHARD_KERNELS_BLOCK_SCALE_H_
#define QSHARD_KERNELS_BLOCK_SCALE_H_

#include <cstdint>

#include "core/block.h"
#include "core/block_scale.h"
#include "kernels/launcher.h"

// Scales from amaxes, elementwise. core/scale.h and core/block_scale.h have the formulas.
namespace qshard::kernels {

// --- scale rules: block i has scales.Of(amax, scales.Shared<Code>(i)). `run` blocks share the
// second argument. ---

// fp32 scales.
struct FloatScales {
  using Stored = float;
  static constexpr int64_t run = INT64_MAX;
  template <class Code>
  QSHARD_INLINE float Shared(int64_t) const {
    return Code::kMax;
  }
  QSHARD_INLINE BlockScale<float> Of(float amax, float max) const {
    const float scale = ScaleFromAmax(amax, max, eps, pow2, nonfinite);
    return {scale, ScaleInverse(scale)};
  }

  float eps;
  bool pow2;
  Nonfinite nonfinite;
};

// E8M0 scales.
struct E8M0Scales {
  using Stored = uint8_t;
  static constexpr int64_t run = INT64_MAX;
  template <class Code>
  QSHARD_INLINE float Shared(int64_t) const {
    return Code::kMax;
  }
  QSHARD_INLINE BlockScale<uint8_t> Of(float amax, float max) const {
    const uint8_t code = E8M0FromAmax(AmaxOrNan(amax, nonfinite), max, rounding);
    return {MultiplierE8M0(code), code};
  }

  PowerRounding rounding;
  Nonfinite nonfinite;
};

// E4M3 scales under a global fp32 scale: block i uses global_amax[i / run * step].
struct Nvfp4Scales {
  using Stored = uint8_t;
  template <class Code>
  QSHARD_INLINE float Shared(int64_t i) const {
    return qshard::GlobalScaleNvfp4(global_amax[i < run ? 0 : i / run * step], scale_max);
  }
  QSHARD_INLINE BlockScale<uint8_t> Of(float amax, float global_scale) const {
    return ScaleNvfp4(AmaxOrNan(amax, nonfinite), global_scale);
  }

  const float* global_amax;
  int64_t run, step;
  float scale_max;
  Nonfinite nonfinite;
};

// Computes scale[i] and scale_inv[i] of n amaxes. Code is an 8-bit element with FloatScales, any
// element with E8M0Scales, and E2M1 with Nvfp4Scales.
QSHARD_LAUNCHER_TEMPLATE((class Code, class Scales), BlockScales, const float* amax, int64_t n,
                         const Scales& scales, float* scale, typename Scales::Stored* scale_inv);
#define QSHARD_FOR_EACH_SCALED_CODE(X, ...)                             \
  QSHARD_FOR_EACH_BLOCK_FORMAT(FloatScales, E8M0Scales, X, __VA_ARGS__) \
  X(__VA_ARGS__, E2M1, Nvfp4Scales)

// global_scale[i] = GlobalScaleNvfp4(global_amax[i]), and global_scale_inv[i] is its inverse.
QSHARD_LAUNCHER(GlobalScaleNvfp4, const float* global_amax, int64_t n, float scale_max,
                float* global_scale, float* global_scale_inv);

struct DelayedRule {
  float target;      // fl(max * 2^-margin)
  bool most_recent;  // the scale comes from the last amax only
};

// new_scale[i] = ScaleOrFirst(scale[i], amax[i], target), and scale_inv[i] is its inverse. Outputs
// may alias inputs.
QSHARD_LAUNCHER(DelayedScales, const float* amax, const float* scale, int64_t n, float target,
                float* new_scale, float* scale_inv);

// One step of delayed scaling for each of n tensors, with windows history [n, length], oldest amax
// first. An amax of 0 keeps the window and the scale. Any other amax enters the window, and the
// oldest leaves. Then new_scale = DelayedScale(scale, a, target), with a = max(window) or the amax
// itself. scale_inv is the inverse of new_scale. Outputs may alias inputs.
QSHARD_LAUNCHER(UpdateDelayedScale, const float* amax, const float* history, const float* scale,
                int64_t n, int64_t length, DelayedRule rule, float* new_history, float* new_scale,
                float* scale_inv);

struct FourOverSixRule {
  float scale_max;
  bool squared;  // error is a sum of squares, else of absolute values
  Nonfinite nonfinite;
};

// Picks the one of FourOverSixCandidates(AmaxOrNan(amax[i]), S of global_amax[i / run]) that stores
// block i of x with the smaller error, and six if they are equal or NaN. `blocks` must be whole,
// with 1 or 16 rows and 16 columns.
QSHARD_LAUNCHER_TEMPLATE((class In), ScaleFourOverSix, const In* x, const float* amax,
                         const float* global_amax, int64_t run, FourOverSixRule rule,
                         const Blocks& blocks, float* scale, uint8_t* scale_inv);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_BLOCK_SCALE_H_
