// quantize_square_both: blocks with one read of x, FP8 with fp32 or E8M0 scales, and codes and
// scales a second time, transposed: both planes of square blocks, which hold the same numbers.
#include "core/quantize_op.h"

namespace qshard {
namespace {

template <class Platform>
Error QuantizeSquareBoth(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                         std::string_view element, float eps, bool pow2, std::string_view rounding,
                         std::string_view scale_dtype, bool split, AnyBuffer x,
                         Result<AnyBuffer> data, Result<AnyBuffer> scale_inv,
                         Result<AnyBuffer> data_t, Result<AnyBuffer> scale_inv_t) {
  constexpr char kOp[] = "quantize_square_both";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "x", x, block, 1, &blocks));
  QSHARD_REQUIRE(block_rows == block_cols, kOp, ": block (", block,
                 ") is not square; quantize its planes with quantize_block_both");
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(kOp, "data", *data, x, block, blocks, {Each::kElement, Each::kElement}));
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(kOp, "scale_inv", *scale_inv, x, block, blocks, {Each::kBlock, Each::kBlock}));
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(kOp, "data_t", *data_t, x, block, blocks, {Each::kElement, Each::kElement, true}));
  QSHARD_RETURN_IF_ERROR(CheckHeld(kOp, "scale_inv_t", *scale_inv_t, x, block, blocks,
                                   {Each::kBlock, Each::kBlock, true}));
  const ScaleAttributes attributes{eps, pow2, rounding, scale_dtype};
  return DispatchQuantize(
      kOp, x, element, attributes, [&](auto in, auto code, auto scales) -> Error {
        using In = typename decltype(in)::type;
        using Code = typename decltype(code)::type;
        using Scales = decltype(scales);
        kernels::BlockPlane<typename Scales::Stored> out;
        QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", *data, &out.data));
        QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data_t", *data_t, &out.data_t));
        QSHARD_RETURN_IF_ERROR(ScalesOf<Scales>(kOp, "scale_inv", *scale_inv, &out.scale_inv));
        QSHARD_RETURN_IF_ERROR(
            ScalesOf<Scales>(kOp, "scale_inv_t", *scale_inv_t, &out.scale_inv_t));
        return ToError(kOp,
                       kernels::QuantizeBlock<In, Code>(exec, Data<In>(x), scales, blocks, out));
      });
}

}  // namespace

QSHARD_DEFINE_OP(quantize_square_both, QuantizeSquareBoth,
                 QSHARD_QUANTIZE_ATTRIBUTES
                     .Arg<AnyBuffer>() /* x */
                     .Ret<AnyBuffer>() /* data */
                     .Ret<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* data_t */
                     .Ret<AnyBuffer>() /* scale_inv_t */)

}  // namespace qshard
