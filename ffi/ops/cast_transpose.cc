// cast_transpose: data = encode(x * scale) and its transpose, from one read of x.
//
// x is [*batch, m, *k]; data_t's memory is [*batch, *k, m]. `scale` has the first axes of x.
#include "core/op.h"
#include "kernels/cast.h"

namespace qshard {
namespace {

template <class Platform>
Error CastTranspose(Exec<Platform> exec, int64_t batch, std::string_view element, AnyBuffer x,
                    AnyBuffer scale, Result<AnyBuffer> data, Result<AnyBuffer> data_t) {
  const Dims dims = x.dimensions();
  QSHARD_REQUIRE(batch >= 0 && batch < static_cast<int64_t>(dims.size()), "cast_transpose: batch (",
                 batch, ") is not less than the number of axes of x ", Shape(x));
  QSHARD_REQUIRE(IsPrefix(scale.dimensions(), dims), "cast_transpose: scale ", Shape(scale),
                 " is not the first axes of x ", Shape(x),
                 "; give it one element for each run of x");
  QSHARD_REQUIRE(SameShape(data->dimensions(), dims), "cast_transpose: data ", Shape(*data),
                 " does not have the shape of x ", Shape(x));
  QSHARD_REQUIRE(IsTransposeOf(data_t->dimensions(), dims, batch), "cast_transpose: data_t ",
                 Shape(*data_t), " is not the transpose of x ", Shape(x));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf("cast_transpose", "scale", scale, &s));
  const int64_t length = Runs(scale.dimensions(), dims).length;
  const Matrices m(dims, batch);
  return DispatchElement<E4M3, E5M2>("cast_transpose", element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t *out = nullptr, *out_t = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>("cast_transpose", "data", *data, &out));
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>("cast_transpose", "data_t", *data_t, &out_t));
    return DispatchFloat("cast_transpose", "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError("cast_transpose",
                     kernels::CastTranspose<In, Code>(exec, Data<In>(x), s, length, m.batch, m.rows,
                                                      m.cols, out, out_t));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_transpose, CastTranspose,
                 .Attr<int64_t>("batch")
                     .Attr<std::string_view>("element")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* scale */
                     .Ret<AnyBuffer>() /* data */.Ret<AnyBuffer>() /* data_t */)

}  // namespace qshard
