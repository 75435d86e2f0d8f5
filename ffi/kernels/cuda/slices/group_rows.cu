// Assigns padded rows to experts: one warp computes where the rows of each expert end, then each
// row finds its expert.
#include "kernels/cuda/launch.cuh"
#include "kernels/group_rows.h"

namespace qshard::kernels {
namespace {

__device__ __forceinline__ int64_t InclusiveSum(int64_t value) {
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, value, step);
    if (static_cast<int>(threadIdx.x) >= step) value += before;
  }
  return value;
}

__device__ __forceinline__ int64_t OfLastLane(int64_t value) {
  return __shfl_sync(kAllLanes, value, kWarp - 1);
}

__global__ void __launch_bounds__(kWarp) EndsKernel(const RowGroups g) {
  int64_t wanted = 0, stop = 0;
  bool fits = true;
  for (int64_t first = 0; first < g.experts; first += kWarp) {
    const int64_t e = first + threadIdx.x;
    const int32_t given = e < g.experts ? g.sizes[e] : 0;
    const int64_t size = given < 0 ? 0 : given;
    const int64_t sum = wanted + InclusiveSum(size);
    const int64_t end = sum < g.tokens ? sum : g.tokens;
    const int64_t begin = sum - size < g.tokens ? sum - size : g.tokens;
    const int64_t padded = e < g.experts ? PaddedRows(end - begin, g.tile_rows) : 0;
    const int64_t sum_of_padded = stop + InclusiveSum(padded);
    if (e < g.experts) {
      g.ends[e] = static_cast<int32_t>(end);
      g.stops[e] = static_cast<int32_t>(sum_of_padded);
    }
    fits &= given >= 0 && sum <= g.tokens;
    wanted = OfLastLane(sum);
    stop = OfLastLane(sum_of_padded);
  }
  fits = __all_sync(kAllLanes, fits);
  if (threadIdx.x == 0) *g.fits = fits;
}

// Number of the sorted `ends` that are at most `i`: the expert of row i.
__device__ __forceinline__ int64_t ExpertOf(const int32_t* ends, int64_t experts, int64_t i) {
  int64_t low = 0, high = experts;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (ends[middle] <= i)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ int64_t BeginOf(const int32_t* ends, int64_t e) {
  return e == 0 ? 0 : ends[e - 1];
}

}  // namespace

Status GroupRows(const Exec<Cuda>& exec, const RowGroups& groups) {
  if (const Status status = Launch(exec, EndsKernel, 1, kWarp, groups)) return status;
  const int64_t longest = std::max(groups.padded, groups.tokens);
  return ForEach(exec, longest, [g = groups] __device__(int64_t i) {
    if (i < g.padded) {
      const int64_t e = ExpertOf(g.stops, g.experts, i);
      int64_t row = g.tokens;
      if (e < g.experts) {
        const int64_t at = BeginOf(g.ends, e) + i - BeginOf(g.stops, e);
        if (at < g.ends[e]) row = at;
      }
      g.rows[i] = static_cast<int32_t>(row);
    }
    if (i < g.tokens) {
      const int64_t e = ExpertOf(g.ends, g.experts, i);
      const bool has_expert = e < g.experts;
      const int64_t at = has_expert ? BeginOf(g.stops, e) + i - BeginOf(g.ends, e) : g.padded - 1;
      g.place[i] = static_cast<int32_t>(at);
    }
  });
}

}  // namespace qshard::kernels
