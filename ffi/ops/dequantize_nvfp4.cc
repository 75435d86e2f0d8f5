// dequantize_nvfp4: x = decode(data) * (scale_inv * global_scale_inv), rounded once to the dtype of
// x. data is packed E2M1, scale_inv E4M3; global_scale_inv has the first axes of the grid of
// blocks: none, or one element a row.
#include "core/block_op.h"
#include "kernels/block_cast.h"

namespace qshard {
namespace {

template <class Platform>
Error DequantizeNvfp4(Exec<Platform> exec, int64_t block_cols, int64_t block_rows, bool split,
                      AnyBuffer data, AnyBuffer scale_inv, AnyBuffer global_scale_inv,
                      Result<AnyBuffer> x) {
  constexpr char kOp[] = "dequantize_nvfp4";
  const BlockShape block{block_rows, block_cols, split};
  Blocks blocks;
  QSHARD_RETURN_IF_ERROR(BlocksOf(kOp, "data", data, block, 2, &blocks));
  QSHARD_RETURN_IF_ERROR(CheckGrid(kOp, "scale_inv", scale_inv, data, block, blocks));
  QSHARD_RETURN_IF_ERROR(CheckSameMatrix(kOp, "data", data, 2, "x", *x, 1));
  int64_t run = 0;
  QSHARD_RETURN_IF_ERROR(RunOf(kOp, "global_scale_inv", global_scale_inv,
                               global_scale_inv.dimensions(), scale_inv, &run));
  uint8_t *in = nullptr, *s = nullptr;
  float* g = nullptr;
  QSHARD_RETURN_IF_ERROR(CodesOf<E2M1>(kOp, "data", data, &in));
  QSHARD_RETURN_IF_ERROR(CodesOf<E4M3>(kOp, "scale_inv", scale_inv, &s));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "global_scale_inv", global_scale_inv, &g));
  return DispatchFloat(kOp, "x", x->element_type(), [&](auto out) {
    using Out = typename decltype(out)::type;
    return ToError(kOp, kernels::DequantizeNvfp4(exec, in, s, g, run, blocks, Data<Out>(x)));
  });
}

}  // namespace

QSHARD_DEFINE_OP(dequantize_nvfp4, DequantizeNvfp4,
                 QSHARD_BLOCK_ATTRIBUTES.Attr<bool>("split")
                     .Arg<AnyBuffer>() /* data */
                     .Arg<AnyBuffer>() /* scale_inv */
                     .Arg<AnyBuffer>() /* global_scale_inv */
                     .Ret<AnyBuffer>() /* x */)

}  // namespace qshard
