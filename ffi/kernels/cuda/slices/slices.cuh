// Flat slices of many weights in one launch: the slice of a thread block, and the tiles that a warp
// visits.
//
// A weight [rows, cols] is divided into tiles of 16 rows and 128 columns from its first element on,
// wherever the slice starts. A warp takes tiles, and a lane four neighbouring columns of each. So
// blocks from 1x16 to 16x128 elements lie in one tile, and bytes of codes belong to one lane. The
// slice's start is read from device memory, so the host launches enough thread blocks for any
// start.
#ifndef QSHARD_KERNELS_CUDA_SLICES_SLICES_CUH_
#define QSHARD_KERNELS_CUDA_SLICES_SLICES_CUH_

#include <cstdint>
#include <type_traits>

#include "core/slices.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/tensor_table.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kSliceRows = 16, kSliceCols = 128;  // of a tile
constexpr int kSliceLane = 4;                     // columns of a lane
constexpr int kSliceThreads = 256, kSliceWarps = kSliceThreads / 32;

struct SliceEntry {
  const void* x;
  uint8_t* data;
  int64_t length;  // of the slice
  int64_t size, cols;
  int64_t grid, whole;
  unsigned first;
};

// Parts are thread blocks.
struct SliceTable : TensorTable<SliceEntry, 448> {
  const uint32_t* starts;  // of the slices in this table
  SliceRule rule;          // if the weight is one block, the block has many rows of kSliceCols
  int tiles;               // consecutive tiles of a warp
};

// Returns the entry of a slice. If the shape of the weight does not matter, it is viewed as rows of
// a tile's width, so that tiles and their blocks are contiguous. That is the case if the weight is
// one block, or if 1-D blocks divide such rows.
inline SliceEntry EntryOf(const Slice& slice, const SliceRule& rule) {
  const bool flat =
      rule.block_rows == 0 || (rule.block_rows == 1 && kSliceCols % rule.block_cols == 0 &&
                               slice.cols % kSliceCols == 0 && rule.whole != WholeAmax::kRow);
  const int64_t cols = flat ? kSliceCols : slice.cols;
  return {slice.x, slice.data, slice.length, slice.rows * slice.cols,
          cols,    slice.grid, slice.whole,  0};
}

// Returns the thread blocks that a slice needs, wherever it starts.
inline int64_t BlocksFor(const SliceEntry& slice, int tiles) {
  if (slice.length == 0 || slice.size == 0) return 0;
  const int64_t strip = slice.cols * kSliceRows;
  const int64_t strips =
      std::min(CeilDiv(slice.size, strip), (slice.length + strip - 2) / strip + 1);
  return CeilDiv(strips * CeilDiv(slice.cols, kSliceCols), kSliceWarps * tiles);
}

// Calls launch(table, begin) for all slices, once per table. `begin` is the first slice of the
// table.
template <class Launch>
Status ForEachSliceTable(const Slice* slices, int64_t n, const uint32_t* starts,
                         const SliceRule& rule, const Launch& launch) {
  SliceTable table;
  table.rule = rule;
  if (rule.block_rows == 0) table.rule.block_rows = INT64_MAX, table.rule.block_cols = kSliceCols;
  // With more tiles a warp, fewer warps read the tensor's amax, which each does after its stores of
  // block amaxes.
  table.tiles = rule.block_rows == 1 && rule.whole == WholeAmax::kTensor ? 8 : 1;
  const auto enter = [&](int64_t i, SliceEntry& slice) {
    slice = EntryOf(slices[i], rule);
    return BlocksFor(slice, table.tiles);
  };
  return ForEachTable(table, n, enter, [&](int64_t begin) {
    table.starts = starts + 2 * begin;
    return launch(table, begin);
  });
}

// A tile of a warp, and the columns of a lane.
struct SliceTile {
  __device__ __forceinline__ SliceTile(const SliceTable& table) {
    index = table.Find(blockIdx.x);
    const SliceEntry& slice = table.entries[index];
    cols = slice.cols;
    begin = StartOf(table.starts + 2 * index, slice.size);
    end = min(begin + slice.length, slice.size);
    across = static_cast<uint32_t>(CeilDiv(cols, kSliceCols));
    tile = (blockIdx.x - slice.first) * kSliceWarps * table.tiles + threadIdx.x / 32;
    top = begin / (cols * kSliceRows);
  }

  // Moves to the i-th tile of the warp.
  __device__ __forceinline__ void Take(int i) {
    const uint32_t number = tile + i * kSliceWarps, down = number / across;
    row = (top + down) * kSliceRows;
    const int64_t left = static_cast<int64_t>(number - down * across) * kSliceCols;
    col = left + threadIdx.x % 32 * kSliceLane;
    first = row * cols + left;
    all_cols = left + kSliceCols <= cols;
    last = first + (kSliceRows - 1) * cols + min(cols - left, int64_t{kSliceCols}) - 1;
  }

  // Returns whether the slice has no part of the tile, or all of a whole tile.
  __device__ __forceinline__ bool Empty() const { return first >= end || last < begin; }
  __device__ __forceinline__ bool Whole() const {
    return first >= begin && last < end && all_cols && cols < kMaxCols;
  }

