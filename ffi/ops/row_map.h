// The operands `rows` and `stops` of ops on padded rows.
#ifndef QSHARD_OPS_ROW_MAP_H_
#define QSHARD_OPS_ROW_MAP_H_

#include "core/padded_rows.h"
#include "schema/handler.h"

namespace qshard {

// Reads operands `x: float t k, rows: word p`.
template <class Platform>
RowMap RowMapOf(const Call<Platform>& call) {
  return {Data<int32_t>(call.arg(1)), Elements(call.arg(1)), call.binding.Length(0)};
}

// Reads `stops: word e`, the operand after `rows`.
template <class Platform>
ExpertStops StopsOf(const Call<Platform>& call) {
  return {Data<int32_t>(call.arg(2)), Elements(call.arg(2))};
}

}  // namespace qshard

#endif  // QSHARD_OPS_ROW_MAP_H_
