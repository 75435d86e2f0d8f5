// Philox keys and offsets of stochastic rounding, from the operands of an op.
#ifndef QSHARD_OPS_PHILOX_H_
#define QSHARD_OPS_PHILOX_H_

#include "kernels/block_cast.h"
#include "schema/handler.h"

namespace qshard {

// Reads operands `seed` (number `operand`) and `offset`, and the steps. `offset` has the Philox
// index of the first element of x, of each row of blocks, or of each block, and `seed` has the same
// shape. From there the index grows by row_step per row and by col_step per column: (columns of the
// whole tensor, 1), or (1, columns) if x is a transpose.
template <class Platform>
Error ReadPhilox(const Call<Platform>& call, int operand, const Blocks& blocks,
                 kernels::Philox* philox) {
  const Buffer &seed = call.arg(operand), &offset = call.arg(operand + 1);
  QSHARD_REQUIRE(seed.rank == offset.rank, call.op(), ": seed ", Shape(seed),
                 " does not have the shape of offset ", Shape(offset), "; broadcast it");
  const IndexSteps steps{call.integer("row_step"), call.integer("col_step")};
  int64_t down, right;
  QSHARD_REQUIRE(Multiply(blocks.batch * blocks.rows, steps.row, &down) &&
                     Multiply(blocks.cols, steps.col, &right) &&
                     !__builtin_add_overflow(down, right, &down),
                 call.op(), ": steps (", steps.row, ", ", steps.col,
                 ") lead to an index above 64 bits; pass the steps of the whole tensor");
  *philox = {Data<uint32_t>(seed), Data<uint32_t>(offset), call.ArgRun(operand + 1), steps};
  return {};
}

}  // namespace qshard

#endif  // QSHARD_OPS_PHILOX_H_
