// scale_from_amax: scale[i], scale_inv[i] from amax[i] by core/scale.h, whose divisions are
// __fdiv_rn here.
//
// One thread an element: reads 4 bytes, writes 8. Most calls have one element, or one for each
// weight of a model.
#include "core/scale.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/scale.h"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads)
    ScaleKernel(const float* amax, int64_t n, ScaleRule rule, float* scale, float* scale_inv) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= n) return;
  const float s = qshard::ScaleFromAmax(amax[i], rule.max, rule.eps, rule.pow2);
  scale[i] = s;
  scale_inv[i] = ScaleInverse(s);
}

}  // namespace

Status ScaleFromAmax(const Exec<Cuda>& exec, const float* amax, int64_t n, ScaleRule rule,
                     float* scale, float* scale_inv) {
  if (n == 0) return {};
  ScaleKernel<<<GridSize(CeilDiv(n, kThreads)), kThreads, 0, exec.stream>>>(amax, n, rule, scale,
                                                                            scale_inv);
  return LaunchStatus();
}

}  // namespace qshard::kernels
