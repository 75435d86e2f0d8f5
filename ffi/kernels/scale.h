#ifndef QSHARD_KERNELS_SCALE_H_
#define QSHARD_KERNELS_SCALE_H_

#include "core/scale.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

struct ScaleRule {
  float max;  // of the element format
  float eps;
  bool pow2;
  Nonfinite nonfinite;
};

// scale[i], scale_inv[i] from amax[i] by ScaleFromAmax (core/scale.h).
QSHARD_LAUNCHER(ScaleFromAmax, const float* amax, int64_t n, ScaleRule rule, float* scale,
                float* scale_inv);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_SCALE_H_
