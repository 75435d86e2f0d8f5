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
  constexpr char kOp[] = "cast_transpose";
  const Dims dims = x.dimensions();
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "scale", scale, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "data", *data, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckTranspose(kOp, "data_t", *data_t, "x", x, batch));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", scale, &s));
  const int64_t length = Runs(scale.dimensions(), dims).length;
  const Matrices m(dims, batch);
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t *out = nullptr, *out_t = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", *data, &out));
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data_t", *data_t, &out_t));
    return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError(kOp, kernels::CastTranspose<In, Code>(exec, Data<In>(x), s, length, m.batch,
                                                           m.rows, m.cols, out, out_t));
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
