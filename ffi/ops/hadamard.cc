// The rotation before NVFP4.
#include "kernels/hadamard.h"

#include "core/hadamard.h"
#include "schema/handler.h"

namespace qshard {

// The random Hadamard transform of each 16 consecutive elements, along rows of x or down its
// columns: an exact sum of bfloat16 numbers, rounded once to bfloat16. It spreads outliers before
// NVFP4 quantizes; the formula is core/hadamard.h.
QSHARD_DEFINE_OP(hadamard) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::Hadamard(call.exec, Data<decltype(in)>(call.arg(0)),
                                  BlocksOf(call.binding), Mutable<bfloat16>(call.ret(0))));
  });
}

// The largest |x| of each block, and the largest of what `hadamard` makes of the block down its
// columns, from one read of x: what the global scales of both planes come from.
QSHARD_DEFINE_OP(amax_hadamard) {
  const Blocks blocks = BlocksOf(call.binding);
  QSHARD_REQUIRE(blocks.block_rows % kHadamardSize == 0, call.op(), ": block (", blocks.block_rows,
                 "x", blocks.block_cols, ") must have a multiple of ", kHadamardSize,
                 " rows, which are rotated together");
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::AmaxHadamard(call.exec, Data<decltype(in)>(call.arg(0)), blocks,
                                      Mutable<float>(call.ret(0)), Mutable<float>(call.ret(1))));
  });
}

}  // namespace qshard
