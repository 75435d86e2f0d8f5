// decode: x[i] = decode(codes[i]), exact, one code a byte, for any of the four element formats. The
// inverse of encode.
#include "core/op.h"
#include "kernels/element.h"

namespace qshard {
namespace {

template <class Platform>
Error DecodeOp(Exec<Platform> exec, std::string_view element, AnyBuffer codes,
               Result<AnyBuffer> x) {
  constexpr char kOp[] = "decode";
  QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "x", *x, "codes", codes));
  QSHARD_REQUIRE(IsByte(codes.element_type()), kOp, ": codes (", codes.element_type(),
                 ") is not of a one-byte dtype; view it as uint8");
  float* out = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "x", *x, &out));
  const int64_t n = static_cast<int64_t>(codes.element_count());
  return DispatchElement<E4M3, E5M2, E2M1, E8M0>(kOp, element, [&](auto code) {
    using Code = typename decltype(code)::type;
    return ToError(kOp, kernels::DecodeElements<Code>(exec, Data<uint8_t>(codes), n, out));
  });
}

}  // namespace

QSHARD_DEFINE_OP(
    decode, DecodeOp,
    .Attr<std::string_view>("element").Arg<AnyBuffer>() /* codes */.Ret<AnyBuffer>() /* x */)

}  // namespace qshard
