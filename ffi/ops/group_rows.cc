#include "kernels/group_rows.h"

#include "schema/handler.h"

namespace qshard {

// Assigns padded rows to experts, for rows of x that are sorted by expert. Sizes that are negative
// count as 0, and sizes that exceed `tokens` are cut short.
QSHARD_DEFINE_OP(group_rows) {
  const int64_t experts = call.arg(0).dims[0];
  const int64_t tiles = call.integer("tiles"), tile_rows = call.integer("tile_rows");
  const int64_t tokens = call.integer("tokens"), least = tokens / tile_rows + experts + 1;
  QSHARD_REQUIRE(tiles >= least, call.op(), ": tiles (", tiles, ") are too few for ", tokens,
                 " tokens of ", experts, " experts; pass at least ", least);
  QSHARD_REQUIRE(tiles <= INT32_MAX / tile_rows, call.op(), ": tiles (", tiles, ") of ", tile_rows,
                 " rows are more rows than an int32 counts; divide the tokens");
  const kernels::RowGroups groups{Data<int32_t>(call.arg(0)),
                                  experts,
                                  tile_rows,
                                  tiles * tile_rows,
                                  tokens,
                                  Mutable<int32_t>(call.ret(0)),
                                  Mutable<int32_t>(call.ret(1)),
                                  Mutable<int32_t>(call.ret(2)),
                                  Mutable<int32_t>(call.ret(3)),
                                  Mutable<int32_t>(call.ret(4))};
  return call(kernels::GroupRows(call.exec, groups));
}

}  // namespace qshard
