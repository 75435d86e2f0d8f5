// Random Hadamard transform before NVFP4 quantization.
#include "kernels/hadamard.h"

#include "core/hadamard.h"
#include "schema/handler.h"

namespace qshard {

// Random Hadamard transform of each 16 consecutive elements, along rows or columns of x: an exact
// sum of bfloat16 numbers, rounded once to bfloat16. It spreads outliers before NVFP4 quantizes.
// core/hadamard.h has the formula.
QSHARD_DEFINE_OP(hadamard) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::Hadamard(call.exec, Data<decltype(in)>(call.arg(0)),
                                  BlocksOf(call.binding), Mutable<bfloat16>(call.ret(0))));
  });
}

// amax is the largest |x| of each block, and amax_t the largest result of op hadamard along the
// block's columns, from one read of x. They give the global scales of both planes.
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
