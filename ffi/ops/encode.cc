// encode: codes[i] = encode(x[i]), one code a byte, for any of the four element formats (E8M0
// rounds up). No scale, no packing: for looking at a format, and for holding the conversions that
// every kernel uses against their definition.
#include "core/op.h"
#include "kernels/element.h"

namespace qshard {
namespace {

template <class Platform>
Error EncodeOp(Exec<Platform> exec, std::string_view element, AnyBuffer x,
               Result<AnyBuffer> codes) {
  constexpr char kOp[] = "encode";
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "codes", *codes, "x", x));
  QSHARD_REQUIRE(codes->element_type() == DataType::U8, kOp, ": codes (", codes->element_type(),
                 ") is not uint8");
  const int64_t n = static_cast<int64_t>(x.element_count());
  return DispatchElement<E4M3, E5M2, E2M1, E8M0>(kOp, element, [&](auto code) -> Error {
    using Code = typename decltype(code)::type;
    return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
      using In = typename decltype(in)::type;
      return ToError(kOp,
                     kernels::EncodeElements<In, Code>(exec, Data<In>(x), n, Data<uint8_t>(codes)));
    });
  });
}

}  // namespace

QSHARD_DEFINE_OP(
    encode, EncodeOp,
    .Attr<std::string_view>("element").Arg<AnyBuffer>() /* x */.Ret<AnyBuffer>() /* codes */)

}  // namespace qshard
