// Amaxes that several thread blocks raise, and the zeros that they start from.
#ifndef QSHARD_KERNELS_CUDA_RAISE_AMAX_CUH_
#define QSHARD_KERNELS_CUDA_RAISE_AMAX_CUH_

#include <cstdint>

#include "core/round.h"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {

// Raises *amax, which other blocks raise too and which holds no NaN but the canonical one. Looks
// first: most blocks find it high enough, and one word takes few atomics a microsecond.
__device__ __forceinline__ void RaiseAmax(float* amax, int32_t bits) {
  auto* target = reinterpret_cast<int32_t*>(amax);
  if (bits > *static_cast<volatile int32_t*>(target)) atomicMax(target, bits);
}

// Lets the kernel after it on the stream start at once. `second` may be null.
static __global__ void __launch_bounds__(kWarp)
    ZeroAmaxes(float* amax, float* second, int64_t runs) {
  asm volatile("griddepcontrol.launch_dependents;");
  for (int64_t i = threadIdx.x; i < runs; i += kWarp) {
    amax[i] = 0.0f;
    if (second != nullptr) second[i] = 0.0f;
  }
}

// Launches a kernel of which `splits` blocks share a run, gridDim.y of them, and raise its amaxes
// from 0 if they are more than one, once AwaitZeros returns. A kernel of one warp makes the zeros
// while the blocks start: a memset would take time of its own. It comes after all that went before
// on the stream, so what the kernel reads is there.
template <class... Params, class... Args>
Status LaunchRaising(const Exec<Cuda>& exec, void (*kernel)(Params...), int64_t runs,
                     int64_t splits, int threads, float* amax, float* second, const Args&... args) {
  if (!FitsGrid(runs)) return kTooManyBlocks;
  cudaLaunchAttribute early = {};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(runs), static_cast<unsigned>(splits));
  config.blockDim = dim3(threads);
  config.stream = exec.stream;
  if (splits > 1) {
    ZeroAmaxes<<<1, kWarp, 0, exec.stream>>>(amax, second, runs);
    config.attrs = &early;
    config.numAttrs = 1;
  }
  (void)cudaLaunchKernelEx(&config, kernel, Params(args)...);
  return LaunchStatus();
}

// For one thread of a block: what it needs before, and storing what the block has found of a run.
__device__ __forceinline__ void AwaitZeros() {
  if (gridDim.y > 1) asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void StoreOrRaise(float* amax, int32_t bits) {
  if (gridDim.y == 1)
    *amax = FloatFromBits(bits);
  else
    atomicMax(reinterpret_cast<int32_t*>(amax), bits);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_RAISE_AMAX_CUH_
