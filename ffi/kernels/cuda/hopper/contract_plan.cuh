// The kernel before a product that contracts the rows of experts. It clamps the stops, makes the
// tensor maps of each expert, and transposes the scales of 1x128 blocks.
//
// Source: CUDA programming guide, "Modifying a tensor map on the device".
#ifndef QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_PLAN_CUH_
#define QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_PLAN_CUH_

#include "core/ceil_div.h"
#include "kernels/cuda/hopper/ptx.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/gemm.h"

namespace qshard::kernels::hopper {

// Maps of `a` and of b that begin and end with the rows of an expert.
struct ExpertMaps {
  CUtensorMap a, b;
};

constexpr int kPlanThreads = 256;

// The groups of a product, and the buffers for its plan.
struct Groups {
  const uint8_t *a, *b;  // codes
  const int32_t* stops;
  int32_t experts;
  int64_t rows, stop_alignment;
  int32_t* clamped;
  ExpertMaps* maps;
};

// Writes clamped stops, and the maps of experts. All threads of one block call it.
__device__ inline void Plan(const CUtensorMap& a, const CUtensorMap& b, const Groups& groups) {
  __shared__ int32_t most[kPlanThreads / kWarp];
  int32_t* const clamped = groups.clamped;
  const int each = (groups.experts + kPlanThreads - 1) / kPlanThreads;
  const int first = min(groups.experts, static_cast<int>(threadIdx.x) * each);
  const int last = min(groups.experts, first + each);
  int32_t running = 0;
  for (int i = first; i < last; ++i) {
    const int64_t stop = ClampStop(groups.stops[i], running, groups.rows, groups.stop_alignment);
    clamped[i] = running = static_cast<int32_t>(stop);
  }
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t before = __shfl_up_sync(kAllLanes, running, distance);
    if (lane >= distance) running = max(running, before);
  }
  if (lane == kWarp - 1) most[warp] = running;
  int32_t least = __shfl_up_sync(kAllLanes, running, 1);
  if (lane == 0) least = 0;
  __syncthreads();
  for (int w = 0; w < warp; ++w) least = max(least, most[w]);
  int32_t begin = least;
  for (int i = first; i < last; ++i) {
    const int32_t end = max(clamped[i], begin);
    clamped[i] = end;
    if (end > begin) {
      ExpertMaps& maps = groups.maps[i];
      maps.a = a;
      maps.b = b;
      SetRange(&maps.a, groups.a + begin, end - begin);
      SetRange(&maps.b, groups.b + begin, end - begin);
    }
    begin = end;
  }
  ReleaseMaps();
}

// Transposes scales [rows, cols] in tiles of 32 x 32. All threads of the grid call it.
struct Scales {
  const float* from;
  float* to;
  int64_t rows, cols;

  __host__ __device__ int64_t Tiles() const { return CeilDiv(rows, kWarp) * CeilDiv(cols, kWarp); }
};
__device__ inline void Transpose(const Scales& scales) {
  constexpr int kPasses = kPlanThreads / kWarp;
  __shared__ float tile[kWarp][kWarp + 1];
  const int lane = threadIdx.x % kWarp, first = threadIdx.x / kWarp;
  const int64_t across = CeilDiv(scales.cols, kWarp);
  for (int64_t t = blockIdx.x; t < scales.Tiles(); t += gridDim.x) {
    const int64_t row = t / across * kWarp, col = t % across * kWarp;
    for (int i = first; i < kWarp; i += kPasses)
      if (row + i < scales.rows && col + lane < scales.cols)
        tile[i][lane] = __ldg(scales.from + (row + i) * scales.cols + col + lane);
    __syncthreads();
    for (int i = first; i < kWarp; i += kPasses)
      if (col + i < scales.cols && row + lane < scales.rows)
        scales.to[(col + i) * scales.rows + row + lane] = tile[lane][i];
    __syncthreads();
  }
}

// Prepares a product: the first block plans, and all transpose the scales of 1x128 blocks.
__global__ void __launch_bounds__(kPlanThreads)
    PlanKernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
               const Groups groups, const Scales a_scales, const Scales b_scales) {
  if (blockIdx.x == 0) Plan(a, b, groups);
  Transpose(a_scales);
  Transpose(b_scales);
}

}  // namespace qshard::kernels::hopper

#endif  // QSHARD_KERNELS_CUDA_HOPPER_CONTRACT_PLAN_CUH_
