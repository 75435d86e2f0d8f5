// Random bytes of rows of elements, across the regions of Philox.
#ifndef QSHARD_KERNELS_CPU_RANDOM_ROWS_H_
#define QSHARD_KERNELS_CPU_RANDOM_ROWS_H_

#include <algorithm>

#include "core/block.h"
#include "core/slices.h"
#include "kernels/block_cast.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

// random[i] = random byte of element (row, col + i) of matrix `batch`, for i < n. `blocks` is the
// grid that `philox` refers to.
inline void RandomRow(const Philox& philox, const Blocks& blocks, int64_t batch, int64_t row,
                      int64_t col, int64_t n, uint8_t* random) {
  const int64_t grid_rows = blocks.GridRows(), grid_cols = blocks.GridCols();
  const int64_t strip = batch * grid_rows + row / blocks.block_rows;  // row of blocks
  for (int64_t begin = 0, end; begin < n; begin = end) {
    const int64_t region = (strip * grid_cols + (col + begin) / blocks.block_cols) / philox.run;
    const int64_t first = region * philox.run, first_strip = first / grid_cols;
    const int64_t stop = std::min(first + philox.run - strip * grid_cols, grid_cols);
    end = std::min(n, stop * blocks.block_cols - col);
    const int64_t down = batch * blocks.rows + row - first_strip / grid_rows * blocks.rows -
                         first_strip % grid_rows * blocks.block_rows;
    const int64_t right = col + begin - first % grid_cols * blocks.block_cols;
    Simd().random(FromWords(philox.seed + 2 * region),
                  FromWords(philox.offset + 2 * region) +
                      static_cast<uint64_t>(down) * philox.steps.row +
                      static_cast<uint64_t>(right) * philox.steps.col,
                  philox.steps.col, end - begin, random + begin);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_RANDOM_ROWS_H_
