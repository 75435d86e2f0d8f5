// dequantize: x = decode(data) * scale_inv, rounded once to the dtype of x. `scale_inv` has the
// first axes of data.
#include "core/op.h"
#include "kernels/cast.h"

namespace qshard {
namespace {

template <class Platform>
Error Dequantize(Exec<Platform> exec, std::string_view element, AnyBuffer data, AnyBuffer scale_inv,
                 Result<AnyBuffer> x) {
  constexpr char kOp[] = "dequantize";
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "scale_inv", scale_inv, "data", data));
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "x", *x, "data", data));
  float* s = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "scale_inv", scale_inv, &s));
  const Runs r(scale_inv.dimensions(), data.dimensions());
  return DispatchElement<E4M3, E5M2>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    uint8_t* in = nullptr;
    QSHARD_RETURN_IF_ERROR(CodesOf<Code>(kOp, "data", data, &in));
    return DispatchFloat(kOp, "x", x->element_type(), [&](auto out) {
      using Out = typename decltype(out)::type;
      return ToError(kOp,
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
