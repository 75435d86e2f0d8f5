// The kernel that runs before a grouped product: it clamps the stops, writes the arrays that
// describe the groups, brings scales into the library's layout, and writes the zeros that the
// library leaves out.
//
// Source: TransformerEngine common/gemm/cublaslt_grouped_gemm.cu.
#ifndef QSHARD_KERNELS_CUDA_GEMM_GROUP_SETUP_CUH_
#define QSHARD_KERNELS_CUDA_GEMM_GROUP_SETUP_CUH_

#include <algorithm>

#include "kernels/cuda/gemm/float_scales.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/gemm.h"
#include "kernels/gemm_groups.h"
#include "kernels/group_tiles.h"

namespace qshard::kernels::group_setup {

// The arrays of extents in a workspace, in order.
enum Extent { kLength, kM, kN, kK };

// The matrices in a workspace's arrays of pointers, in order. Scales of a and b follow.
enum Matrix { kA, kB, kOut, kScales };

// Address of a matrix of each group, in bytes: base + group * per_group + start / stop_alignment *
// per_step, where the rows of the group begin at `start`.
struct GroupAddresses {
  const void* base;
  int64_t per_group, per_step;

  __device__ void* At(int64_t group, int64_t steps) const {
    return const_cast<char*>(static_cast<const char*>(base)) + group * per_group + steps * per_step;
  }
};

// Scales of 1-D blocks of the rows of all groups, [rows, cols], transposed within each group.
struct RowScales {
  const float* from;
  float* to;
  int64_t rows, cols;
};

struct SetUp {
  static constexpr bool kHasTiles = false;
  const int32_t *stops, *ends;  // ends: of the rows in out, or null
  int groups;
  int64_t rows, stop_alignment;  // of the axis that is divided
  int64_t out_rows;
  int32_t m, n, k;
  int64_t stride;  // of the arrays
  int32_t* extents;
  void** pointers;
  float* scalars;
  GroupAddresses addresses[GroupedWorkspace::kPointers];
  const float* tensor_scales[2];  // one per group, or null
  float* tensor_scales_to[2];
  RowScales row_scales;        // rows 0: none
  FloatScalesOf block_scales;  // matrices 0: none; likewise the next
  FloatScalesOf more_scales;
  uint4* out;
  int64_t row_words, matrix_words;  // of 16 bytes; matrix_words 0: rows of out are divided
};

// SetUp for one-byte scales, of MXFP8 and NVFP4.
struct TileSetUp : SetUp {
  static constexpr bool kHasTiles = true;
  GroupTiles tiles[2];
  const float* global_scales[2];  // one per group, or null
  float* alphas;                  // one per group
  const float** alpha_pointers;   // to alpha and beta of each group: two arrays
};

// Addresses of the matrices of b, as parameters of a launch. With kMax 0 they follow from
// `addresses`.
template <int kMax>
struct Addresses {
  const void* at[std::max(kMax, 1)];
};

// Where the rows of each group end, in shared memory: in the operands, and in out.
struct Bounds {
  int32_t *stops, *ends;  // one array, or two
};

constexpr int kThreads = 256, kBlocksPerMultiprocessor = 4;
constexpr int kFewAddresses = 448;  // parameters of less than 4 KB, the limit of older drivers

// Clamps `stops`, and writes them to `ends` in shared memory. All threads of a block call it.
__device__ inline void ClampStops(const int32_t* stops, int groups, int64_t rows,
                                  int64_t stop_alignment, int32_t* ends) {
  __shared__ int32_t most[kThreads / kWarp];
  const int each = (groups + kThreads - 1) / kThreads;
  const int first = min(groups, static_cast<int>(threadIdx.x) * each);
  const int last = min(groups, first + each);
  int32_t running = 0;
  for (int i = first; i < last; ++i) {
    running = static_cast<int32_t>(ClampStop(stops[i], running, rows, stop_alignment));
    ends[i] = running;
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
  for (int i = first; i < last; ++i) ends[i] = max(ends[i], least);
  __syncthreads();
}

// Returns the group of a row, the first that ends after it, or `groups` if there is none.
__device__ inline int GroupOf(const int32_t* ends, int groups, int64_t row) {
  int low = 0, high = groups;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (ends[middle] > row)
      high = middle;
    else
      low = middle + 1;
  }
  return low;
}

// Returns the number of rows of a group that are multiplied.
__device__ inline int32_t LengthOf(const Bounds& bounds, int group) {
  return min(bounds.stops[group] - StartOf(bounds.stops, group),
             bounds.ends[group] - StartOf(bounds.ends, group));
}

template <int kListed>
__device__ void WriteArrays(const SetUp& s, const Bounds& bounds,
                            const Addresses<kListed>& listed) {
  for (int group = threadIdx.x; group < s.groups; group += kThreads) {
    const int64_t start = StartOf(bounds.stops, group) / s.stop_alignment;
    const int64_t first = StartOf(bounds.ends, group) / s.stop_alignment;
    const int32_t extents[] = {LengthOf(bounds, group), s.m, s.n, s.k};
    for (int i = 0; i < GroupedWorkspace::kExtents; ++i)
      s.extents[i * s.stride + group] = extents[i];
    for (int i = 0; i < GroupedWorkspace::kPointers; ++i)
      s.pointers[i * s.stride + group] = s.addresses[i].At(group, i == kOut ? first : start);
    if constexpr (kListed > 0)
      s.pointers[kB * s.stride + group] = const_cast<void*>(listed.at[group]);
    // The library scales the empty sum of a group without rows too, and its scale may be NaN.
    for (int i = 0; i < 2; ++i)
      if (s.tensor_scales[i] != nullptr)
        s.tensor_scales_to[i][group * (kGemmAlignment / sizeof(float))] =
            extents[0] > 0 ? s.tensor_scales[i][group] : 0.0f;
  }
  if (threadIdx.x == 0) {
    s.scalars[0] = 1.0f;  // alpha
    s.scalars[1] = 0.0f;  // beta
  }
}

// Writes where the scales of each group are, and for NVFP4 its alpha and beta.
__device__ inline void WriteTileArrays(const TileSetUp& s, const Bounds& bounds) {
  for (int group = threadIdx.x; group < s.groups; group += kThreads) {
    for (int i = 0; i < 2; ++i)
      s.pointers[(kScales + i) * s.stride + group] =
          const_cast<uint8_t*>(s.tiles[i].Address(bounds.stops, group));
    if (s.global_scales[0] == nullptr) continue;
    // As tensor scales, the global scale of a group without rows may be NaN.
    s.alphas[group] =
        LengthOf(bounds, group) > 0 ? s.global_scales[0][group] * s.global_scales[1][group] : 0.0f;
    s.alpha_pointers[group] = s.alphas + group;
    s.alpha_pointers[s.stride + group] = s.scalars + 1;
  }
}

// Writes zeros to words `begin` to `end` of out. All threads of the grid call it.
__device__ inline void Clear(const SetUp& s, int64_t begin, int64_t end) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = begin + int64_t{blockIdx.x} * kThreads + threadIdx.x; i < end; i += step)
    s.out[i] = uint4{0, 0, 0, 0};
}

