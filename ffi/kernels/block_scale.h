#ifndef QSHARD_KERNELS_BLOCK_SCALE_H_
#define QSHARD_KERNELS_BLOCK_SCALE_H_

#include "core/block.h"
#include "core/round.h"
#include "core/scale.h"
#include "kernels/launcher.h"

// Scales from amaxes, elementwise over a grid of n blocks. The formulas are core/block_scale.h.
namespace qshard::kernels {

struct PowerRule {
  float max;  // of the element format
  PowerRounding rounding;
  Nonfinite nonfinite;
};

// scale_inv[i] = E8M0FromAmax(ShownAmax(amax[i])), scale[i] = MultiplierE8M0(scale_inv[i]).
QSHARD_LAUNCHER(ScaleE8M0, const float* amax, int64_t n, PowerRule rule, float* scale,
                uint8_t* scale_inv);

// global_scale[i] = GlobalScaleNvfp4(global_amax[i]), global_scale_inv[i] = its inverse.
QSHARD_LAUNCHER(GlobalScaleNvfp4, const float* global_amax, int64_t n, float scale_max,
                float* global_scale, float* global_scale_inv);

// scale[i], scale_inv[i] = ScaleNvfp4(ShownAmax(amax[i]), S of global_amax[i / run]).
QSHARD_LAUNCHER(ScaleNvfp4, const float* amax, int64_t n, const float* global_amax, int64_t run,
                float scale_max, Nonfinite nonfinite, float* scale, uint8_t* scale_inv);

struct FourOverSixRule {
  float scale_max;
  bool squared;  // the error is a sum of squares, else of absolute values
  Nonfinite nonfinite;
};

// The one of FourOverSixCandidates(ShownAmax(amax[i]), S of global_amax[i / run]) that stores block
// i of x with the smaller error, six if they are equal or NaN. `blocks` are whole, with 1 or 16
// rows and 16 columns.
QSHARD_LAUNCHER_TEMPLATE((class In), ScaleFourOverSix, const In* x, const float* amax,
                         const float* global_amax, int64_t run, FourOverSixRule rule,
                         const Blocks& blocks, float* scale, uint8_t* scale_inv);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_BLOCK_SCALE_H_
