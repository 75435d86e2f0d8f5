// Scales from amaxes, elementwise. core/scale.h and core/block_scale.h have the formulas. They are
// ops and not framework arithmetic, so that eager, jitted and compiled code have the same bits.
#include "kernels/block_scale.h"
#include "schema/handler.h"

namespace qshard {

namespace {

template <class Code, class Platform, class Scales>
Error BlockScales(const Call<Platform>& call, const Scales& scales) {
  return call(kernels::BlockScales<Code>(call.exec, Data<float>(call.arg(0)), Elements(call.arg(0)),
                                         scales, Mutable<float>(call.ret(0)),
                                         Mutable<typename Scales::Stored>(call.ret(1))));
}

}  // namespace

// scale = max / amax and scale_inv = 1 / scale.
QSHARD_DEFINE_OP(scale_from_amax) {
  return DispatchFp8(call, [&](auto code) {
    return BlockScales<decltype(code)>(
        call, kernels::FloatScales{call.number("eps"), call.flag("pow2"), call.nonfinite()});
  });
}

// Scale of an MX block, a power of two, and its inverse as E8M0. rounding="up": no finite element
// saturates (arXiv:2506.08027). rounding="floor": OCP MX v1.0, 6.3.
QSHARD_DEFINE_OP(scale_e8m0) {
  return DispatchElement(call, [&](auto code) {
    return BlockScales<decltype(code)>(
        call, kernels::E8M0Scales{
                  call.text("rounding") == "up" ? PowerRounding::kUp : PowerRounding::kFloor,
                  call.nonfinite()});
  });
}

// S = 6 * scale_max / global_amax, NVFP4's fp32 scale above the block scales, and its inverse,
// which is stored.
QSHARD_DEFINE_OP(global_scale_nvfp4) {
  return call(kernels::GlobalScaleNvfp4(call.exec, Data<float>(call.arg(0)), Elements(call.arg(0)),
                                        call.number("scale_max"), Mutable<float>(call.ret(0)),
                                        Mutable<float>(call.ret(1))));
}

// Scale of each NVFP4 block under the global scale of its tensor or row, and its inverse as E4M3.
QSHARD_DEFINE_OP(scale_nvfp4) {
  return BlockScales<E2M1>(call, kernels::Nvfp4Scales{Data<float>(call.arg(1)), call.ArgRun(1), 1,
                                                      call.number("scale_max"), call.nonfinite()});
}

// Scale for a delayed cast, and its inverse. It is `scale`, unless that is 0 for a tensor without
// history. Such a tensor takes element.max * 2^-margin / amax.
QSHARD_DEFINE_OP(delayed_scale) {
  return DispatchFp8(call, [&](auto code) {
    return call(kernels::DelayedScales(call.exec, Data<float>(call.arg(0)),
                                       Data<float>(call.arg(1)), Elements(call.arg(0)),
                                       DelayedTarget<decltype(code)>(call.integer("margin")),
                                       Mutable<float>(call.ret(0)), Mutable<float>(call.ret(1))));
  });
}

// One step of delayed scaling for all tensors of a model. amax [*n] is this step's, reduced over
// ranks. history [*n, length] is the window, oldest first. scale = element.max * 2^-margin /
// max(window), or / amax with `most_recent`. If that amax is infinite or NaN, the scale stays. If
// this step's amax is 0, window and scale both stay.
QSHARD_DEFINE_OP(update_delayed_scale) {
  const Buffer& history = call.arg(1);
  const int64_t length = history.dims[history.rank - 1];
  QSHARD_REQUIRE(length > 0, call.op(), ": history ", Shape(history),
                 " has no amax in its windows; keep one or more");
  return DispatchFp8(call, [&](auto code) {
    const float target = DelayedTarget<decltype(code)>(call.integer("margin"));
    return call(kernels::UpdateDelayedScale(
        call.exec, Data<float>(call.arg(0)), Data<float>(history), Data<float>(call.arg(2)),
        Elements(call.arg(0)), length, {target, call.flag("most_recent")},
        Mutable<float>(call.ret(0)), Mutable<float>(call.ret(1)), Mutable<float>(call.ret(2))));
  });
}

// Like scale_nvfp4, but each block may map its amax to 4 instead of 6 if that gives a smaller
// error. E2M1 has no 5, so 4 can suit a block with values near its amax. error="mae" sums absolute
// differences, "mse" their squares. Source: arXiv:2512.02010.
QSHARD_DEFINE_OP(scale_four_over_six) {
  const kernels::FourOverSixRule rule{call.number("scale_max"), call.text("error") == "mse",
                                      call.nonfinite()};
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::ScaleFourOverSix(
        call.exec, Data<decltype(in)>(call.arg(0)), Data<float>(call.arg(1)),
        Data<float>(call.arg(2)), call.ArgRun(2), rule, BlocksOf(call.binding),
        Mutable<float>(call.ret(0)), Mutable<uint8_t>(call.ret(1))));
  });
}

}  // namespace qshard
