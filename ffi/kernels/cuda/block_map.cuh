// out = op(in, value of the block) over matrices in blocks: what cast_block, cast_block_stochastic
// and dequantize_block share.
//
// Reads `in` once and writes `out` once. A thread takes a vector of kWidth columns in kRows rows,
// all loads under way before the first use; a row of up to 256 threads takes consecutive vectors,
// so a block of threads takes some whole rows, or a piece of a few KB of each. Work on indices is
// once a thread, but for the value of a row's block. Vectors need rows of a multiple of kWidth
// elements, buffers aligned to vectors, and blocks of a multiple of kWidth columns, or of one
// (kColumns: a value an element, and rows of blocks in multiples of kRows). Whatever else comes,
// edges too, goes one element (two, if they share a byte) a thread, with 64-bit divisions: right,
// not fast.
//
// An op is a class with
// - kWidth, kRows, kInBytes, kOutBytes: bytes of a vector on each side;
// - kBackward: the first blocks take the last rows, which a kernel that just read `in` forwards has
//   left in L2;
// - Value Get(place): what a vector needs to know, loaded;
// - Apply(Words<kInBytes>, Value) -> Words<kOutBytes>;
// - kPair, elements of a byte, and Element(index, place), the bits of one element of `out`, of type
//   Output.
#ifndef QSHARD_KERNELS_CUDA_BLOCK_MAP_CUH_
#define QSHARD_KERNELS_CUDA_BLOCK_MAP_CUH_

#include <cstdint>
#include <type_traits>

#include "core/block.h"
#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kBlockMapThreads = 256;
constexpr int64_t kMaxDivided = int64_t{1} << 31;  // what Divider divides is below

// Where an element is, and its block.
struct BlockPlace {
  int64_t block;     // in the grid
  int64_t row, col;  // rows are counted through all matrices
};

// The same grid with as few matrices, and blocks as small, as can be.
inline Blocks Simplified(Blocks b) {
  b.block_rows = std::max<int64_t>(1, std::min(b.block_rows, b.rows));
  b.block_cols = std::max<int64_t>(1, std::min(b.block_cols, b.cols));
  if (b.rows % b.block_rows == 0) b.rows *= b.batch, b.batch = 1;
  return b;
}

// Whether Divider can find its way in these, simplified.
inline bool HasSmallIndices(const Blocks& b) {
  return b.rows < kMaxDivided && b.cols < kMaxDivided && b.GridSize() < kMaxDivided;
}

struct BlockTiles {
  BlockTiles(const Blocks& b, int width, int rows_per_thread)
      : rows(b.rows),
        cols(b.cols),
        grid_rows(b.GridRows()),
        grid_cols(b.GridCols()),
        block_rows(b.block_rows),
        block_cols(b.block_cols) {
    // The longest rows of threads that leave few idle.
    const int64_t vectors = CeilDiv(cols, width);
    int lanes = kBlockMapThreads;
    while (lanes > 32 && CeilDiv(vectors, lanes) * lanes * 7 > vectors * 8) lanes /= 2;
    while (lanes > 1 && lanes / 2 >= vectors) lanes /= 2;
    while ((1 << lanes_log2) < lanes) ++lanes_log2;
    const int64_t tile_rows = kBlockMapThreads / lanes * rows_per_thread;
    across = Divider(CeilDiv(vectors, lanes));
    down = Divider(CeilDiv(rows, tile_rows));
    tiles = b.batch * down.divisor() * across.divisor();
  }

  int64_t rows, cols, grid_rows, grid_cols;
  Divider block_rows, block_cols;
  Divider across{1}, down{1};  // tiles of a row and of a column of tiles, of a matrix
  int lanes_log2 = 0;
  int64_t tiles;
};

