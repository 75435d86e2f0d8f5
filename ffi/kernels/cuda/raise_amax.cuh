// Amaxes that several thread blocks raise, and their initial zeros.
#ifndef QSHARD_KERNELS_CUDA_RAISE_AMAX_CUH_
#define QSHARD_KERNELS_CUDA_RAISE_AMAX_CUH_

#include <cstdint>

#include "core/round.h"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {

// Raises *amax, which other thread blocks raise too, and which has no NaN except the canonical one.
// Reads first: it is usually high enough already, and atomics on one word are slow.
__device__ __forceinline__ void RaiseAmax(float* amax, int32_t bits) {
  auto* target = reinterpret_cast<int32_t*>(amax);
  if (bits > *static_cast<volatile int32_t*>(target)) atomicMax(target, bits);
}

// Zeroes amaxes. Lets the next kernel on the stream start at once. `second` may be null.
static __global__ void __launch_bounds__(kWarp)
    ZeroAmaxes(float* amax, float* second, int64_t runs) {
#if defined(QSHARD_CUDA_DEPENDENT_LAUNCH)
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  for (int64_t i = threadIdx.x; i < runs; i += kWarp) {
    amax[i] = 0.0f;
    if (second != nullptr) second[i] = 0.0f;
  }
}

// Launches a kernel. Its thread blocks raise `count` amaxes from 0, each after AwaitZeroing. A
// kernel of one warp writes the zeros while the thread blocks start (before Hopper, ahead of them),
// because a memset would take extra time. It runs after all earlier work on the stream, so the
// kernel's inputs are ready. `second` may be null.
template <class... Params, class... Args>
Status LaunchAfterZeros(const Exec<Cuda>& exec, void (*kernel)(Params...), dim3 grid, int threads,
                        float* amax, float* second, int64_t count, const Args&... args) {
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(threads);
  config.stream = exec.stream;
  config.attrs = &early;
  config.numAttrs = HasDependentLaunch();
  ZeroAmaxes<<<1, kWarp, 0, exec.stream>>>(amax, second, count);
  (void)cudaLaunchKernelEx(&config, kernel, Params(args)...);
  return LaunchStatus();
}

// Launches a kernel with `splits` thread blocks per run (gridDim.y). If there is more than one,
// they raise its amaxes from 0.
template <class... Params, class... Args>
Status LaunchRaising(const Exec<Cuda>& exec, void (*kernel)(Params...), int64_t runs,
                     int64_t splits, int threads, float* amax, float* second, const Args&... args) {
  if (splits == 1) return Launch(exec, kernel, runs, threads, args...);
  if (!FitsGrid(runs)) return kTooManyBlocks;
  const dim3 grid(static_cast<unsigned>(runs), static_cast<unsigned>(splits));
  return LaunchAfterZeros(exec, kernel, grid, threads, amax, second, runs, args...);
}

// Waits until the amaxes are zeroed. For one thread of a thread block or warp, before it raises.
__device__ __forceinline__ void AwaitZeroing() {
#if defined(QSHARD_CUDA_DEPENDENT_LAUNCH)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Does so after LaunchRaising, before StoreOrRaise.
__device__ __forceinline__ void AwaitZeros() {
  if (gridDim.y > 1) AwaitZeroing();
}

// Stores the amax of a run, or raises the stored one if several thread blocks share a run.
__device__ __forceinline__ void StoreOrRaise(float* amax, int32_t bits) {
  if (gridDim.y == 1)
    *amax = FloatFromBits(bits);
  else
    atomicMax(reinterpret_cast<int32_t*>(amax), bits);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_RAISE_AMAX_CUH_
