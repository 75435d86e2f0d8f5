// Helpers of launchers: alignment, launches and their status.
#ifndef QSHARD_KERNELS_CUDA_LAUNCH_CUH_
#define QSHARD_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/ceil_div.h"
#include "core/exec.h"

namespace qshard::kernels {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFF;

inline bool IsAligned(const void* p, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Returns an attribute of the current device, or 1. A table lookup in the runtime, legal during
// stream capture.
inline int DeviceAttribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess)
    return 1;
  return value;
}
inline int Multiprocessors() { return DeviceAttribute(cudaDevAttrMultiProcessorCount); }

// Whether kernels may start while the kernel before them runs: Hopper and newer.
inline bool HasDependentLaunch() { return DeviceAttribute(cudaDevAttrComputeCapabilityMajor) >= 9; }
#if __CUDA_ARCH__ >= 900
#define QSHARD_CUDA_DEPENDENT_LAUNCH
#endif

inline Status ToStatus(cudaError_t error) {
  return {error == cudaSuccess ? nullptr : cudaGetErrorString(error)};
}

// Returns the status of the last launch, and clears the error so that the next CUDA call does not
// report it.
inline Status LaunchStatus() { return ToStatus(cudaGetLastError()); }

// Limit of gridDim.x.
inline bool FitsGrid(int64_t blocks) { return blocks <= INT32_MAX; }
constexpr Status kTooManyBlocks{
    "the work is more blocks of threads than one launch takes (2^31 - 1); divide the rows"};

// Allows a thread block of a kernel `bytes` of dynamic shared memory.
template <class Kernel>
Status AllowSharedMemory(Kernel kernel, int bytes) {
  constexpr int kWithoutAsking = 48 << 10;
  if (bytes <= kWithoutAsking) return {};
  return ToStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

// Launches `blocks` blocks of `threads` threads with `bytes` of dynamic shared memory, or nothing
// for 0 blocks.
template <class... Params, class... Args>
Status LaunchShared(const Exec<Cuda>& exec, void (*kernel)(Params...), int64_t blocks, int threads,
                    int bytes, const Args&... args) {
  if (blocks == 0) return {};
  if (!FitsGrid(blocks)) return kTooManyBlocks;
  QSHARD_RETURN_IF_ERROR(AllowSharedMemory(kernel, bytes));
  kernel<<<static_cast<unsigned>(blocks), threads, bytes, exec.stream>>>(args...);
  return LaunchStatus();
}

// Launches a kernel without dynamic shared memory.
template <class... Params, class... Args>
Status Launch(const Exec<Cuda>& exec, void (*kernel)(Params...), int64_t blocks, int threads,
              const Args&... args) {
  return LaunchShared(exec, kernel, blocks, threads, 0, args...);
}

constexpr int kForEachThreads = 256;

template <class Body>
__global__ void __launch_bounds__(kForEachThreads) ForEachKernel(int64_t n, const Body body) {
  const int64_t i = int64_t{blockIdx.x} * kForEachThreads + threadIdx.x;
  if (i < n) body(i);
}

// Calls body(i) for 0 <= i < n, one thread each.
template <class Body>
Status ForEach(const Exec<Cuda>& exec, int64_t n, const Body& body) {
  return Launch(exec, ForEachKernel<Body>, CeilDiv(n, kForEachThreads), kForEachThreads, n, body);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_LAUNCH_CUH_
