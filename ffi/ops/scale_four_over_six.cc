// scale_four_over_six: as scale_nvfp4, but each block may take its amax to 4 instead of 6, where
// that makes its error smaller: E2M1 has no 5, so a block with values near its amax may prefer 4.
//
// error "mae" sums absolute differences, "mse" their squares. global_amax has the first axes of
// amax, the amax of x in blocks. Source: arXiv:2512.02010.
#include "core/block_op.h"
#include "kernels/block_scale.h"

namespace qshard {
namespace {

template <class Platform>
Error ScaleFourOverSix(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                       std::string_view error, float scale_max, bool split, AnyBuffer x,
                       AnyBuffer amax, AnyBuffer global_amax, Result<AnyBuffer> scale,
                       Result<AnyBuffer> scale_inv) {
  constexpr char kOp[] = "scale_four_over_six";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "x", x, block, 1, &blocks));
  QSHARD_REQUIRE(
      (block_rows == 1 || block_rows == kNvfp4Block) && block_cols == kNvfp4Block && blocks.Whole(),
      kOp, ": x ", Shape(x), " is not a whole number of 1x16 or 16x16 blocks (", block,
      "); pad or shard it to one");
  QSHARD_RETURN_IF_ERROR(CheckGrid(kOp, "amax", amax, x, block, blocks));
  QSHARD_REQUIRE(error == "mae" || error == "mse", kOp, ": error (", error, ") is not mae or mse");
  Nvfp4ScaleBuffers of;
  QSHARD_RETURN_IF_ERROR(
      Nvfp4ScaleBuffersOf(kOp, scale_max, amax, global_amax, *scale, *scale_inv, &of));
  const kernels::FourOverSixRule rule{scale_max, error == "mse"};
  return DispatchFloat(kOp, "x", x.element_type(), [&](auto type) {
    using In = typename decltype(type)::type;
    return ToError(kOp, kernels::ScaleFourOverSix(exec, Data<In>(x), of.amax, of.global_amax,
                                                  of.run, rule, blocks, of.scale, of.scale_inv));
  });
}

}  // namespace

QSHARD_DEFINE_OP(scale_four_over_six, ScaleFourOverSix,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<std::string_view>("error")
                     .Attr<float>("scale_max")
                     .Attr<bool>("split")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* amax */
                     .Arg<AnyBuffer>() /* global_amax */
                     .Ret<AnyBuffer>() /* scale */.Ret<AnyBuffer>() /* scale_inv */)

}  // namespace qshard
