#include "kernels/add_ranks.h"

#include "schema/handler.h"

namespace qshard {

// Sums the ranks' parts of a slice in fp32, in rank order: parts[0] + parts[1] + ... `mean` divides
// the sum by the number of ranks. `fresh` overwrites total with it; otherwise it is added to total.
QSHARD_DEFINE_OP(add_ranks) {
  const Buffer& parts = call.arg(0);
  return DispatchFloat(parts, [&](auto in) {
    using In = decltype(in);
    return call(kernels::AddRanks<In>(
        call.exec, Data<In>(parts), parts.dims[0], parts.dims[1], call.flag("mean"),
        call.flag("fresh") ? nullptr : Data<float>(call.arg(1)), Mutable<float>(call.ret(0))));
  });
}

}  // namespace qshard
