// Flat slices of many weights, in one launch: which slice a block of threads has a part in, and the
// tiles in which a warp walks over it.
//
// A weight [rows, cols] is seen in tiles of 16 rows and 128 columns from its first element on,
// wherever the slice starts. A warp takes a tile, a lane four neighbouring columns of it: whole
// blocks of 1x16 to 16x128 elements lie in one tile, and whole bytes of codes belong to one lane.
// Where the slice starts is read from device memory, so the host launches as many tiles as it could
// touch.
//
// What the host knows of the slices travels as kernel parameters, 448 slices a launch: nothing is
// allocated or copied, and a graph that captured a launch holds all it needs.
#ifndef QSHARD_KERNELS_CUDA_SLICES_CUH_
#define QSHARD_KERNELS_CUDA_SLICES_CUH_

#include <cstdint>

#include "core/slices.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kSliceRows = 16, kSliceCols = 128;  // of a tile
constexpr int kSliceLane = 4;                     // columns of a lane
constexpr int kSliceThreads = 256, kSliceWarps = kSliceThreads / 32;
constexpr int kTableSlices = 448;

struct SliceEntry {
  const void* x;
  uint8_t* data;
  int64_t length;  // of the slice
  int64_t size, cols;
  int64_t grid, whole;
  uint32_t first;  // block of threads
};

struct SliceTable {
  const uint32_t* starts;  // of the slices here
  int64_t wholes;          // where amaxes of whole weights begin
  int64_t block_rows, block_cols;
  WholeAmax whole;
  RoundedTo rounded_to;
  bool pieces;
  int count;
  SliceEntry slices[kTableSlices];
};
static_assert(sizeof(SliceTable) < 32000, "kernel parameters end at 32764 bytes");

// A weight that is one block is seen as rows of a tile's width: it has no other structure.
inline SliceEntry EntryOf(const Slice& slice, bool one_block) {
  const int64_t size = slice.rows * slice.cols;
  return {
      slice.x,     slice.data, slice.length, size, one_block ? kSliceCols : slice.cols, slice.grid,
      slice.whole, 0};
}

// Blocks of threads that a slice needs, wherever it starts.
inline int64_t BlocksFor(const SliceEntry& slice) {
  if (slice.length == 0 || slice.size == 0) return 0;
  const int64_t strip = slice.cols * kSliceRows;
  const int64_t strips =
      std::min(CeilDiv(slice.size, strip), (slice.length + strip - 2) / strip + 1);
  return CeilDiv(strips * CeilDiv(slice.cols, kSliceCols), kSliceWarps);
}

// Calls launch(table, begin, blocks) for all slices: once, or once for every kTableSlices of them,
// which are those from `begin` on.
template <class Launch>
Status ForEachTable(const Slice* slices, int64_t n, const uint32_t* starts, const SliceRule& rule,
                    int64_t wholes, const Launch& launch) {
  const bool one_block = rule.block_rows == 0;
  SliceTable table;
  table.wholes = wholes;
  table.block_rows = one_block ? INT64_MAX : rule.block_rows;
  table.block_cols = one_block ? kSliceCols : rule.block_cols;
  table.whole = rule.whole;
  table.rounded_to = rule.rounded_to;
  table.pieces = rule.pieces;
  for (int64_t begin = 0; begin < n; begin += kTableSlices) {
    table.count = static_cast<int>(std::min<int64_t>(kTableSlices, n - begin));
    table.starts = starts + 2 * begin;
    int64_t blocks = 0;
    for (int i = 0; i < table.count; ++i) {
      table.slices[i] = EntryOf(slices[begin + i], one_block);
      table.slices[i].first = static_cast<uint32_t>(blocks);
      blocks += BlocksFor(table.slices[i]);
    }
    if (blocks == 0) continue;
    launch(table, begin, GridSize(blocks));
    const Status status = LaunchStatus();
    if (status.error != nullptr) return status;
  }
  return {};
}

