// How a matrix is cut into blocks that share a scale.
#ifndef QSHARD_CORE_BLOCK_H_
#define QSHARD_CORE_BLOCK_H_

#include <cstdint>

#include "core/ceil_div.h"

namespace qshard {

// `batch` row-major matrices of rows x cols, one after the other, each in blocks of block_rows x
// block_cols from its first element on. The last blocks of a row or column may be cut short.
//
// The grid has one value for each block: [batch, grid_rows, grid_cols], row-major.
struct Blocks {
  int64_t batch, rows, cols, block_rows, block_cols;

  QSHARD_INLINE int64_t GridRows() const { return CeilDiv(rows, block_rows); }
  QSHARD_INLINE int64_t GridCols() const { return CeilDiv(cols, block_cols); }
  QSHARD_INLINE int64_t GridSize() const { return batch * GridRows() * GridCols(); }
  QSHARD_INLINE bool Whole() const { return rows % block_rows == 0 && cols % block_cols == 0; }
};

}  // namespace qshard

#endif  // QSHARD_CORE_BLOCK_H_
