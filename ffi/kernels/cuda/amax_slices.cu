// amax_slices: amaxes of blocks, as far as flat slices of many weights know them, in one launch.
//
// Reads each slice once, 2 or 4 bytes an element. A warp takes tiles of 16 x 128 elements
// (slices.cuh) and keeps, for each row of blocks in it, the largest pattern of a lane's four
// columns, or of each of them where blocks are narrower. Lanes of one block meet through shuffles,
// and what they find in amax through an integer atomicMax, which does not depend on the order they
// come in. Nothing is stored for a block that the slice has no part in. Equals the loop over
// core/slices.h.
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/slices.cuh"
#include "kernels/slices.h"

namespace qshard::kernels {
namespace {

__device__ __forceinline__ uint32_t Pattern(float v) { return __float_as_uint(v) & 0x7FFFFFFFu; }

__device__ __forceinline__ int32_t Canonical(uint32_t bits) {
  return bits > 0x7F800000u ? kNanBits : static_cast<int32_t>(bits);
}

// Where blocks are in tiles.
struct TileBlocks {
  __device__ __forceinline__ TileBlocks(const SliceTable& table, const SliceTile& tile)
      : width((tile.cols + table.block_cols - 1) / table.block_cols),
        grid_row(tile.row / table.block_rows) {
    if (table.block_rows == 1) {
      ends = 0xFFFFu;
    } else if (table.block_rows % kSliceRows == 0 || table.block_rows > INT32_MAX) {
      ends = 1u << (kSliceRows - 1);
    } else {
      ends = 1u << (kSliceRows - 1);
      const int64_t left = (grid_row + 1) * table.block_rows - tile.row;  // rows of the first block
      for (int64_t r = left - 1; r < kSliceRows; r += table.block_rows) ends |= 1u << r;
    }
  }
  int64_t width, grid_row;
  uint32_t ends;  // bit r: after row r of the tile, what was found is given away
};

// kColumns: blocks are not of whole lanes, and each column is on its own.
template <class In, bool kColumns, TileKind kKind>
__device__ __forceinline__ void ScanTile(const SliceTable& table, const SliceTile& tile,
                                         float* amax) {
  const SliceEntry& slice = table.slices[tile.index];
  TileBlocks blocks(table, tile);
  const int lane = threadIdx.x % 32;
  const int64_t lanes_wanted = table.block_cols / kSliceLane;
  const int lanes = lanes_wanted < 32 ? static_cast<int>(lanes_wanted) : 32;  // a power of two
  float* out = amax + slice.grid + (kColumns ? 0 : tile.col / table.block_cols);
  float* whole = amax + table.wholes + slice.whole;
  const bool crowded = table.block_rows > kSliceRows;  // many tiles raise one amax
  uint32_t found[kColumns ? kSliceLane : 1] = {};
  uint32_t largest = 0;
  ForEachTileRow<In, kKind>(
      tile, static_cast<const In*>(slice.x), table.rounded_to,
      [&](int r, const float (&v)[kSliceLane]) {
        uint32_t row = 0;
#pragma unroll
        for (int j = 0; j < kSliceLane; ++j) {
          row = max(row, Pattern(v[j]));
          if constexpr (kColumns) found[j] = max(found[j], Pattern(v[j]));
        }
        if constexpr (!kColumns) found[0] = max(found[0], row);
        if (table.whole == WholeAmax::kTensor) largest = max(largest, row);
        if (table.whole == WholeAmax::kRow) {
          const uint32_t of_row = __reduce_max_sync(0xFFFFFFFFu, row);
          if (lane == 0 && of_row > 0) RaiseAmax(whole + tile.row + r, Canonical(of_row));
        }
        if ((blocks.ends >> r & 1) == 0) return;
        float* at = out + blocks.grid_row * blocks.width;
        if constexpr (kColumns) {
#pragma unroll
          for (int j = 0; j < kSliceLane; ++j)
            if (found[j] > 0)
              atomicMax(reinterpret_cast<int32_t*>(at + (tile.col + j) / table.block_cols),
                        Canonical(found[j]));
        } else {
          uint32_t bits = found[0];
          for (int offset = lanes / 2; offset > 0; offset /= 2)
            bits = max(bits, __shfl_xor_sync(0xFFFFFFFFu, bits, offset));
          if (lane % lanes == 0 && bits > 0) {
            if (crowded)
              RaiseAmax(at, Canonical(bits));
            else
              atomicMax(reinterpret_cast<int32_t*>(at), Canonical(bits));
          }
        }
#pragma unroll
        for (uint32_t& bits : found) bits = 0;
        ++blocks.grid_row;  // The last row of the tile ends the loop, if not a block.
      });
  if (table.whole == WholeAmax::kTensor) {
    largest = __reduce_max_sync(0xFFFFFFFFu, largest);
    if (lane == 0 && largest > 0) RaiseAmax(whole, Canonical(largest));
  }
}

template <class In, bool kColumns>
__global__ void __launch_bounds__(kSliceThreads)
    AmaxSlicesKernel(const __grid_constant__ SliceTable table, float* amax) {
  const SliceTile tile(table);
  if (tile.Empty()) return;
  switch (KindOf(tile, static_cast<const In*>(table.slices[tile.index].x))) {
    case TileKind::kVectors:
      return ScanTile<In, kColumns, TileKind::kVectors>(table, tile, amax);
    case TileKind::kScalars:
      return ScanTile<In, kColumns, TileKind::kScalars>(table, tile, amax);
    case TileKind::kPartial:
      return ScanTile<In, kColumns, TileKind::kPartial>(table, tile, amax);
  }
}

}  // namespace

template <class In>
Status AmaxSlices(const Exec<Cuda>& exec, const Slice* slices, int64_t n, const uint32_t* starts,
                  const SliceRule& rule, float* amax) {
  int64_t wholes = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t rows = CeilDiv(slices[i].rows, std::max<int64_t>(1, rule.block_rows));
    const int64_t width = CeilDiv(slices[i].cols, std::max<int64_t>(1, rule.block_cols));
    wholes += rule.block_rows == 0 ? 1 : rows * width;
  }
  // Lanes of a block are a power of two of neighbours, and all of them in one tile.
  const int64_t cols = rule.block_cols;
  const bool lanes = rule.block_rows == 0 || cols % kSliceCols == 0 ||
                     (kSliceCols % cols == 0 && cols % kSliceLane == 0);
  return ForEachTable(
      slices, n, starts, rule, wholes, [&](const SliceTable& table, int64_t, unsigned blocks) {
        if (lanes)
          AmaxSlicesKernel<In, false><<<blocks, kSliceThreads, 0, exec.stream>>>(table, amax);
        else
          AmaxSlicesKernel<In, true><<<blocks, kSliceThreads, 0, exec.stream>>>(table, amax);
      });
}

#define QSHARD_INSTANTIATE(In)                                                              \
  template Status AmaxSlices<In>(const Exec<Cuda>&, const Slice*, int64_t, const uint32_t*, \
                                 const SliceRule&, float*);
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE

}  // namespace qshard::kernels
