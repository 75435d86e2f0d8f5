// Flat slices of many weights, in one launch: which slice a block of threads has a part in, and the
// tiles in which a warp walks over it.
//
// A weight [rows, cols] is seen in tiles of 16 rows and 128 columns from its first element on,
// wherever the slice starts. A warp takes tiles, a lane four neighbouring columns of each: whole
// blocks of 1x16 to 16x128 elements lie in one tile, and whole bytes of codes belong to one lane.
// Where the slice starts is read from device memory, so the host launches as many tiles as it could
// touch.
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

// Parts are blocks of threads.
struct SliceTable : TensorTable<SliceEntry, 448> {
  const uint32_t* starts;  // of the slices here
  SliceRule rule;          // one block is many rows of kSliceCols
  int tiles;               // that a warp takes, one after the other
};

// A weight without other structure is seen as rows of a tile's width, so that tiles are contiguous,
// and their blocks too: one that is one block, or whose blocks are of one row and cut such rows.
inline SliceEntry EntryOf(const Slice& slice, const SliceRule& rule) {
  const bool flat =
      rule.block_rows == 0 || (rule.block_rows == 1 && kSliceCols % rule.block_cols == 0 &&
                               slice.cols % kSliceCols == 0 && rule.whole != WholeAmax::kRow);
  const int64_t cols = flat ? kSliceCols : slice.cols;
  return {slice.x, slice.data, slice.length, slice.rows * slice.cols,
          cols,    slice.grid, slice.whole,  0};
}

// Blocks of threads that a slice needs, wherever it starts.
inline int64_t BlocksFor(const SliceEntry& slice, int tiles) {
  if (slice.length == 0 || slice.size == 0) return 0;
  const int64_t strip = slice.cols * kSliceRows;
  const int64_t strips =
      std::min(CeilDiv(slice.size, strip), (slice.length + strip - 2) / strip + 1);
  return CeilDiv(strips * CeilDiv(slice.cols, kSliceCols), kSliceWarps * tiles);
}

// Calls launch(table, begin) for all slices: once, or once for every table of them, which are those
// from `begin` on.
template <class Launch>
Status ForEachSliceTable(const Slice* slices, int64_t n, const uint32_t* starts,
                         const SliceRule& rule, const Launch& launch) {
  SliceTable table;
  table.rule = rule;
  if (rule.block_rows == 0) table.rule.block_rows = INT64_MAX, table.rule.block_cols = kSliceCols;
  // Fewer warps then look at the amax of the tensor, which each does behind what it stored of
  // blocks.
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

  // Goes to the i-th tile of the warp.
  __device__ __forceinline__ void Take(int i) {
    const uint32_t number = tile + i * kSliceWarps, down = number / across;
    row = (top + down) * kSliceRows;
    const int64_t left = static_cast<int64_t>(number - down * across) * kSliceCols;
    col = left + threadIdx.x % 32 * kSliceLane;
    first = row * cols + left;
    all_cols = left + kSliceCols <= cols;
    last = first + (kSliceRows - 1) * cols + min(cols - left, int64_t{kSliceCols}) - 1;
  }

  // Whether the slice has none of the tile, or all of a whole one.
  __device__ __forceinline__ bool Empty() const { return first >= end || last < begin; }
  __device__ __forceinline__ bool Whole() const {
    return first >= begin && last < end && all_cols && cols < kMaxCols;
  }

  __device__ __forceinline__ int64_t Index(int r) const { return (row + r) * cols + col; }
  // Which of the lane's elements in a row are in the slice: those from `first` up to `last`.
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

  static constexpr int64_t kMaxCols = 1 << 30;  // rows of whole tiles are 32 bits of bytes apart
  int index;                                    // of the slice in the table
  int64_t cols, begin, end, top;
  uint32_t across, tile;  // tiles in a row of them; the first of the warp
  int64_t row, col;       // of the lane's first element
  int64_t first, last;    // elements of the tile, counted in the weight
  bool all_cols;          // the weight has all columns of the tile
};

// Four elements, each rounded as asked: to bfloat16, or else to float16. NaN is some NaN.
__device__ __forceinline__ void RoundFour(RoundedTo to, float (&v)[kSliceLane]) {
  if (to == RoundedTo::kBFloat16)
    WidenWords<bfloat16>(NarrowWords<bfloat16>(v), v);
  else
    WidenWords<float16>(NarrowWords<float16>(v), v);
}

// What a slice has of a tile: all of it, which vectors can move; all of it; or a part.
enum class TileKind { kVectors, kScalars, kPartial };

// Whether what a lane has in a row is aligned, `p` being where the weight begins.
__device__ __forceinline__ bool LanesAligned(const SliceTile& tile, const void* p, int bytes) {
  return tile.cols % kSliceLane == 0 && reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Calls use(kind) for the tiles of the warp that the slice has a part of. `kind` is the TileKind as
// a constant, `least` or a later one.
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

// Calls use(r, v, fetched) for the rows of the tile from its first on, some at a time: v[k] are the
// lane's elements in row r + k, zeros where the slice has none, and fetched[k] is fetch(r + k),
// which is for what else must be loaded: all loads of these rows are in flight together.
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
        if (part.Has(l))  // The four of a lane share lines: they stay in L1.
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
