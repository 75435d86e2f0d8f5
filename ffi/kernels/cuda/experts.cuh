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
  for (int64_t begin = 0; begin < experts.count; begin += kAtOnce * kWarp) {
    bool after[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t expert = begin + i * kWarp + lane;
      after[i] = expert < experts.count && __ldg(experts.stops + expert) > row;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned lanes = __ballot_sync(kAllLanes, after[i]);
      if (lanes != 0) return begin + i * kWarp + __ffs(lanes) - 1;
    }
  }
  return experts.count;
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_EXPERTS_CUH_
