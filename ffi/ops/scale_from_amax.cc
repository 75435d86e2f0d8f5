// scale_from_amax: scale = max / amax and scale_inv = 1 / scale, elementwise; the formula is
// core/scale.h.
//
// An op, never framework arithmetic, so that eager, jitted and compiled code cannot drift apart.
#include "core/op.h"
#include "kernels/scale.h"

namespace qshard {
namespace {

template <class Platform>
Error ScaleFromAmaxOp(Exec<Platform> exec, std::string_view element, float eps, bool pow2,
                      AnyBuffer amax, Result<AnyBuffer> scale, Result<AnyBuffer> scale_inv) {
  constexpr char kOp[] = "scale_from_amax";
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "scale", *scale, "amax", amax));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "scale_inv", *scale_inv, "amax", amax));
  QSHARD_REQUIRE(eps >= 0.0f, kOp, ": eps (", eps, ") is not zero or positive");
  float *in = nullptr, *out = nullptr, *out_inv = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", amax, &in));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", *scale, &out));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale_inv", *scale_inv, &out_inv));
  const int64_t n = static_cast<int64_t>(amax.element_count());
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) {
    const kernels::ScaleRule rule{decltype(code)::type::kMax, eps, pow2};
    return ToError(kOp, kernels::ScaleFromAmax(exec, in, n, rule, out, out_inv));
  });
}

}  // namespace

QSHARD_DEFINE_OP(scale_from_amax, ScaleFromAmaxOp,
                 .Attr<std::string_view>("element")
                     .Attr<float>("eps")
                     .Attr<bool>("pow2")
                     .Arg<AnyBuffer>() /* amax */
                     .Ret<AnyBuffer>() /* scale */.Ret<AnyBuffer>() /* scale_inv */)

}  // namespace qshard
