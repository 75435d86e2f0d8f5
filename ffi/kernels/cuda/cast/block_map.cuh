// out = op(in, value of the block) over matrices in blocks, for CastBlock, CastBlockStochastic and
// DequantizeBlock.
//
// Reads `in` once and writes `out` once. A thread takes a vector of kWidth columns in kRows rows,
// and issues all loads before the first use. A row of up to 256 threads takes consecutive vectors,
// so a thread block covers whole rows, or a few KB of each. Index arithmetic is done once per
// thread, except for the value of a row's block. Vectors need rows of a multiple of kWidth
// elements, buffers aligned to vectors, and blocks of a multiple of kWidth columns, or of one
// column (kColumns: one value per element, and rows of blocks in multiples of kRows). All other
// cases, and edges, take one element per thread (two if they share a byte) with 64-bit divisions:
// correct, but slow.
//
// An op is a class with
// - kWidth, kRows, kInBytes, kOutBytes: bytes of a vector on each side;
// - kBackward: the first thread blocks take the last rows, which a kernel that just read `in`
//   forwards has left in L2;
// - Value Get(place): loads the values that a vector needs;
// - Apply(Words<kInBytes>, Value) -> Words<kOutBytes>;
// - kPair, elements per byte, and Element(index, place), the bits of one element of `out`, of type
//   Output.
#ifndef QSHARD_KERNELS_CUDA_CAST_BLOCK_MAP_CUH_
#define QSHARD_KERNELS_CUDA_CAST_BLOCK_MAP_CUH_

#include <cstdint>
#include <type_traits>

#include "core/block.h"
#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

constexpr int kBlockMapThreads = 256;

// Position of an element, and its block.
struct BlockPlace {
  int64_t block;     // index in the grid
  int64_t row, col;  // rows are counted over all matrices
};

// Returns the same grid with as few matrices and as small blocks as possible.
inline Blocks Simplify(Blocks b) {
  b.block_rows = std::max<int64_t>(1, std::min(b.block_rows, b.rows));
  b.block_cols = std::max<int64_t>(1, std::min(b.block_cols, b.cols));
  if (b.rows % b.block_rows == 0) b.rows *= b.batch, b.batch = 1;
  return b;
}

// Returns whether Divider can index these blocks, which must be simplified.
inline bool HasSmallIndices(const Blocks& b) {
  return b.rows < kMaxDivided && b.cols < kMaxDivided && b.GridSize() < kMaxDivided;
}

// The rows of a thread: kRows, or as many as exist, from `place` on.
struct ThreadRows {
  __device__ __forceinline__ void Next() {
    ++place.row;
    if (--left == 0) place.block += grid_cols, left = block_rows;
  }

  BlockPlace place;
  int64_t first;   // index of the first element
  int height;      // rows that exist; may be 0 or less
  int left;        // rows until the next block
  int block_rows;  // at most kRows
  int64_t grid_cols;
};

