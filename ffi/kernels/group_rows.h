#ifndef QSHARD_KERNELS_GROUP_ROWS_H_
#define QSHARD_KERNELS_GROUP_ROWS_H_

#include "core/ceil_div.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// Rows of experts, as op group_rows defines them. `stops` and `ends` have one element per expert,
// `rows` one per padded row, `place` one per token. After the last stop, a run of `tile_rows` rows
// or more is unused.
struct RowGroups {
  const int32_t* sizes;
  int64_t experts, tile_rows, padded, tokens;
  int32_t *stops, *ends, *rows, *place, *fits;
};

// Number of rows of an expert after the first `end` tokens, for any `size`.
QSHARD_INLINE int64_t RowsThatFit(int32_t size, int64_t end, int64_t tokens) {
  const int64_t wanted = size < 0 ? 0 : size;
  return wanted < tokens - end ? wanted : tokens - end;
}

// Number of padded rows of an expert with `rows` rows.
QSHARD_INLINE int64_t PaddedRows(int64_t rows, int64_t tile_rows) {
  return RoundUp(rows > 0 ? rows : 1, tile_rows);
}

QSHARD_LAUNCHER(GroupRows, const RowGroups& groups);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GROUP_ROWS_H_
