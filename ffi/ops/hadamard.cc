// hadamard: the random Hadamard transform of each 16 consecutive elements, along rows of x (blocks
// of 1x16) or down its columns (16x1): an exact sum of bfloat16 numbers, rounded once to bfloat16.
// It spreads outliers before NVFP4 quantizes; the formula is core/hadamard.h.
#include "core/block_op.h"
#include "kernels/block_layout.h"

namespace qshard {
namespace {

template <class Platform>
Error Hadamard(Exec<Platform> exec, int64_t block_cols, int64_t block_rows, bool split, AnyBuffer x,
               Result<AnyBuffer> y) {
  constexpr char kOp[] = "hadamard";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "x", x, block, 1, &blocks));
  QSHARD_REQUIRE(std::min(block_rows, block_cols) == 1 && std::max(block_rows, block_cols) == 16 &&
                     blocks.Whole(),
                 kOp, ": x ", Shape(x), " is not a whole number of 1x16 or 16x1 blocks (", block,
                 "); pad or shard it to one");
  QSHARD_RETURN_IF_ERROR(CheckSameMatrix(kOp, "x", x, 1, "y", *y, 1));
  QSHARD_REQUIRE(y->element_type() == DataType::BF16, kOp, ": y (", y->element_type(),
                 ") is not bfloat16");
  return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError(kOp, kernels::Hadamard(exec, Data<In>(x), blocks, Data<bfloat16>(y)));
  });
}

}  // namespace

QSHARD_DEFINE_OP(hadamard, Hadamard,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<bool>("split")
                     .Arg<AnyBuffer>() /* x */
                     .Ret<AnyBuffer>() /* y */)

}  // namespace qshard