__device__ inline void MoveRowScales(const SetUp& s, const int32_t* ends) {
  const RowScales& scales = s.row_scales;
  const int64_t step = int64_t{gridDim.x} * kThreads, size = scales.rows * scales.cols;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += step) {
    const int64_t col = i / scales.rows, row = i - col * scales.rows;
    const int group = GroupOf(ends, s.groups, row);
    if (group == s.groups) continue;
    const int64_t start = StartOf(ends, group), length = ends[group] - start;
    scales.to[start * scales.cols + col * length + row - start] =
        __ldg(scales.from + row * scales.cols + col);
  }
}

__device__ inline void MoveBlockScales(const FloatScalesOf& scales) {
  const int64_t step = int64_t{gridDim.x} * kThreads, size = scales.Size();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += step)
    scales.Move(i);
}

__device__ inline void MoveTiles(const GroupTiles& tiles, const int32_t* stops) {
  const int64_t step = int64_t{gridDim.x} * kThreads, size = tiles.Words();
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < size; i += step)
    tiles.Move(i, stops);
}

// Writes zeros to the rows of out that no product writes. All threads of the grid call it. Groups
// have more rows in out than in `a` only if the data are wrong.
__device__ inline void ClearRows(const SetUp& s, const Bounds& bounds) {
  Clear(s, bounds.ends[s.groups - 1] * s.row_words, s.out_rows * s.row_words);
  const auto written = [&](int group) {
    return StartOf(bounds.ends, group) + LengthOf(bounds, group);
  };
  bool any = false;
  for (int group = threadIdx.x; group < s.groups; group += kThreads)
    any |= written(group) < bounds.ends[group];
  if (!__syncthreads_or(any)) return;
  for (int group = 0; group < s.groups; ++group)
    Clear(s, written(group) * s.row_words, bounds.ends[group] * s.row_words);
}

template <int kListed, class S>
__global__ void __launch_bounds__(kThreads)
    SetUpKernel(const S s, const __grid_constant__ Addresses<kListed> listed) {
  extern __shared__ int32_t shared[];
  const Bounds bounds{shared, s.ends == nullptr ? shared : shared + s.groups};
  ClampStops(s.stops, s.groups, s.rows, s.stop_alignment, bounds.stops);
  if (s.ends != nullptr) ClampStops(s.ends, s.groups, s.out_rows, 1, bounds.ends);
  if (blockIdx.x == 0) WriteArrays(s, bounds, listed);
  if (s.matrix_words == 0) {
    ClearRows(s, bounds);
  } else {
    for (int group = 0; group < s.groups; ++group)
      if (LengthOf(bounds, group) == 0)
        Clear(s, group * s.matrix_words, (group + 1) * s.matrix_words);
  }
  if constexpr (S::kHasTiles) {
    if (blockIdx.x == 0) WriteTileArrays(s, bounds);
    for (const GroupTiles& tiles : s.tiles) MoveTiles(tiles, bounds.stops);
    return;
  }
  if (s.row_scales.rows > 0) MoveRowScales(s, bounds.stops);
  if (s.block_scales.matrices > 0) MoveBlockScales(s.block_scales);
  if (s.more_scales.matrices > 0) MoveBlockScales(s.more_scales);
}

}  // namespace qshard::kernels::group_setup

#endif  // QSHARD_KERNELS_CUDA_GEMM_GROUP_SETUP_CUH_
