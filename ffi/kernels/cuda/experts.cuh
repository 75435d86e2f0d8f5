// The expert of a padded row, found by a warp.
#ifndef QSHARD_KERNELS_CUDA_EXPERTS_CUH_
#define QSHARD_KERNELS_CUDA_EXPERTS_CUH_

#include <cstdint>

#include "core/padded_rows.h"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {

// Returns experts.ExpertOf(row), the same row in all lanes of a warp. All lanes must call it. Loads
// of kAtOnce stops a lane are in flight together.
__device__ __forceinline__ int64_t ExpertOfWarp(const ExpertStops& experts, int64_t row) {
  constexpr int kAtOnce = 4;
  const int lane = threadIdx.x % kWarp;
  const int count = static_cast<int>(experts.count);
  const auto last = static_cast<int32_t>(min(row, int64_t{INT32_MAX}));  // no stop is after that
  for (int begin = 0; begin < count; begin += kAtOnce * kWarp) {
    int32_t stop[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int expert = begin + i * kWarp + lane;
      stop[i] = expert < count ? __ldg(experts.stops + expert) : INT32_MIN;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned lanes = __ballot_sync(kAllLanes, stop[i] > last);
      if (lanes != 0) return begin + i * kWarp + __ffs(lanes) - 1;
    }
  }
  return count;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_EXPERTS_CUH_
