// dequantize: x = decode(data) * scale_inv, rounded once to the dtype of x. `scale_inv` has the
// first axes of data.
#include "core/op.h"
#include "kernels/cast.h"

namespace qshard {
namespace {

template <class Platform>
Error Dequantize(Exec<Platform> exec, std::string_view element, AnyBuffer data, AnyBuffer scale_inv,
                 Result<AnyBuffer> x) {
  QSHARD_REQUIRE(IsPrefix(scale_inv.dimensions(), data.dimensions()), "dequantize: scale_inv ",
                 Shape(scale_inv), " is not the first axes of data ", Shape(data),
                 "; give it one element for each run of data");
  QSHARD_REQUIRE(SameShape(x->dimensions(), data.dimensions()), "dequantize: x ", Shape(*x),
                 " does not have the shape of data ", Shape(data));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf("dequantize", "scale_inv", scale_inv, &s));
  const Runs r(scale_inv.dimensions(), data.dimensions());
  return DispatchElement<E4M3, E5M2>("dequantize", element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t* in = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>("dequantize", "data", data, &in));
    return DispatchFloat("dequantize", "x", x->element_type(), [&](auto out) {
      using Out = typename decltype(out)::type;
      return ToError("dequantize",
                     kernels::Dequantize<Code, Out>(exec, in, s, r.runs, r.length, Data<Out>(x)));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(dequantize, Dequantize,
                 .Attr<std::string_view>("element")
                     .Arg<AnyBuffer>() /* data */
                     .Arg<AnyBuffer>() /* scale_inv */
                     .Ret<AnyBuffer>() /* x */)

}  // namespace qshard
