#include "kernels/add_ranks.h"

#include "schema/handler.h"

namespace qshard {

// What ranks have of a slice, in fp32 and in the order of ranks: parts[0] + parts[1] + ..., which
// with `fresh` is the total, whatever that held, and else is added to it.
QSHARD_DEFINE_OP(add_ranks) {
  const Buffer& parts = call.arg(0);
  return DispatchFloat(parts, [&](auto in) {
    using In = decltype(in);
    return call(kernels::AddRanks<In>(call.exec, Data<In>(parts), parts.dims[0], parts.dims[1],
                                      call.flag("fresh") ? nullptr : Data<float>(call.arg(1)),
                                      Mutable<float>(call.ret(0))));
  });
}

}  // namespace qshard
