// cast_amax: data = encode(x * scale), and the amax of x, from one read of x: delayed scaling casts
// with the scale of earlier steps and records this step's amax for later ones.
//
// scale and amax have the first axes of x, each its own number of them.
#include "core/op.h"
#include "kernels/delayed.h"

namespace qshard {
namespace {

template <class Platform>
Error CastAmax(Exec<Platform> exec, std::string_view element, AnyBuffer x, AnyBuffer scale,
               Result<AnyBuffer> data, Result<AnyBuffer> amax) {
  constexpr char kOp[] = "cast_amax";
  const Dims dims = x.dimensions();
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "scale", scale, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "amax", *amax, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "data", *data, "x", x));
  float *s = nullptr, *a = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", scale, &s));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", *amax, &a));
  const int64_t scale_length = Runs(scale.dimensions(), dims).length;
  const Runs amaxes(amax->dimensions(), dims);
  const int64_t n = static_cast<int64_t>(x.element_count());
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t* out = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", *data, &out));
    return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError(kOp, kernels::CastAmax<In, Code>(exec, Data<In>(x), s, scale_length, n,
                                                      amaxes.runs, amaxes.length, out, a));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_amax, CastAmax,
                 .Attr<std::string_view>("element")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* scale */
                     .Ret<AnyBuffer>() /* data */.Ret<AnyBuffer>() /* amax */)

}  // namespace qshard
