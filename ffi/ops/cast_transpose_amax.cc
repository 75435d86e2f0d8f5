// cast_transpose_amax: data = encode(x * scale), its transpose, and the amax of x, from one read of
// x. As cast_transpose and cast_amax.
#include "core/op.h"
#include "kernels/delayed.h"

namespace qshard {
namespace {

template <class Platform>
Error CastTransposeAmax(Exec<Platform> exec, int64_t batch, std::string_view element, AnyBuffer x,
                        AnyBuffer scale, Result<AnyBuffer> data, Result<AnyBuffer> data_t,
                        Result<AnyBuffer> amax) {
  constexpr char kOp[] = "cast_transpose_amax";
  const Dims dims = x.dimensions();
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "scale", scale, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "amax", *amax, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "data", *data, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckTranspose(kOp, "data_t", *data_t, "x", x, batch));
  float *s = nullptr, *a = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", scale, &s));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", *amax, &a));
  const int64_t scale_length = Runs(scale.dimensions(), dims).length;
  const Runs amaxes(amax->dimensions(), dims);
  const Matrices m(dims, batch);
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t *out = nullptr, *out_t = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", *data, &out));
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data_t", *data_t, &out_t));
    return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError(kOp, kernels::CastTransposeAmax<In, Code>(exec, Data<In>(x), s, scale_length,
                                                               m.batch, m.rows, m.cols, amaxes.runs,
                                                               amaxes.length, out, out_t, a));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_transpose_amax, CastTransposeAmax,
                 .Attr<int64_t>("batch")
                     .Attr<std::string_view>("element")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* scale */
                     .Ret<AnyBuffer>() /* data */
                     .Ret<AnyBuffer>() /* data_t */
                     .Ret<AnyBuffer>() /* amax */)

}  // namespace qshard
