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
  Nvfp4ScaleBuffers of;
  QSHARD_RETURN_IF_ERROR(
      Nvfp4ScaleBuffersOf(kOp, scale_max, amax, global_amax, *scale, *scale_inv, &of));
  const int64_t n = static_cast<int64_t>(amax.element_count());
  return ToError(kOp, kernels::ScaleNvfp4(exec, of.amax, n, of.global_amax, of.run, scale_max,
                                          of.scale, of.scale_inv));
}

}  // namespace

QSHARD_DEFINE_OP(scale_nvfp4, ScaleNvfp4Op,
                 .Attr<float>("scale_max")
                     .Arg<AnyBuffer>() /* amax */
                     .Arg<AnyBuffer>() /* global_amax */
                     .Ret<AnyBuffer>() /* scale */.Ret<AnyBuffer>() /* scale_inv */)

}  // namespace qshard
