// AmaxSlices: partial amaxes of blocks from flat slices of many weights, in one launch.
//
// Reads each slice once, 2 or 4 bytes per element. A warp takes tiles of 16 x 128 elements
// (slices.cuh). For each row of blocks in a tile, a lane keeps the largest pattern of its four
// columns, or one per column if blocks are narrower. Lanes of one block combine by shuffles,
// several rows at a time if blocks have one row, and then raise neighbouring amaxes together. They
// use an integer atomicMax, which does not depend on order. Blocks without elements of the slice
// are not written. Equals the loop over core/slices.h.
#include "kernels/cuda/raise_amax.cuh"
#include "kernels/cuda/slices/slices.cuh"
#include "kernels/slices.h"

namespace qshard::kernels {
namespace {

__device__ __forceinline__ uint32_t Pattern(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

__device__ __forceinline__ int32_t Canonical(uint32_t bits) {
  return bits > 0x7F800000u ? kNanBits : static_cast<int32_t>(bits);
}

// Blocks of a tile.
struct BlocksOfTile {
  __device__ __forceinline__ BlocksOfTile(const SliceTable& table, const SliceTile& tile)
      : width(CeilDiv(tile.cols, table.rule.block_cols)),
        grid_row(tile.row / table.rule.block_rows) {
    ends = table.rule.block_rows == 1 ? 0xFFFFu : 1u << (kSliceRows - 1);
    if (table.rule.block_rows == 1) return;
    const int64_t left = (grid_row + 1) * table.rule.block_rows - tile.row;  // of the first block
    for (int64_t r = left - 1; r < kSliceRows; r += table.rule.block_rows) ends |= 1u << r;
  }
  int64_t width, grid_row;
  uint32_t ends;  // bit r: a block ends after row r of the tile, and its amax is raised
};

// kColumns: blocks are not whole lanes, so each column is separate.
template <class In, bool kColumns, TileKind kKind>
__device__ __forceinline__ void ScanTile(const SliceTable& table, const SliceTile& tile,
                                         float* amax, uint32_t& largest) {
  const SliceEntry& slice = table.entries[tile.index];
  BlocksOfTile blocks(table, tile);
  const int lane = threadIdx.x % 32;
  const int64_t lanes_wanted = table.rule.block_cols / kSliceLane;
  const int lanes = lanes_wanted < 32 ? static_cast<int>(lanes_wanted) : 32;  // a power of two
  float* out = amax + slice.grid + (kColumns ? 0 : tile.col / table.rule.block_cols);
  float* whole = amax + slice.whole;
  const bool crowded = table.rule.block_rows > kSliceRows;  // many tiles raise one amax
  uint32_t found[kColumns ? kSliceLane : 1] = {};
  // Raises row `grid_row` of the grid, and the rows after it, to the maxima of lanes.
  const auto give = [&](auto& bits, int64_t grid_row) {
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (uint32_t& b : bits) b = max(b, __shfl_xor_sync(0xFFFFFFFFu, b, offset));
    }
    // Lane l of a block stores every `lanes`-th row, from l on.
    constexpr int kRows = sizeof(bits) / sizeof(bits[0]);
    const int mine = lane & (lanes - 1);
    for (int k = mine; k - mine < kRows; k += lanes) {
      uint32_t b = 0;
#pragma unroll
      for (int i = 0; i < kRows; ++i) b = i == k ? bits[i] : b;
      float* at = out + (grid_row + k) * blocks.width;
      if (b > 0 && crowded)
        RaiseAmax(at, Canonical(b));
      else if (b > 0)
        atomicMax(reinterpret_cast<int32_t*>(at), Canonical(b));
    }
  };
  ForEachTileRows<In, kKind>(
      tile, static_cast<const In*>(slice.x), table.rule.rounded_to, [](int) { return 0; },
      [&](int r, const auto& v, const auto&) {
        constexpr int kBatch = sizeof(v) / sizeof(v[0]);
        uint32_t rows[kBatch] = {};
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
#pragma unroll
          for (int j = 0; j < kSliceLane; ++j) rows[k] = max(rows[k], Pattern(v[k][j]));
          if (table.rule.whole == WholeAmax::kTensor) largest = max(largest, rows[k]);
          if (table.rule.whole == WholeAmax::kRow) {
            const uint32_t of_row = __reduce_max_sync(0xFFFFFFFFu, rows[k]);
            if (lane == 0 && of_row > 0) RaiseAmax(whole + tile.row + r + k, Canonical(of_row));
          }
        }
        if (!kColumns && table.rule.block_rows == 1) return give(rows, tile.row + r);
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          if constexpr (kColumns) {
#pragma unroll
            for (int j = 0; j < kSliceLane; ++j) found[j] = max(found[j], Pattern(v[k][j]));
          } else {
            found[0] = max(found[0], rows[k]);
          }
          if ((blocks.ends >> (r + k) & 1) == 0) continue;
          if constexpr (kColumns) {
            float* at = out + blocks.grid_row * blocks.width;
#pragma unroll
            for (int j = 0; j < kSliceLane; ++j)
              if (found[j] > 0)
                atomicMax(reinterpret_cast<int32_t*>(at + (tile.col + j) / table.rule.block_cols),
                          Canonical(found[j]));
          } else {
            give(found, blocks.grid_row);
          }
#pragma unroll
          for (uint32_t& bits : found) bits = 0;
          ++blocks.grid_row;  // a partial block at the end of the tile is raised after its last row
        }
      });
}

template <class In, bool kColumns>
__global__ void __launch_bounds__(kSliceThreads, kColumns ? 3 : 4)
    AmaxSlicesKernel(const __grid_constant__ SliceTable table, float* amax) {
  SliceTile tile(table);
  const SliceEntry& slice = table.entries[tile.index];
  uint32_t largest = 0;
  ForEachTile<In>(table, tile, TileKind::kVectors,
                  [&](auto kind) { ScanTile<In, kColumns, kind>(table, tile, amax, largest); });
  if (table.rule.whole == WholeAmax::kTensor) {
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (threadIdx.x % 32 == 0 && largest > 0) RaiseAmax(amax + slice.whole, Canonical(largest));
  }
}

}  // namespace

template <class In>
Status AmaxSlices(const Exec<Cuda>& exec, const Slice* slices, int64_t n, const uint32_t* starts,
                  const SliceRule& rule, float* amax) {
  // Lanes of a block must be a power of two of neighbours, all in one tile.
  const int64_t cols = rule.block_cols;
  const bool lanes = rule.block_rows == 0 || cols % kSliceCols == 0 ||
                     (kSliceCols % cols == 0 && cols % kSliceLane == 0);
  return ForEachSliceTable(slices, n, starts, rule, [&](const SliceTable& table, int64_t) {
    return Launch(exec, lanes ? AmaxSlicesKernel<In, false> : AmaxSlicesKernel<In, true>,
                  table.parts, kSliceThreads, table, amax);
  });
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, AmaxSlices)

}  // namespace qshard::kernels
