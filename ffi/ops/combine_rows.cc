// Sums of rows by token, for the experts of a token.
#include "kernels/combine_rows.h"

#include "schema/handler.h"

namespace qshard {

// Adds, for each token, its rows of y times their weights, in fp32 and in the order of `positions`.
QSHARD_DEFINE_OP(combine_rows) {
  const Buffer &y = call.arg(0), &positions = call.arg(1);
  const kernels::RowSums sums{Data<int32_t>(positions), Data<float>(call.arg(2)), y.dims[0],
                              positions.dims[0], positions.dims[1]};
  return DispatchFloat(y, [&](auto in) {
    using In = decltype(in);
    return call(kernels::CombineRows<In>(call.exec, Data<In>(y), sums, y.dims[1],
                                         Mutable<In>(call.ret(0))));
  });
}

// Gradients of y and of the weights, by row of y, for the gradient of the sums, and the amax of
// each row of the first.
QSHARD_DEFINE_OP(combine_rows_grad) {
  const Buffer &y = call.arg(0), &grad = call.arg(3);
  const kernels::RowTokens of{Data<int32_t>(call.arg(1)), Data<float>(call.arg(2)), y.dims[0],
                              grad.dims[0]};
  return DispatchFloat(y, [&](auto in) {
    using In = decltype(in);
    return call(kernels::CombineRowsGrad<In>(call.exec, Data<In>(y), of, Data<In>(grad), y.dims[1],
                                             Mutable<In>(call.ret(0)), Mutable<float>(call.ret(1)),
                                             Mutable<float>(call.ret(2))));
  });
}

}  // namespace qshard
