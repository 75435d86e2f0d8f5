// Delayed scaling: the cast uses a scale that exists, and records the amax for the next.
#include "kernels/delayed.h"

#include <cmath>

#include "core/handler.h"

namespace qshard {

// data = encode(x * scale), and the amax of x, from one read of x.
QSHARD_DEFINE_OP(cast_amax) {
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    using Code = typename decltype(code)::type;
    using In = typename decltype(in)::type;
    return call(kernels::CastAmax<In, Code>(
        call.exec, Data<In>(call.arg(0)), Data<float>(call.arg(1)), call.ArgRun(1),
        call.nonfinite(), Elements(call.arg(0)), Elements(call.ret(1)), call.RetRun(1),
        Mutable<uint8_t>(call.ret(0)), Mutable<float>(call.ret(1))));
  });
}

// data = encode(x * scale), its transpose, and the amax of x, from one read of x.
QSHARD_DEFINE_OP(cast_transpose_amax) {
  const Matrices m(call.binding);
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    using Code = typename decltype(code)::type;
    using In = typename decltype(in)::type;
    return call(kernels::CastTransposeAmax<In, Code>(
        call.exec, Data<In>(call.arg(0)), Data<float>(call.arg(1)), call.ArgRun(1),
        call.nonfinite(), m.batch, m.rows, m.cols, Elements(call.ret(2)), call.RetRun(2),
        Mutable<uint8_t>(call.ret(0)), Mutable<uint8_t>(call.ret(1)), Mutable<float>(call.ret(2))));
  });
}

// One step for all tensors of a model at once. amax [*n] is this step's, reduced over ranks;
// history
// [*n, length] the window, the oldest first. scale = element.max * 2^-margin / max(window), or /
// amax with `most_recent`; it stays where that is infinite or NaN. An amax of 0 says nothing:
// window and scale stay.
QSHARD_DEFINE_OP(update_delayed_scale) {
  const Buffer& history = call.arg(1);
  const int64_t length = history.dims[history.rank - 1];
  QSHARD_REQUIRE(length > 0, call.op(), ": history ", Shape(history),
                 " has no amax in its windows; keep one or more");
  return DispatchFp8(call, [&](auto code) {
    const float target =
        std::ldexp(decltype(code)::type::kMax, -static_cast<int>(call.integer("margin")));
    return call(kernels::UpdateDelayedScale(
        call.exec, Data<float>(call.arg(0)), Data<float>(history), Data<float>(call.arg(2)),
        Elements(call.arg(0)), length, {target, call.flag("most_recent")},
        Mutable<float>(call.ret(0)), Mutable<float>(call.ret(1)), Mutable<float>(call.ret(2))));
  });
}

}  // namespace qshard