  __device__ __forceinline__ int64_t Index(int r) const { return (row + r) * cols + col; }
  // The lane's elements in a row that are in the slice: `first` to `last` (exclusive).
  struct Part {
    int first, last;
    __device__ __forceinline__ bool Has(int j) const { return j >= first && j < last; }
  };
  template <bool kWhole>
  __device__ __forceinline__ Part PartOf(int r) const {
    if (kWhole) return {0, kSliceLane};
    const int64_t i = Index(r), last = min(end - i, cols - col);
    return {static_cast<int>(max(min(begin - i, int64_t{kSliceLane}), int64_t{0})),
            static_cast<int>(max(min(last, int64_t{kSliceLane}), int64_t{0}))};
  }

  // Byte offsets between rows of whole tiles fit in 32 bits.
  static constexpr int64_t kMaxCols = 1 << 30;
  int index;  // of the slice in the table
  int64_t cols, begin, end, top;
  uint32_t across, tile;  // tiles in a row of tiles; the first tile of the warp
  int64_t row, col;       // of the lane's first element
  int64_t first, last;    // elements of the tile, as indices in the weight
  bool all_cols;          // the weight has all columns of the tile
};

// Rounds four elements to bfloat16 or else float16. NaN payloads may differ.
__device__ __forceinline__ void RoundFour(RoundedTo to, float (&v)[kSliceLane]) {
  if (to == RoundedTo::kBFloat16)
    WidenWords<bfloat16>(NarrowWords<bfloat16>(v), v);
  else
    WidenWords<float16>(NarrowWords<float16>(v), v);
}

// A slice's share of a tile: all of it as aligned vectors, all of it, or a part.
enum class TileKind { kVectors, kScalars, kPartial };

// Returns whether a lane's elements in each row are aligned. `p` points to the start of the weight.
__device__ __forceinline__ bool LanesAligned(const SliceTile& tile, const void* p, int bytes) {
  return tile.cols % kSliceLane == 0 && reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Calls use(kind) for the warp's tiles that overlap the slice. `kind` is the TileKind as a
// constant, `least` or a later one.
template <class In, class Use>
__device__ __forceinline__ void ForEachTile(const SliceTable& table, SliceTile& tile,
                                            TileKind least, const Use& use) {
  const In* origin = static_cast<const In*>(table.entries[tile.index].x) - tile.begin;
  if (!LanesAligned(tile, origin, kSliceLane * sizeof(In)))
    least = least == TileKind::kVectors ? TileKind::kScalars : least;
#pragma unroll 1
  for (int i = 0; i < table.tiles; ++i) {
    tile.Take(i);
    if (tile.Empty()) continue;
    const TileKind kind = tile.Whole() ? least : TileKind::kPartial;
    if (kind == TileKind::kVectors)
      use(std::integral_constant<TileKind, TileKind::kVectors>{});
    else if (kind == TileKind::kScalars)
      use(std::integral_constant<TileKind, TileKind::kScalars>{});
    else
      use(std::integral_constant<TileKind, TileKind::kPartial>{});
  }
}

// Calls use(r, v, fetched) for the rows of the tile, some at a time. v[k] are the lane's elements
// in row r + k, zero outside the slice, and fetched[k] is fetch(r + k), for other loads. All loads
// of these rows are in flight together.
template <class In, TileKind kKind, class Fetch, class Use>
__device__ __forceinline__ void ForEachTileRows(const SliceTile& tile, const In* x, RoundedTo to,
                                                const Fetch& fetch, const Use& use) {
  constexpr bool kVectors = kKind == TileKind::kVectors, kWhole = kKind != TileKind::kPartial;
  constexpr int kBatch = kVectors ? 8 : kWhole ? 4 : 1, kLoads = kVectors ? 1 : kSliceLane;
  constexpr int kBytes = kSliceLane / kLoads * sizeof(In);
  const In* from = x - tile.begin + tile.Index(0);
  const std::conditional_t<kWhole, uint32_t, int64_t> step = tile.cols;
#pragma unroll 1
  for (int r = 0; r < kSliceRows; r += kBatch, from += kBatch * tile.cols) {
    decltype(fetch(0)) fetched[kBatch];
    Words<kBytes> w[kBatch][kLoads];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      fetched[k] = fetch(r + k);
      const SliceTile::Part part = tile.PartOf<kWhole>(r + k);
#pragma unroll
      for (int l = 0; l < kLoads; ++l) {
        w[k][l] = {};
        if (part.Has(l))  // a lane's four share lines, so they stay in L1
          w[k][l] =
              Load<kBytes, kVectors ? Read::kOnce : Read::kCached>(from + int64_t{k} * step + l);
      }
    }
    float v[kBatch][kSliceLane];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if constexpr (kVectors) {
        WidenWords<In>(w[k][0], v[k]);
      } else {
#pragma unroll
        for (int l = 0; l < kLoads; ++l) {
          float one[1];
          WidenWords<In>(w[k][l], one);
          v[k][l] = one[0];
        }
      }
    }
    if (to != RoundedTo::kFloat32) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) RoundFour(to, v[k]);
    }
    use(r, v, fetched);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_SLICES_SLICES_CUH_
