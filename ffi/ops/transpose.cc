// transpose: data_t [*batch, *k, m] = data [*batch, m, *k], bytes. The columnwise plane of a tensor
// whose scales do not depend on the direction.
#include "core/op.h"
#include "kernels/cast.h"

namespace qshard {
namespace {

template <class Platform>
Error Transpose(Exec<Platform> exec, int64_t batch, AnyBuffer data, Result<AnyBuffer> data_t) {
  constexpr char kOp[] = "transpose";
  QSHARD_RETURN_IF_ERROR(CheckTranspose(kOp, "data_t", *data_t, "data", data, batch));
  QSHARD_REQUIRE(IsByte(data.element_type()) && data_t->element_type() == data.element_type(), kOp,
                 ": data (", data.element_type(), ") and data_t (", data_t->element_type(),
                 ") are not of one one-byte dtype; view them as uint8");
  const Matrices m(data.dimensions(), batch);
  return ToError(kOp, kernels::Transpose(exec, Data<uint8_t>(data), m.batch, m.rows, m.cols,
                                         Data<uint8_t>(data_t)));
}

}  // namespace

QSHARD_DEFINE_OP(transpose, Transpose,
                 .Attr<int64_t>("batch").Arg<AnyBuffer>() /* data */.Ret<AnyBuffer>() /* data_t */)

}  // namespace qshard
