// Blocks: the tiles of a matrix that share a scale.
#ifndef QSHARD_CORE_BLOCK_H_
#define QSHARD_CORE_BLOCK_H_

#include <cstdint>

#include "core/ceil_div.h"

namespace qshard {

// The block grid of `batch` row-major matrices [rows, cols], stored back to back. Blocks have
// block_rows x block_cols elements and start at the first element of each matrix. The last block of
// a row or column may be partial.
//
// A grid tensor has one value per block: [batch, grid_rows, grid_cols], row-major.
struct Blocks {
  int64_t batch, rows, cols, block_rows, block_cols;

  QSHARD_INLINE int64_t GridRows() const { return CeilDiv(rows, block_rows); }
  QSHARD_INLINE int64_t GridCols() const { return CeilDiv(cols, block_cols); }
  QSHARD_INLINE int64_t GridSize() const { return batch * GridRows() * GridCols(); }
  QSHARD_INLINE bool Whole() const { return rows % block_rows == 0 && cols % block_cols == 0; }
};

}  // namespace qshard

#endif  // QSHARD_CORE_BLOCK_H_
