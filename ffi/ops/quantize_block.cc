// quantize_block, quantize_block_t: amax, scale and codes of blocks with one read of x, FP8 with
// fp32 or E8M0 scales; `_t` stores the codes and the scales transposed. The bits are those of
// amax_block, scale_from_amax or scale_e8m0, and cast_block.
#include "core/quantize_op.h"

namespace qshard {
namespace {

template <class Platform, bool kTransposed>
Error Quantize(const char* op, Exec<Platform> exec, BlockShape block, std::string_view element,
               const ScaleAttributes& attributes, AnyBuffer x, Result<AnyBuffer> data,
               Result<AnyBuffer> scale_inv) {
  constexpr const char* kData = kTransposed ? "data_t" : "data";
  constexpr const char* kScale = kTransposed ? "scale_inv_t" : "scale_inv";
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(op, "x", x, block, 1, &blocks));
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(op, kData, *data, x, block, blocks, {Each::kElement, Each::kElement, kTransposed}));
  QSHARD_RETURN_IF_ERROR(CheckHeld(op, kScale, *scale_inv, x, block, blocks,
                                   {Each::kBlock, Each::kBlock, kTransposed}));
  return DispatchQuantize(
      op, x, element, attributes, [&](auto in, auto code, auto scales) -> Error {
        using In = typename decltype(in)::type;
        using Code = typename decltype(code)::type;
        using Scales = decltype(scales);
        kernels::BlockPlane<typename Scales::Stored> out;
        QSHARD_RETURN_IF_ERROR(
            CodesOf<Code>(op, kData, *data, kTransposed ? &out.data_t : &out.data));
        QSHARD_RETURN_IF_ERROR(ScalesOf<Scales>(op, kScale, *scale_inv,
                                                kTransposed ? &out.scale_inv_t : &out.scale_inv));
        return ToError(op,
                       kernels::QuantizeBlock<In, Code>(exec, Data<In>(x), scales, blocks, out));
      });
}

template <class Platform>
Error QuantizeBlock(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                    std::string_view element, float eps, bool pow2, std::string_view rounding,
                    std::string_view scale_dtype, bool split, AnyBuffer x, Result<AnyBuffer> data,
                    Result<AnyBuffer> scale_inv) {
  return Quantize<Platform, false>("quantize_block", exec, {block_rows, block_cols, split}, element,
                                   {eps, pow2, rounding, scale_dtype}, x, data, scale_inv);
}

template <class Platform>
Error QuantizeBlockT(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                     std::string_view element, float eps, bool pow2, std::string_view rounding,
                     std::string_view scale_dtype, bool split, AnyBuffer x,
                     Result<AnyBuffer> data_t, Result<AnyBuffer> scale_inv_t) {
  return Quantize<Platform, true>("quantize_block_t", exec, {block_rows, block_cols, split},
                                  element, {eps, pow2, rounding, scale_dtype}, x, data_t,
                                  scale_inv_t);
}

}  // namespace

QSHARD_DEFINE_OP(quantize_block, QuantizeBlock,
                 QSHARD_QUANTIZE_ATTRIBUTES
                     .Arg<AnyBuffer>() /* x */
                     .Ret<AnyBuffer>() /* data */.Ret<AnyBuffer>() /* scale_inv */)

QSHARD_DEFINE_OP(quantize_block_t, QuantizeBlockT,
                 QSHARD_QUANTIZE_ATTRIBUTES
                     .Arg<AnyBuffer>() /* x */
                     .Ret<AnyBuffer>() /* data_t */.Ret<AnyBuffer>() /* scale_inv_t */)

}  // namespace qshard
