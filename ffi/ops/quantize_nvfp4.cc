// quantize_nvfp4, quantize_nvfp4_t, quantize_nvfp4_square_both: NVFP4 of x with one read of it,
// once its global amax is known: packed E2M1 codes and E4M3 scales. `_t` stores both transposed;
// square_both gives both orders. The bits are those of amax_block, scale_nvfp4 and
// cast_block. global_amax has the first axes of the grid of blocks.
#include "core/quantize_op.h"

namespace qshard {
namespace {

template <class Platform>
Error Quantize(const char* op, Exec<Platform> exec, BlockShape block, float scale_max, AnyBuffer x,
               AnyBuffer global_amax, const AnyBuffer* data, const AnyBuffer* scale_inv,
               const AnyBuffer* data_t, const AnyBuffer* scale_inv_t) {
  Blocks blocks;
  kernels::Nvfp4Scales scales{};
  kernels::BlockPlane<uint8_t> out;
  size_t axes;
  QSHARD_RETURN_IF_ERROR(BlocksOf(op, "x", x, block, 1, &blocks));
  const bool square = block.rows == kNvfp4Block && block.cols == kNvfp4Block;
  const bool legal = square || (!(data && data_t) && block.rows * block.cols == kNvfp4Block &&
                                (block.rows == 1 || block.cols == 1));
  QSHARD_RETURN_IF_ERROR(CheckBlocksNvfp4(op, x, blocks, block, legal,
                                          data && data_t ? "16x16" : "1x16, 16x1 or 16x16"));
  QSHARD_RETURN_IF_ERROR(
      GlobalAmaxOf(op, global_amax, x, block, blocks, scale_max, &axes, &scales));
  const auto codes = [&](const char* argument, const AnyBuffer* buffer, bool transposed,
                         uint8_t** to) {
    if (buffer == nullptr) return Error::Success();
    QSHARD_RETURN_IF_ERROR(CheckHeld(op, argument, *buffer, x, block, blocks,
                                     {Each::kElement, Each::kElement, transposed, 2}));
    return CodesOf<E2M1>(op, argument, *buffer, to);
  };
  const auto scale_codes = [&](const char* argument, const AnyBuffer* buffer, bool transposed,
                               uint8_t** to) {
    if (buffer == nullptr) return Error::Success();
    QSHARD_RETURN_IF_ERROR(CheckHeld(op, argument, *buffer, x, block, blocks,
                                     {Each::kBlock, Each::kBlock, transposed}));
    return CodesOf<E4M3>(op, argument, *buffer, to);
  };
  QSHARD_RETURN_IF_ERROR(codes("data", data, false, &out.data));
  QSHARD_RETURN_IF_ERROR(codes("data_t", data_t, true, &out.data_t));
  QSHARD_RETURN_IF_ERROR(scale_codes("scale_inv", scale_inv, false, &out.scale_inv));
  QSHARD_RETURN_IF_ERROR(scale_codes("scale_inv_t", scale_inv_t, true, &out.scale_inv_t));
  return DispatchFloat(op, "x", x.element_type(), [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError(op, kernels::QuantizeBlock<In, E2M1>(exec, Data<In>(x), scales, blocks, out));
  });
}

template <class Platform>
Error QuantizeNvfp4(Exec<Platform> exec, int64_t block_cols, int64_t block_rows, float scale_max,
                    bool split, AnyBuffer x, AnyBuffer global_amax, Result<AnyBuffer> data,
                    Result<AnyBuffer> scale_inv) {
  return Quantize("quantize_nvfp4", exec, {block_rows, block_cols, split}, scale_max, x,
                  global_amax, &*data, &*scale_inv, nullptr, nullptr);
}

template <class Platform>
Error QuantizeNvfp4T(Exec<Platform> exec, int64_t block_cols, int64_t block_rows, float scale_max,
                     bool split, AnyBuffer x, AnyBuffer global_amax, Result<AnyBuffer> data_t,
                     Result<AnyBuffer> scale_inv_t) {
  return Quantize("quantize_nvfp4_t", exec, {block_rows, block_cols, split}, scale_max, x,
                  global_amax, nullptr, nullptr, &*data_t, &*scale_inv_t);
}

template <class Platform>
Error QuantizeNvfp4SquareBoth(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                              float scale_max, bool split, AnyBuffer x, AnyBuffer global_amax,
                              Result<AnyBuffer> data, Result<AnyBuffer> scale_inv,
                              Result<AnyBuffer> data_t, Result<AnyBuffer> scale_inv_t) {
  return Quantize("quantize_nvfp4_square_both", exec, {block_rows, block_cols, split}, scale_max, x,
                  global_amax, &*data, &*scale_inv, &*data_t, &*scale_inv_t);
}

}  // namespace

#define QSHARD_NVFP4_OPERANDS                      \
  QSHARD_BLOCK_ATTRIBUTES.Attr<float>("scale_max") \
      .Attr<bool>("split")                         \
      .Arg<AnyBuffer>() /* x */                    \
      .Arg<AnyBuffer>() /* global_amax */

QSHARD_DEFINE_OP(quantize_nvfp4, QuantizeNvfp4,
                 QSHARD_NVFP4_OPERANDS
                     .Ret<AnyBuffer>() /* data */
                     .Ret<AnyBuffer>() /* scale_inv */)

QSHARD_DEFINE_OP(quantize_nvfp4_t, QuantizeNvfp4T,
                 QSHARD_NVFP4_OPERANDS
                     .Ret<AnyBuffer>() /* data_t */
                     .Ret<AnyBuffer>() /* scale_inv_t */)

QSHARD_DEFINE_OP(quantize_nvfp4_square_both, QuantizeNvfp4SquareBoth,
                 QSHARD_NVFP4_OPERANDS
                     .Ret<AnyBuffer>() /* data */
                     .Ret<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* data_t */
                     .Ret<AnyBuffer>() /* scale_inv_t */)

}  // namespace qshard