struct MapTiles {
  MapTiles(const Blocks& b, int width, int rows_per_thread)
      : rows(b.rows),
        cols(b.cols),
        grid_rows(b.GridRows()),
        grid_cols(b.GridCols()),
        block_rows(b.block_rows),
        block_cols(b.block_cols) {
    // Choose the longest rows of threads that leave few threads idle.
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

  template <int kWidth, int kRows>
  __device__ __forceinline__ ThreadRows At(uint32_t tile) const {
    const uint32_t strip = across.Divide(tile), matrix = down.Divide(strip);
    const uint32_t lane = threadIdx.x & ((1u << lanes_log2) - 1);
    const uint32_t vector = ((tile - strip * across.divisor()) << lanes_log2) + lane;
    const int64_t col = int64_t{vector} * kWidth;
    const int64_t row =
        (int64_t{strip - matrix * down.divisor()} * (kBlockMapThreads >> lanes_log2) +
         (threadIdx.x >> lanes_log2)) *
        kRows;
    const int64_t row_in_all = matrix * rows + row;
    const uint32_t block_row = block_rows.Divide(static_cast<uint32_t>(row));
    const int64_t next = int64_t{block_row + 1} * block_rows.divisor();
    return {{(matrix * grid_rows + block_row) * grid_cols +
                 block_cols.Divide(static_cast<uint32_t>(col)),
             row_in_all, col},
            row_in_all * cols + col,
            col < cols ? static_cast<int>(min(int64_t{kRows}, rows - row)) : 0,
            static_cast<int>(min(next - row, int64_t{kRows})),
            static_cast<int>(min(int64_t{block_rows.divisor()}, int64_t{kRows})),
            grid_cols};
  }

  int64_t rows, cols, grid_rows, grid_cols;
  Divider block_rows, block_cols;
  Divider across{1}, down{1};  // tiles in a row, and in a column, of tiles of a matrix
  int lanes_log2 = 0;
  int64_t tiles;
};

template <class Op>
__global__ void __launch_bounds__(kBlockMapThreads)
    BlockMapKernel(const Op op, const void* in, void* out, const MapTiles g) {
  constexpr int kRows = Op::kRows;
  const uint32_t tile = Op::kBackward ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  ThreadRows at = g.At<Op::kWidth, kRows>(tile);
  if (at.height <= 0) return;
  const char* from = static_cast<const char*>(in) + at.first / Op::kWidth * Op::kInBytes;
  char* to = static_cast<char*>(out) + at.first / Op::kWidth * Op::kOutBytes;
  const int64_t in_step = g.cols / Op::kWidth * Op::kInBytes;
  const int64_t out_step = g.cols / Op::kWidth * Op::kOutBytes;
  const auto run = [&](auto whole) {
    Words<Op::kInBytes> x[kRows];
    typename Op::Value value[Op::kColumns ? 1 : kRows];
#pragma unroll
    for (int k = 0; k < kRows; ++k, from += in_step)
      if (whole.value || k < at.height) x[k] = Load<Op::kInBytes>(from);
    if constexpr (Op::kColumns) {
      value[0] = op.Get(at.place);
    } else {
#pragma unroll
      for (int k = 0; k < kRows; ++k, at.Next())
        if (whole.value || k < at.height) value[k] = op.Get(at.place);
    }
#pragma unroll
    for (int k = 0; k < kRows; ++k, to += out_step)
      if (whole.value || k < at.height)
        Store<Write::kStream>(to, op.Apply(x[k], value[Op::kColumns ? 0 : k]));
  };
  if (at.height == kRows)
    run(std::true_type{});
  else
    run(std::false_type{});
}

// Returns whether the op can use vectors. `b` must be simplified.
template <class Op>
bool TakesVectors(const Blocks& b, const void* in, const void* out) {
  const bool blocks = Op::kColumns ? b.block_cols == 1 && b.block_rows % Op::kRows == 0
                                   : b.block_cols % Op::kWidth == 0 || b.block_cols == b.cols;
  return blocks && b.cols % Op::kWidth == 0 && HasSmallIndices(b) &&
         IsAligned(in, std::min(16, Op::kInBytes)) && IsAligned(out, std::min(16, Op::kOutBytes));
}

template <class Op>
Status LaunchBlockMap(const Exec<Cuda>& exec, const Op& op, const void* in, void* out,
                      const Blocks& b) {
  static_assert(Op::kPair <= 2);
  const MapTiles tiles(b, Op::kWidth, Op::kRows);
  return Launch(exec, BlockMapKernel<Op>, tiles.tiles, kBlockMapThreads, op, in, out, tiles);
}

// One thread per element, or per two elements that share a byte.
template <class Op>
Status LaunchBlockElements(const Exec<Cuda>& exec, const Op& op, typename Op::Output* out,
                           const Blocks& b) {
  return ForEach(exec, b.batch * b.rows * b.cols / Op::kPair, [=] __device__(int64_t t) {
    const int64_t row = t * Op::kPair / b.cols, col = t * Op::kPair - row * b.cols;
    const int64_t matrix = row / b.rows;
    const int64_t block_row = matrix * b.GridRows() + (row - matrix * b.rows) / b.block_rows;
    const auto element = [&](int k) {
      return op.Element(t * Op::kPair + k,
                        {block_row * b.GridCols() + (col + k) / b.block_cols, row, col + k});
    };
    auto& to = out[t];
    to = element(0);
    if constexpr (Op::kPair == 2) to |= static_cast<uint8_t>(element(1) << 4);
  });
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_CAST_BLOCK_MAP_CUH_
