// scale_e8m0: the power of two that a block of MXFP8 is scaled by, and its inverse as E8M0;
// elementwise. The formula is core/block_scale.h.
//
// rounding "up": no finite element saturates (arXiv:2506.08027). "floor": OCP MX v1.0, 6.3.
#include "core/block_op.h"
#include "kernels/block_scale.h"

namespace qshard {
namespace {

template <class Platform>
Error ScaleE8M0(Exec<Platform> exec, std::string_view element, std::string_view rounding,
                AnyBuffer amax, Result<AnyBuffer> scale, Result<AnyBuffer> scale_inv) {
  constexpr char kOp[] = "scale_e8m0";
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "scale", *scale, "amax", amax));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "scale_inv", *scale_inv, "amax", amax));
  QSHARD_REQUIRE(rounding == "up" || rounding == "floor", kOp, ": rounding (", rounding,
                 ") is not up or floor");
  float *in = nullptr, *out = nullptr;
  uint8_t* out_inv = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", amax, &in));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", *scale, &out));
  QSHARD_RETURN_IF_ERROR(CodesOf<E8M0>(kOp, "scale_inv", *scale_inv, &out_inv));
  const int64_t n = static_cast<int64_t>(amax.element_count());
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) {
    const kernels::PowerRule rule{decltype(code)::type::kMax,
                                  rounding == "up" ? PowerRounding::kUp : PowerRounding::kFloor};
    return ToError(kOp, kernels::ScaleE8M0(exec, in, n, rule, out, out_inv));
  });
}

}  // namespace

QSHARD_DEFINE_OP(scale_e8m0, ScaleE8M0,
                 .Attr<std::string_view>("element")
                     .Attr<std::string_view>("rounding")
                     .Arg<AnyBuffer>() /* amax */
                     .Ret<AnyBuffer>() /* scale */.Ret<AnyBuffer>() /* scale_inv */)

}  // namespace qshard
