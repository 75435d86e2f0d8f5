// What every launcher needs: sizes of grids, alignment, and the outcome of a launch.
#ifndef QSHARD_KERNELS_CUDA_LAUNCH_CUH_
#define QSHARD_KERNELS_CUDA_LAUNCH_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/exec.h"

namespace qshard::kernels {

constexpr int kWarp = 32;

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// gridDim.x goes to 2^31 - 1; a block takes enough elements that no buffer which fits in memory
// needs more.
inline unsigned GridSize(int64_t blocks) { return static_cast<unsigned>(blocks); }

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

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_LAUNCH_CUH_
