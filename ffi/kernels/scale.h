#ifndef QSHARD_KERNELS_SCALE_H_
#define QSHARD_KERNELS_SCALE_H_

#include "core/exec.h"
#include "core/format.h"

namespace qshard::kernels {

struct ScaleRule {
  float max;  // of the element format
  float eps;
  bool pow2;
};

// scale[i], scale_inv[i] from amax[i] by ScaleFromAmax (core/scale.h).
Status ScaleFromAmax(const Exec<Cpu>& exec, const float* amax, int64_t n, ScaleRule rule,
                     float* scale, float* scale_inv);
Status ScaleFromAmax(const Exec<Cuda>& exec, const float* amax, int64_t n, ScaleRule rule,
                     float* scale, float* scale_inv);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_SCALE_H_
