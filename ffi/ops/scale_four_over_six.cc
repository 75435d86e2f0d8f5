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
  QSHARD_REQUIRE((block_rows == 1 || block_rows == 16) && block_cols == 16 && blocks.Whole(), kOp,
                 ": x ", Shape(x), " is not a whole number of 1x16 or 16x16 blocks (", block,
                 "); pad or shard it to one");
  QSHARD_RETURN_IF_ERROR(CheckGrid(kOp, "amax", amax, x, block, blocks));
  QSHARD_REQUIRE(SameShape(scale->dimensions(), amax.dimensions()) &&
                     SameShape(scale_inv->dimensions(), amax.dimensions()),
                 kOp, ": scale ", Shape(*scale), " and scale_inv ", Shape(*scale_inv),
                 " do not have the shape of amax ", Shape(amax));
  QSHARD_REQUIRE(error == "mae" || error == "mse", kOp, ": error (", error, ") is not mae or mse");
  QSHARD_RETURN_IF_ERROR(CheckScaleMaxNvfp4(kOp, scale_max));
  int64_t run = 0;
  QSHARD_RETURN_IF_ERROR(
      RunOf(kOp, "global_amax", global_amax, global_amax.dimensions(), amax, &run));
  float *in = nullptr, *global = nullptr, *out = nullptr;
  uint8_t* out_inv = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", amax, &in));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "global_amax", global_amax, &global));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", *scale, &out));
  QSHARD_RETURN_IF_ERROR(CodesOf<E4M3>(kOp, "scale_inv", *scale_inv, &out_inv));
  const kernels::FourOverSixRule rule{scale_max, error == "mse"};
  return DispatchFloat(kOp, "x", x.element_type(), [&](auto type) {
    using In = typename decltype(type)::type;
    return ToError(kOp, kernels::ScaleFourOverSix(exec, Data<In>(x), in, global, run, rule, blocks,
                                                  out, out_inv));
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
