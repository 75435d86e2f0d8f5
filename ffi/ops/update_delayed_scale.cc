// update_delayed_scale: one step of delayed scaling, for all tensors of a model at once. amax [*n]
// is this step's, reduced over ranks; history [*n, length] the window, the oldest first.
//
// An amax of 0 leaves the window alone. scale = element.max * 2^-margin / max(window), or / amax
// with `most_recent`; it stays where that is 0, infinite or NaN. new_history and new_scale may be
// history and scale themselves.
#include <cmath>

#include "core/op.h"
#include "kernels/delayed.h"

namespace qshard {
namespace {

template <class Platform>
Error UpdateDelayedScale(Exec<Platform> exec, std::string_view element, int64_t margin,
                         bool most_recent, AnyBuffer amax, AnyBuffer history, AnyBuffer scale,
                         Result<AnyBuffer> new_history, Result<AnyBuffer> new_scale,
                         Result<AnyBuffer> scale_inv) {
  constexpr char kOp[] = "update_delayed_scale";
  const Dims n = amax.dimensions(), window = history.dimensions();
  QSHARD_REQUIRE(window.size() == n.size() + 1 && IsPrefix(n, window) && window[n.size()] > 0, kOp,
                 ": history ", Shape(history), " is not a window for each amax ", Shape(amax));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "scale", scale, "amax", amax));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "new_scale", *new_scale, "amax", amax));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "scale_inv", *scale_inv, "amax", amax));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "new_history", *new_history, "history", history));
  QSHARD_REQUIRE(-64 <= margin && margin <= 64, kOp, ": margin (", margin,
                 ") is not from -64 to 64; give powers of two of headroom");
  float *a = nullptr, *h = nullptr, *s = nullptr, *new_h = nullptr, *new_s = nullptr,
        *s_inv = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", amax, &a));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "history", history, &h));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", scale, &s));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "new_history", *new_history, &new_h));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "new_scale", *new_scale, &new_s));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale_inv", *scale_inv, &s_inv));
  const int64_t count = static_cast<int64_t>(amax.element_count());
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) {
    const float target = std::ldexp(decltype(code)::type::kMax, -static_cast<int>(margin));
    return ToError(kOp, kernels::UpdateDelayedScale(exec, a, h, s, count, window[n.size()],
                                                    {target, most_recent}, new_h, new_s, s_inv));
  });
}

}  // namespace

QSHARD_DEFINE_OP(update_delayed_scale, UpdateDelayedScale,
                 .Attr<std::string_view>("element")
                     .Attr<int64_t>("margin")
                     .Attr<bool>("most_recent")
                     .Arg<AnyBuffer>() /* amax */
                     .Arg<AnyBuffer>() /* history */
                     .Arg<AnyBuffer>() /* scale */
                     .Ret<AnyBuffer>() /* new_history */
                     .Ret<AnyBuffer>() /* new_scale */
                     .Ret<AnyBuffer>() /* scale_inv */)

}  // namespace qshard
