// cast_tensor: data = encode(x * scale). `scale` has the first axes of x: none for a per-tensor
// scale.
#include "core/op.h"
#include "kernels/cast.h"

namespace qshard {
namespace {

template <class Platform>
Error CastTensor(Exec<Platform> exec, std::string_view element, AnyBuffer x, AnyBuffer scale,
                 Result<AnyBuffer> data) {
  constexpr char kOp[] = "cast_tensor";
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "scale", scale, "x", x));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "data", *data, "x", x));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale", scale, &s));
  const Runs r(scale.dimensions(), x.dimensions());
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t* out = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", *data, &out));
    return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError(kOp, kernels::Cast<In, Code>(exec, Data<In>(x), s, r.runs, r.length, out));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(cast_tensor, CastTensor,
                 .Attr<std::string_view>("element")
                     .Arg<AnyBuffer>() /* x */
                     .Arg<AnyBuffer>() /* scale */
                     .Ret<AnyBuffer>() /* data */)

}  // namespace qshard
