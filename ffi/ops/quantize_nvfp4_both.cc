// quantize_nvfp4_both: both planes of NVFP4 with one read of x, once its global amax is known: in
// blocks 1 x 16, and in blocks 16 x 1 stored transposed.
//
// global_amax has the first axes of [*batch, m, k], where a matrix of x is m x k blocks of 16 x 16.
// A matrix has one global amax, but an operand that is cut with x has to have axes of x: all
// elements of a matrix are the same, and the first is read.
#include "core/quantize_op.h"

namespace qshard {
namespace {

template <class Platform>
Error QuantizeNvfp4Both(Exec<Platform> exec, int64_t block_cols, int64_t block_rows,
                        float scale_max, bool split, AnyBuffer x, AnyBuffer global_amax,
                        Result<AnyBuffer> data, Result<AnyBuffer> scale_inv,
                        Result<AnyBuffer> data_t, Result<AnyBuffer> scale_inv_t) {
  constexpr char kOp[] = "quantize_nvfp4_both";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  kernels::Nvfp4Scales scales{};
  kernels::BothPlanes<uint8_t> out{};
  out.second_transposed = true;
  size_t axes;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "x", x, block, 1, &blocks));
  QSHARD_RETURN_IF_ERROR(CheckBlocksNvfp4(
      kOp, x, blocks, block, block_rows == kNvfp4Block && block_cols == kNvfp4Block, "16x16"));
  QSHARD_RETURN_IF_ERROR(
      GlobalAmaxOf(kOp, global_amax, x, block, blocks, scale_max, &axes, &scales));
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(kOp, "data", *data, x, block, blocks, {Each::kElement, Each::kElement, false, 2}));
  QSHARD_RETURN_IF_ERROR(
      CheckHeld(kOp, "scale_inv", *scale_inv, x, block, blocks, {Each::kElement, Each::kBlock}));
  QSHARD_RETURN_IF_ERROR(CheckHeld(kOp, "data_t", *data_t, x, block, blocks,
                                   {Each::kElement, Each::kElement, true, 2}));
  QSHARD_RETURN_IF_ERROR(CheckHeld(kOp, "scale_inv_t", *scale_inv_t, x, block, blocks,
                                   {Each::kBlock, Each::kElement, true}));
  QSHARD_RETURN_IF_ERROR(CodesOf<E2M1>(kOp, "data", *data, &out.data));
  QSHARD_RETURN_IF_ERROR(CodesOf<E4M3>(kOp, "scale_inv", *scale_inv, &out.scale_inv));
  QSHARD_RETURN_IF_ERROR(CodesOf<E2M1>(kOp, "data_t", *data_t, &out.second_data));
  QSHARD_RETURN_IF_ERROR(CodesOf<E4M3>(kOp, "scale_inv_t", *scale_inv_t, &out.second_scale_inv));
  return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) -> Error {
    using In = typename decltype(in)::type;
    const int64_t elements = blocks.rows * blocks.cols, scale_codes = elements / kNvfp4Block;
    const size_t batch_axes = BatchAxes(x, block);
    if (axes <= batch_axes || blocks.batch == 1) {
      // Of whole matrices: as many blocks of 1 x 16 as of 16 x 1.
      scales.run =
          axes <= batch_axes ? scales.run * kNvfp4Block : std::max<int64_t>(1, scale_codes);
      return ToError(kOp,
                     kernels::QuantizeBlockBoth<In, E2M1>(exec, Data<In>(x), scales, blocks, out));
    }
    const int64_t step = blocks.GridRows() * (axes == batch_axes + 2 ? blocks.GridCols() : 1);
    Blocks one = blocks;
    one.batch = 1;
    scales.run = std::max<int64_t>(1, scale_codes);
    for (int64_t b = 0; b < blocks.batch; ++b, scales.global_amax += step) {
      const kernels::BothPlanes<uint8_t> planes{
          out.data + b * elements / 2, out.scale_inv + b * scale_codes,
          out.second_data + b * elements / 2, out.second_scale_inv + b * scale_codes, true};
      QSHARD_RETURN_IF_ERROR(
          ToError(kOp, kernels::QuantizeBlockBoth<In, E2M1>(exec, Data<In>(x) + b * elements,
                                                            scales, one, planes)));
    }
    return Error::Success();
  });
}

}  // namespace

QSHARD_DEFINE_OP(quantize_nvfp4_both, QuantizeNvfp4Both,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<float>("scale_max")
                     .Attr<bool>("split")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* global_amax */
                     .Ret<AnyBuffer>() /* data */
                     .Ret<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* data_t */.Ret<AnyBuffer>() /* scale_inv_t */)

}  // namespace qshard
