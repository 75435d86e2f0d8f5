// scale_nvfp4: the scale of each block of NVFP4 under the global scale of its tensor, or row, and
// its inverse as E4M3. The formula is core/block_scale.h. global_amax has the first axes of amax.
#include "core/block_op.h"
#include "kernels/block_scale.h"

namespace qshard {
namespace {

template <class Platform>
Error ScaleNvfp4Op(Exec<Platform> exec, float scale_max, AnyBuffer amax, AnyBuffer global_amax,
                   Result<AnyBuffer> scale, Result<AnyBuffer> scale_inv) {
  constexpr char kOp[] = "scale_nvfp4";
  QSHARD_REQUIRE(SameShape(scale->dimensions(), amax.dimensions()) &&
                     SameShape(scale_inv->dimensions(), amax.dimensions()),
                 kOp, ": scale ", Shape(*scale), " and scale_inv ", Shape(*scale_inv),
                 " do not have the shape of amax ", Shape(amax));
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
  const int64_t n = static_cast<int64_t>(amax.element_count());
  return ToError(kOp, kernels::ScaleNvfp4(exec, in, n, global, run, scale_max, out, out_inv));
}

}  // namespace

QSHARD_DEFINE_OP(scale_nvfp4, ScaleNvfp4Op,
                 .Attr<float>("scale_max")
                     .Arg<AnyBuffer>() /* amax */
                     .Arg<AnyBuffer>() /* global_amax */
                     .Ret<AnyBuffer>() /* scale */.Ret<AnyBuffer>() /* scale_inv */)

}  // namespace qshard
