// quantize_block_both, quantize_block_both_t: both planes of x with one read of it, FP8 with fp32
// or E8M0 scales: in blocks 1 x block_cols, and in blocks block_rows x 1. The second is in the
// order of x, or stored transposed (`_t`).
#include "core/quantize_op.h"

namespace qshard {
namespace {

template <class Platform>
Error Quantize(const char* op, bool transposed, Exec<Platform> exec, BlockShape block,
               std::string_view element, const ScaleAttributes& attributes, AnyBuffer x,
               Result<AnyBuffer> data, Result<AnyBuffer> scale_inv, Result<AnyBuffer> second_data,
               Result<AnyBuffer> second_scale_inv) {
  const char* kSecondData = transposed ? "data_t" : "data_c";
  const char* kSecondScale = transposed ? "scale_inv_t" : "scale_inv_c";
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(op, "x", x, block, 1, &blocks));
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(op, "data", *data, x, block, blocks, {Each::kElement, Each::kElement}));
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(op, "scale_inv", *scale_inv, x, block, blocks, {Each::kElement, Each::kBlock}));
  QSHARD_RETURN_IF_ERROR(CheckHeld(op, kSecondData, *second_data, x, block, blocks,
                                   {Each::kElement, Each::kElement, transposed}));
  QSHARD_RETURN_IF_ERROR(CheckHeld(op, kSecondScale, *second_scale_inv, x, block, blocks,
                                   {Each::kBlock, Each::kElement, transposed}));
  return DispatchQuantize(
      op, x, element, attributes, [&](auto in, auto code, auto scales) -> Error {
        using In = typename decltype(in)::type;
        using Code = typename decltype(code)::type;
        using Scales = decltype(scales);
        kernels::BothPlanes<typename Scales::Stored> out{};
        out.second_transposed = transposed;
        QSHARD_RETURN_IF_ERROR(CodesOf<Code>(op, "data", *data, &out.data));
        QSHARD_RETURN_IF_ERROR(CodesOf<Code>(op, kSecondData, *second_data, &out.second_data));
        QSHARD_RETURN_IF_ERROR(ScalesOf<Scales>(op, "scale_inv", *scale_inv, &out.scale_inv));
        QSHARD_RETURN_IF_ERROR(
            ScalesOf<Scales>(op, kSecondScale, *second_scale_inv, &out.second_scale_inv));
        return ToError(
            op, kernels::QuantizeBlockBoth<In, Code>(exec, Data<In>(x), scales, blocks, out));
      });
}

template <class Platform>
Error QuantizeBlockBoth(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                        std::string_view element, float eps, bool pow2, std::string_view rounding,
                        std::string_view scale_dtype, bool split, AnyBuffer x,
                        Result<AnyBuffer> data, Result<AnyBuffer> scale_inv,
                        Result<AnyBuffer> data_c, Result<AnyBuffer> scale_inv_c) {
  return Quantize("quantize_block_both", false, exec, {block_rows, block_cols, split}, element,
                  {eps, pow2, rounding, scale_dtype}, x, data, scale_inv, data_c, scale_inv_c);
}

template <class Platform>
Error QuantizeBlockBothT(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                         std::string_view element, float eps, bool pow2, std::string_view rounding,
                         std::string_view scale_dtype, bool split, AnyBuffer x,
                         Result<AnyBuffer> data, Result<AnyBuffer> scale_inv,
                         Result<AnyBuffer> data_t, Result<AnyBuffer> scale_inv_t) {
  return Quantize("quantize_block_both_t", true, exec, {block_rows, block_cols, split}, element,
                  {eps, pow2, rounding, scale_dtype}, x, data, scale_inv, data_t, scale_inv_t);
}

}  // namespace

QSHARD_DEFINE_OP(quantize_block_both, QuantizeBlockBoth,
                 QSHARD_QUANTIZE_ATTRIBUTES
                     .Arg<AnyBuffer>() /* x */
                     .Ret<AnyBuffer>() /* data */
                     .Ret<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* data_c */.Ret<AnyBuffer>() /* scale_inv_c */)

QSHARD_DEFINE_OP(quantize_block_both_t, QuantizeBlockBothT,
                 QSHARD_QUANTIZE_ATTRIBUTES
                     .Arg<AnyBuffer>() /* x */
                     .Ret<AnyBuffer>() /* data */
                     .Ret<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* data_t */.Ret<AnyBuffer>() /* scale_inv_t */)

}  // namespace qshard