// The tile of a warp, and the columns of a lane.
struct SliceTile {
  __device__ __forceinline__ SliceTile(const SliceTable& table) {
    int low = 0, high = table.count - 1;  // the last slice whose first block is not after this one
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (table.slices[middle].first <= blockIdx.x)
        low = middle;
      else
        high = middle - 1;
    }
    index = low;
    const SliceEntry& slice = table.slices[index];
    cols = slice.cols;
    const uint64_t at = FromWords(table.starts + 2 * index);
    begin = at < static_cast<uint64_t>(slice.size) ? static_cast<int64_t>(at) : slice.size;
    end = min(begin + slice.length, slice.size);
    const uint32_t across = static_cast<uint32_t>((cols + kSliceCols - 1) / kSliceCols);
    const uint32_t tile = (blockIdx.x - slice.first) * kSliceWarps + threadIdx.x / 32;
    row = (begin / (cols * kSliceRows) + tile / across) * kSliceRows;
    const int64_t left = static_cast<int64_t>(tile % across) * kSliceCols;
    col = left + threadIdx.x % 32 * kSliceLane;
    first = row * cols + left;
    all_cols = left + kSliceCols <= cols;
    last = first + (kSliceRows - 1) * cols + min(cols - left, int64_t{kSliceCols}) - 1;
  }

  // Whether the slice has none of the tile, or all of a whole one.
  __device__ __forceinline__ bool Empty() const { return first >= end || last < begin; }
  __device__ __forceinline__ bool Whole() const { return first >= begin && last < end && all_cols; }

  __device__ __forceinline__ int64_t Index(int r) const { return (row + r) * cols + col; }
  __device__ __forceinline__ bool Has(int r, int j) const {
    const int64_t i = Index(r) + j;
    return col + j < cols && i >= begin && i < end;
  }

  int index;  // of the slice in the table
  int64_t cols, begin, end;
  int64_t row, col;     // of the lane's first element
  int64_t first, last;  // elements of the tile, counted in the weight
  bool all_cols;        // the weight has all columns of the tile
};

// Four elements, each rounded as asked.
__device__ __forceinline__ void RoundFour(RoundedTo to, float (&v)[kSliceLane]) {
  if (to == RoundedTo::kFloat32) return;
#pragma unroll
  for (int j = 0; j < kSliceLane; ++j)
    v[j] =
        to == RoundedTo::kBFloat16 ? Widen(Narrow<bfloat16>(v[j])) : Widen(Narrow<float16>(v[j]));
}

// What a slice has of a tile: all of it, which vectors can read; all of it; or a part.
enum class TileKind { kVectors, kScalars, kPartial };

template <class In>
__device__ __forceinline__ TileKind KindOf(const SliceTile& tile, const In* x) {
  if (!tile.Whole()) return TileKind::kPartial;
  const bool vectors = tile.cols % kSliceLane == 0 &&
                       reinterpret_cast<uintptr_t>(x - tile.begin) % (kSliceLane * sizeof(In)) == 0;
  return vectors ? TileKind::kVectors : TileKind::kScalars;
}

// Calls use(r, v) for the lane's elements in each row r of the tile, zeros where the slice has
// none. Rows of whole tiles are loaded 8 or 4 at a time.
template <class In, TileKind kKind, class Use>
__device__ __forceinline__ void ForEachTileRow(const SliceTile& tile, const In* x, RoundedTo to,
                                               const Use& use) {
  const In* origin = x - tile.begin;
  if constexpr (kKind == TileKind::kPartial) {
#pragma unroll 1
    for (int r = 0; r < kSliceRows; ++r) {
      float v[kSliceLane];
#pragma unroll
      for (int j = 0; j < kSliceLane; ++j)
        v[j] = tile.Has(r, j) ? Widen(origin[tile.Index(r) + j]) : 0.0f;
      RoundFour(to, v);
      use(r, v);
    }
  } else {
    constexpr bool kVectors = kKind == TileKind::kVectors;
    constexpr int kBatch = kVectors ? 8 : 4, kLoads = kVectors ? 1 : kSliceLane;
    constexpr int kWidth = kSliceLane / kLoads;
    const In* from = origin + tile.Index(0);
#pragma unroll
    for (int r = 0; r < kSliceRows; r += kBatch) {
      Words<kWidth * sizeof(In)> w[kBatch][kLoads];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
#pragma unroll
        for (int l = 0; l < kLoads; ++l)  // The four of a lane share lines: they must stay in L1.
          w[k][l] = Load<kWidth * sizeof(In), kVectors ? Read::kOnce : Read::kCached>(
              from + (r + k) * tile.cols + l);
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        float v[kSliceLane];
        if constexpr (kVectors) {
          WidenWords<In>(w[k][0], v);
        } else {
#pragma unroll
          for (int l = 0; l < kLoads; ++l) {
            float one[1];
            WidenWords<In>(w[k][l], one);
            v[l] = one[0];
          }
        }
        RoundFour(to, v);
        use(r + k, v);
      }
    }
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_SLICES_CUH_
