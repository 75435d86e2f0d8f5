// Cross entropy of logits: in three steps so that classes may be sharded, and in one.
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

// Statistics of each row of logits, for the classes from `first` on.
QSHARD_DEFINE_OP(cross_entropy_stats) {
  const Buffer& logits = call.arg(0);
  return DispatchFloat(logits, [&](auto in) {
    using In = decltype(in);
    return call(kernels::CrossEntropyStats<In>(
        call.exec, Data<In>(logits), Data<int32_t>(call.arg(1)), Elements(call.arg(1)),
        LastOf(logits), call.integer("first"), call.flag("total"), Mutable<float>(call.ret(0))));
  });
}

// Loss and lse of each row, from the stats of all parts of its classes.
QSHARD_DEFINE_OP(cross_entropy) {
  const Buffer& stats = call.arg(0);
  return call(kernels::CrossEntropy(call.exec, Data<float>(stats), Data<int32_t>(call.arg(1)),
                                    Elements(call.arg(1)), stats.dims[stats.rank - 2], RuleOf(call),
                                    Mutable<float>(call.ret(0)), Mutable<float>(call.ret(1))));
}

// Gradient of logits for the gradient of each row's loss. The result may overwrite logits.
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

// Loss of each row and gradient of its logits, which are all classes. The gradient may overwrite
// logits.
QSHARD_DEFINE_OP(cross_entropy_with_grad) {
  const Buffer& logits = call.arg(0);
  return DispatchFloat(logits, [&](auto in) {
    using In = decltype(in);
    return call(kernels::CrossEntropyWithGrad<In>(
        call.exec, Data<In>(logits), Data<int32_t>(call.arg(1)), Data<float>(call.arg(2)),
        Elements(call.arg(1)), LastOf(logits), RuleOf(call), Mutable<float>(call.ret(0)),
        Mutable<In>(call.ret(1))));
  });
}

}  // namespace qshard
