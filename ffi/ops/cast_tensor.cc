// cast_tensor: data = encode(x * scale). `scale` has the first axes of x: none for a per-tensor
// scale.
#include "core/op.h"
#include "kernels/cast.h"

namespace qshard {
namespace {

template <class Platform>
Error CastTensor(Exec<Platform> exec, std::string_view element, AnyBuffer x, AnyBuffer scale,
                 Result<AnyBuffer> data) {
  QSHARD_REQUIRE(IsPrefix(scale.dimensions(), x.dimensions()), "cast_tensor: scale ", Shape(scale),
                 " is not the first axes of x ", Shape(x),
                 "; give it one element for each run of x");
  QSHARD_REQUIRE(SameShape(data->dimensions(), x.dimensions()), "cast_tensor: data ", Shape(*data),
                 " does not have the shape of x ", Shape(x));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf("cast_tensor", "scale", scale, &s));
  const Runs r(scale.dimensions(), x.dimensions());
  return DispatchElement<E4M3, E5M2>("cast_tensor", element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t* out = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>("cast_tensor", "data", *data, &out));
    return DispatchFloat("cast_tensor", "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError("cast_tensor",
                     kernels::Cast<In, Code>(exec, Data<In>(x), s, r.runs, r.length, out));
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
