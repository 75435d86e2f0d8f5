// What every launcher needs: alignment, launches and their outcome.
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

// Multiprocessors of the current device; a table lookup in the runtime, legal while a stream is
// captured.
inline int Multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess ||
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess)
    return 1;
  return count;
}

inline Status ToStatus(cudaError_t error) {
  return {error == cudaSuccess ? nullptr : cudaGetErrorString(error)};
}

// Of the launch just made. Clears the error, so that it is not blamed on whoever calls CUDA next.
inline Status LaunchStatus() { return ToStatus(cudaGetLastError()); }

// The limit of gridDim.x.
inline bool FitsGrid(int64_t blocks) { return blocks <= INT32_MAX; }
constexpr Status kTooManyBlocks{
    "the work is more blocks of threads than one launch takes (2^31 - 1); divide the rows"};

// Launches `blocks` blocks of `threads` threads, if any.
template <class... Params, class... Args>
Status Launch(const Exec<Cuda>& exec, void (*kernel)(Params...), int64_t blocks, int threads,
              const Args&... args) {
  if (blocks == 0) return {};
  if (!FitsGrid(blocks)) return kTooManyBlocks;
  kernel<<<static_cast<unsigned>(blocks), threads, 0, exec.stream>>>(args...);
  return LaunchStatus();
}

// Lets a thread block of a kernel have more dynamic shared memory than 48 KB.
template <class Kernel>
Status AllowSharedMemory(Kernel kernel, int bytes) {
  return ToStatus(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
}

constexpr int kForEachThreads = 256;

template <class Body>
__global__ void __launch_bounds__(kForEachThreads) ForEachKernel(int64_t n, const Body body) {
  const int64_t i = int64_t{blockIdx.x} * kForEachThreads + threadIdx.x;
  if (i < n) body(i);
}

// Calls body(i) for 0 <= i < n, each in a thread of its own.
template <class Body>
Status ForEach(const Exec<Cuda>& exec, int64_t n, const Body& body) {
  return Launch(exec, ForEachKernel<Body>, CeilDiv(n, kForEachThreads), kForEachThreads, n, body);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_LAUNCH_CUH_
