// Splits matrices in blocks among threads.
#ifndef QSHARD_KERNELS_CPU_BLOCK_SPANS_H_
#define QSHARD_KERNELS_CPU_BLOCK_SPANS_H_

#include <algorithm>

#include "core/block.h"
#include "kernels/cpu/parallel_for.h"

namespace qshard::kernels {

// Upper bounds of a span, so that kernels can use fixed buffers: its blocks, and its columns
// unless two blocks have more.
constexpr int64_t kSpanBlocks = 1024, kSpanCols = 4096;

// A few neighbouring blocks of one row of blocks.
struct BlockSpan {
  int64_t grid;             // index of the first block in the grid
  int64_t num_blocks;       // at most kSpanBlocks
  int64_t batch, grid_row;  // row of blocks
  int64_t first_block;      // column of the first block in its row of blocks
  int64_t start;            // index of the first element, row-major over all matrices
  int64_t rows, cols;       // elements of the span
};

// Calls body(span) for spans that cover all blocks once, in any order. Spans start at even
// columns.
template <class Body>
void ParallelSpans(const Exec<Cpu>& exec, const Blocks& blocks, const Body& body) {
  constexpr int64_t kElements = 1 << 16;  // upper bound, so that threads get even shares
  const int64_t grid_rows = blocks.GridRows(), grid_cols = blocks.GridCols();
  if (blocks.GridSize() == 0) return;
  const int64_t rows = std::min(blocks.block_rows, blocks.rows);
  const int64_t wanted = std::min(kSpanCols, kElements / rows) / blocks.block_cols;
  const int64_t width = std::clamp<int64_t>(wanted, 2, kSpanBlocks) & ~int64_t{1};
  const int64_t across = CeilDiv(grid_cols, width);
  const int64_t cols = std::min(blocks.cols, width * blocks.block_cols);
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / (rows * cols));
  ParallelRanges(exec, blocks.batch * grid_rows * across, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t strip = i / across;
      BlockSpan span;
      span.batch = strip / grid_rows;
      span.grid_row = strip % grid_rows;
      span.first_block = i % across * width;
      span.num_blocks = std::min(width, grid_cols - span.first_block);
      span.grid = strip * grid_cols + span.first_block;
      const int64_t row = span.grid_row * blocks.block_rows;
      const int64_t col = span.first_block * blocks.block_cols;
      span.rows = std::min(blocks.block_rows, blocks.rows - row);
      span.cols = std::min(blocks.cols - col, span.num_blocks * blocks.block_cols);
      span.start = (span.batch * blocks.rows + row) * blocks.cols + col;
      body(span);
    }
  });
}

// Calls body(index of the row's first element) for each row of a span.
template <class Body>
void ForEachRow(const BlockSpan& span, const Blocks& blocks, const Body& body) {
  for (int64_t r = 0; r < span.rows; ++r) body(span.start + r * blocks.cols);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_BLOCK_SPANS_H_
