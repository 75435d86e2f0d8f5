// Delayed scaling: scales from amaxes of earlier steps, or for tensors without history from their
// own amax. Equals core/block_scale.h bit for bit.
#include "core/block_scale.h"
#include "kernels/block_scale.h"
#include "kernels/cast.h"
#include "kernels/cuda/amax/scan_run.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;

// One team per run. Reads x only if the run has no scale yet.
template <class In, int kTeam, int kBlock>
__global__ void __launch_bounds__(kBlock) BeginDelayedKernel(const Scaled<In> x) {
  const int64_t run = int64_t{blockIdx.x} * (kBlock / kTeam) + threadIdx.x / kTeam;
  if (run >= x.runs) return;  // the whole team
  const int thread = threadIdx.x % kTeam;
  float scale = x.scale[run], amax = 0.0f;
  if (scale == 0.0f) {
    const Magnitude<In> m = ScanRun<In, kTeam>(x.x + run * x.length, x.length, 0, 1, thread);
    amax = FloatFromBits(TeamMax<kTeam>(m.AsFloatBits()));
    scale = ScaleOrFirst(scale, amax, x.target);
  }
  if (thread != 0) return;
  x.amax[run] = amax;
  x.scale_inv[run] = ScaleInverse(scale);
}

constexpr int kUpdateThreads = 128;

// One warp per tensor. Outputs may alias inputs: a warp reads 32 amaxes, shifted by one if the
// window moves, before it writes them and moves on.
__global__ void __launch_bounds__(kUpdateThreads)
    UpdateKernel(const float* amax, const float* history, const float* scale, int64_t n,
                 int64_t length, DelayedRule rule, float* new_history, float* new_scale,
                 float* scale_inv) {
  const int64_t i = (int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x) / kWarp;
  if (i >= n) return;
  const int lane = threadIdx.x % kWarp;
  const float newest = amax[i], old_scale = scale[i];
  const int64_t shift = newest != 0.0f;  // NaN counts as an amax
  const float* from = history + i * length;
  float* to = new_history + i * length;
  int32_t largest = 0;
  for (int64_t begin = 0; begin < length; begin += kWarp) {
    const int64_t j = begin + lane;
    const float v = j + shift < length ? from[j + shift] : newest;
    __syncwarp();
    if (j < length) {
      to[j] = v;
      largest = max(largest, FloatBits(v));
    }
    __syncwarp();
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (lane != 0) return;
  const float a = rule.most_recent ? newest : FloatFromBits(largest);
  const float s = shift ? DelayedScale(old_scale, a, rule.target) : old_scale;
  new_scale[i] = s;
  scale_inv[i] = CanonicalNan(ScaleInverse(s));
}

}  // namespace

// At most one thread block per run. This kernel mostly writes a few words, like a memset, in every
// step. Its speed in the one step that reads x matters less.
template <class In>
Status BeginDelayed(const Exec<Cuda>& exec, const Scaled<In>& x) {
  constexpr int kLong = 1024;
  if (x.length > 16 * kLong)
    return Launch(exec, BeginDelayedKernel<In, kLong, kLong>, x.runs, kLong, x);
  return Launch(exec, BeginDelayedKernel<In, kWarp, kThreads>, CeilDiv(x.runs, kThreads / kWarp),
                kThreads, x);
}

#define QSHARD_INSTANTIATE_BEGIN(BeginDelayed, In) \
  template Status BeginDelayed<In>(const Exec<Cuda>& exec, const Scaled<In>& x);
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_BEGIN, BeginDelayed)

Status DelayedScales(const Exec<Cuda>& exec, const float* amax, const float* scale, int64_t n,
                     float target, float* new_scale, float* scale_inv) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    const float s = ScaleOrFirst(scale[i], amax[i], target);
    new_scale[i] = s;
    scale_inv[i] = ScaleInverse(s);
  });
}

Status UpdateDelayedScale(const Exec<Cuda>& exec, const float* amax, const float* history,
                          const float* scale, int64_t n, int64_t length, DelayedRule rule,
                          float* new_history, float* new_scale, float* scale_inv) {
  return Launch(exec, UpdateKernel, CeilDiv(n * kWarp, kUpdateThreads), kUpdateThreads, amax,
                history, scale, n, length, rule, new_history, new_scale, scale_inv);
}

}  // namespace qshard::kernels