template <class Op>
__global__ void __launch_bounds__(kBlockMapThreads)
    BlockMapKernel(const Op op, const void* in, void* out, const BlockTiles g) {
  constexpr int kRows = Op::kRows;
  const uint32_t tile = Op::kBackward ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const uint32_t strip = g.across.Divide(tile);
  const uint32_t matrix = g.down.Divide(strip);
  const uint32_t lane = threadIdx.x & ((1u << g.lanes_log2) - 1);
  const uint32_t vector = ((tile - strip * g.across.divisor()) << g.lanes_log2) + lane;
  const int64_t col = int64_t{vector} * Op::kWidth;
  const int64_t row =
      (int64_t{strip - matrix * g.down.divisor()} * (kBlockMapThreads >> g.lanes_log2) +
       (threadIdx.x >> g.lanes_log2)) *
      kRows;
  if (col >= g.cols || row >= g.rows) return;
  const int height = static_cast<int>(min(int64_t{kRows}, g.rows - row));

  const int64_t row_in_all = matrix * g.rows + row;
  const int64_t first = row_in_all * g.cols + col;
  const char* from = static_cast<const char*>(in) + first / Op::kWidth * Op::kInBytes;
  char* to = static_cast<char*>(out) + first / Op::kWidth * Op::kOutBytes;
  const int64_t in_step = g.cols / Op::kWidth * Op::kInBytes;
  const int64_t out_step = g.cols / Op::kWidth * Op::kOutBytes;

  const uint32_t block_row = g.block_rows.Divide(static_cast<uint32_t>(row));
  BlockPlace place{(matrix * g.grid_rows + block_row) * g.grid_cols +
                       g.block_cols.Divide(static_cast<uint32_t>(col)),
                   row_in_all, col};
  // Rows until the next block; beyond this thread's it does not matter how many.
  const int64_t block_rows = g.block_rows.divisor();
  const int again = static_cast<int>(min(block_rows, int64_t{kRows}));
  int left = static_cast<int>(min((block_row + 1) * block_rows - row, int64_t{kRows}));

  const auto run = [&](auto whole) {
    Words<Op::kInBytes> x[kRows];
    typename Op::Value value[Op::kColumns ? 1 : kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k, from += in_step)
      if (whole.value || k < height) x[k] = Load<Op::kInBytes>(from);
    if constexpr (Op::kColumns) {
      value[0] = op.Get(place);
    } else {
#pragma unroll
      for (int k = 0; k < kRows; ++k, ++place.row) {
        if (whole.value || k < height) value[k] = op.Get(place);
        if (--left == 0) place.block += g.grid_cols, left = again;
      }
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k, to += out_step)
      if (whole.value || k < height)
        Store<Write::kStream>(to, op.Apply(x[k], value[Op::kColumns ? 0 : k]));
  };
  if (height == kRows)
    run(std::true_type{});
  else
    run(std::false_type{});
}

// `bytes` of elements that share a byte, or one element.
template <class Op>
__global__ void __launch_bounds__(kBlockMapThreads)
    BlockMapElements(const Op op, typename Op::Output* out, const Blocks b, int64_t n) {
  const int64_t t = int64_t{blockIdx.x} * kBlockMapThreads + threadIdx.x;
  if (t >= n) return;
  const int64_t grid_rows = b.GridRows(), grid_cols = b.GridCols();
  const int64_t row = t * Op::kPair / b.cols, col = t * Op::kPair - row * b.cols;
  const int64_t matrix = row / b.rows;
  const int64_t block_row = matrix * grid_rows + (row - matrix * b.rows) / b.block_rows;
  const auto element = [&](int k) {
    return op.Element(t * Op::kPair + k,
                      {block_row * grid_cols + (col + k) / b.block_cols, row, col + k});
  };
  if constexpr (Op::kPair == 2)
    out[t] = static_cast<uint8_t>(element(0) | element(1) << 4);
  else
    out[t] = element(0);
}

// `b` is simplified.
template <class Op>
bool TakesVectors(const Blocks& b, const void* in, const void* out) {
  const bool blocks = Op::kColumns ? b.block_cols == 1 && b.block_rows % Op::kRows == 0
                                   : b.block_cols % Op::kWidth == 0 || b.block_cols == b.cols;
  return blocks && b.cols % Op::kWidth == 0 && HasSmallIndices(b) &&
         IsAligned(in, std::min(16, Op::kInBytes)) && IsAligned(out, std::min(16, Op::kOutBytes));
}

template <class Op>
Status LaunchBlockMap(CUstream_st* stream, const Op& op, const void* in, void* out,
                      const Blocks& b) {
  static_assert(Op::kPair <= 2);
  const BlockTiles tiles(b, Op::kWidth, Op::kRows);
  BlockMapKernel<<<GridSize(tiles.tiles), kBlockMapThreads, 0, stream>>>(op, in, out, tiles);
  return LaunchStatus();
}

template <class Op>
Status LaunchBlockElements(CUstream_st* stream, const Op& op, typename Op::Output* out,
                           const Blocks& b) {
  const int64_t n = b.batch * b.rows * b.cols / Op::kPair;
  BlockMapElements<<<GridSize(CeilDiv(n, kBlockMapThreads)), kBlockMapThreads, 0, stream>>>(op, out,
                                                                                            b, n);
  return LaunchStatus();
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_BLOCK_MAP_CUH_
