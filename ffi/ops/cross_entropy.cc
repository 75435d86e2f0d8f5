// Cross entropy of logits.
#include "kernels/cross_entropy.h"

#include "schema/handler.h"

namespace qshard {
namespace {

template <class Platform>
CrossEntropyRule RuleOf(const Call<Platform>& call) {
  return {call.integer("classes"), static_cast<int32_t>(call.integer("ignore_index")),
          call.number("smoothing"), call.number("z_loss")};
}

int64_t LastOf(const Buffer& buffer) { return buffer.dims[buffer.rank - 1]; }

}  // namespace

// What the loss of a row needs of its logits: stats, of the classes from `first` on.
QSHARD_DEFINE_OP(cross_entropy_stats) {
  const Buffer& logits = call.arg(0);
  return DispatchFloat(logits, [&](auto in) {
    using In = decltype(in);
    return call(kernels::CrossEntropyStats<In>(
        call.exec, Data<In>(logits), Data<int32_t>(call.arg(1)), Elements(call.arg(1)),
        LastOf(logits), call.integer("first"), call.flag("total"), Mutable<float>(call.ret(0))));
  });
}

// The loss of each row and its lse, of the stats of all parts of its classes.
QSHARD_DEFINE_OP(cross_entropy) {
  const Buffer& stats = call.arg(0);
  return call(kernels::CrossEntropy(call.exec, Data<float>(stats), Data<int32_t>(call.arg(1)),
                                    Elements(call.arg(1)), stats.dims[stats.rank - 2], RuleOf(call),
                                    Mutable<float>(call.ret(0)), Mutable<float>(call.ret(1))));
}

// The gradient of logits, which may take their memory, of that of the loss of each row.
QSHARD_DEFINE_OP(cross_entropy_grad) {
  const Buffer& logits = call.arg(0);
  return DispatchFloat(logits, [&](auto in) {
    using In = decltype(in);
    return call(kernels::CrossEntropyBackward<In>(
        call.exec, Data<In>(logits), Data<int32_t>(call.arg(1)), Data<float>(call.arg(2)),
        Data<float>(call.arg(3)), Elements(call.arg(1)), LastOf(logits), call.integer("first"),
        RuleOf(call), Mutable<In>(call.ret(0))));
  });
}

}  // namespace qshard
