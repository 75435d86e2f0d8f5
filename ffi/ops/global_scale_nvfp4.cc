// global_scale_nvfp4: S = 6 * scale_max / global_amax, the fp32 scale above the block scales of
// NVFP4, and its inverse, which is stored; elementwise. The formula is core/block_scale.h.
#include "core/block_op.h"
#include "kernels/block_scale.h"

namespace qshard {
namespace {

template <class Platform>
Error GlobalScaleNvfp4Op(Exec<Platform> exec, float scale_max, AnyBuffer global_amax,
                         Result<AnyBuffer> global_scale, Result<AnyBuffer> global_scale_inv) {
  constexpr char kOp[] = "global_scale_nvfp4";
  QSHARD_RETURN_IF_ERROR(
      CheckSameShape(kOp, "global_scale", *global_scale, "global_amax", global_amax));
  QSHARD_RETURN_IF_ERROR(
      CheckSameShape(kOp, "global_scale_inv", *global_scale_inv, "global_amax", global_amax));
  QSHARD_RETURN_IF_ERROR(CheckScaleMaxNvfp4(kOp, scale_max));
  float *in = nullptr, *out = nullptr, *out_inv = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "global_amax", global_amax, &in));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "global_scale", *global_scale, &out));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "global_scale_inv", *global_scale_inv, &out_inv));
  const int64_t n = static_cast<int64_t>(global_amax.element_count());
  return ToError(kOp, kernels::GlobalScaleNvfp4(exec, in, n, scale_max, out, out_inv));
}

}  // namespace

QSHARD_DEFINE_OP(global_scale_nvfp4, GlobalScaleNvfp4Op,
                 .Attr<float>("scale_max")
                     .Arg<AnyBuffer>() /* global_amax */
                     .Ret<AnyBuffer>() /* global_scale */.Ret<AnyBuffer>() /* global_scale_inv */)

}  // namespace qshard
