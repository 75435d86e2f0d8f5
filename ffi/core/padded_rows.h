// Padded rows: the rows of x that experts multiply, in the order of experts, with padding between
// experts.
#ifndef QSHARD_CORE_PADDED_ROWS_H_
#define QSHARD_CORE_PADDED_ROWS_H_

#include <cstdint>

#include "core/round.h"

namespace qshard {

// Maps padded rows to rows of x. All numbers are data, so no value may lead outside x.
struct RowMap {
  const int32_t* rows;  // [count]
  int64_t count;        // padded rows
  int64_t x_rows;

  // Returns the row of x that padded row `row` holds, or -1 for padding, which is a row of zeros.
  QSHARD_INLINE int64_t Of(int64_t row) const {
    const int32_t own = rows[row];
    return own >= 0 && own < x_rows ? own : -1;
  }
};

// The padded rows that each expert ends before.
struct ExpertStops {
  const int32_t* stops;  // [count], increasing; other values assign rows, but never outside
  int64_t count;         // experts

  // Returns the expert of a row, searched from expert `from` on: the first that stops after the
  // row. Returns `count` for rows after all stops, which belong to no expert.
  QSHARD_INLINE int64_t ExpertOf(int64_t row, int64_t from = 0) const {
    while (from < count && stops[from] <= row) ++from;
    return from;
  }
  // Returns the first padded row of an expert.
  QSHARD_INLINE int64_t FirstRow(int64_t expert) const {
    return expert == 0 ? 0 : stops[expert - 1];
  }
};

}  // namespace qshard

#endif  // QSHARD_CORE_PADDED_ROWS_H_
