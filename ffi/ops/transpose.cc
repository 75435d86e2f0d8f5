// transpose: data_t [*batch, *k, m] = data [*batch, m, *k], bytes. The columnwise plane of a tensor
// whose scales do not depend on the direction.
#include "core/op.h"
#include "kernels/cast.h"

namespace qshard {
namespace {

template <class Platform>
Error Transpose(Exec<Platform> exec, int64_t batch, AnyBuffer data, Result<AnyBuffer> data_t) {
  const Dims dims = data.dimensions();
  QSHARD_REQUIRE(batch >= 0 && batch < static_cast<int64_t>(dims.size()), "transpose: batch (",
                 batch, ") is not less than the number of axes of data ", Shape(data));
  QSHARD_REQUIRE(IsTransposeOf(data_t->dimensions(), dims, batch), "transpose: data_t ",
                 Shape(*data_t), " is not the transpose of data ", Shape(data));
  QSHARD_REQUIRE(IsByte(data.element_type()) && data_t->element_type() == data.element_type(),
                 "transpose: data (", data.element_type(), ") and data_t (", data_t->element_type(),
                 ") are not of one one-byte dtype; view them as uint8");
  const Matrices m(dims, batch);
  return ToError("transpose", kernels::Transpose(exec, Data<uint8_t>(data), m.batch, m.rows, m.cols,
                                                 Data<uint8_t>(data_t)));
}

}  // namespace

QSHARD_DEFINE_OP(transpose, Transpose,
                 .Attr<int64_t>("batch").Arg<AnyBuffer>() /* data */.Ret<AnyBuffer>() /* data_t */)

}  // namespace qshard
