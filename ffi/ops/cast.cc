// Ops on tensors that have one scale, or one for each contiguous run.
#include "kernels/cast.h"

#include "core/handler.h"
#include "kernels/amax.h"
#include "kernels/element.h"

namespace qshard {

// amax[lead] = max |x[lead, run]|, fp32. A maximum over bit patterns of |x|: exact, so any split of
// a run followed by an integer max-reduce of the parts gives the same bits; NaN propagates; an
// empty run gives 0.
QSHARD_DEFINE_OP(amax_tensor) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    using In = typename decltype(in)::type;
    return call(kernels::Amax(call.exec, Data<In>(call.arg(0)), call.binding.Length(0),
                              call.binding.Length(1), Mutable<float>(call.ret(0))));
  });
}

// data = encode(x * scale).
QSHARD_DEFINE_OP(cast_tensor) {
  const int64_t length = call.ArgRun(1), runs = Elements(call.arg(1));
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    using Code = typename decltype(code)::type;
    using In = typename decltype(in)::type;
    return call(kernels::Cast<In, Code>(call.exec, Data<In>(call.arg(0)), Data<float>(call.arg(1)),
                                        runs, length, Mutable<uint8_t>(call.ret(0))));
  });
}

// data = encode(x * scale) and its transpose, from one read of x.
QSHARD_DEFINE_OP(cast_transpose) {
  const Matrices m(call.binding);
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    using Code = typename decltype(code)::type;
    using In = typename decltype(in)::type;
    return call(kernels::CastTranspose<In, Code>(
        call.exec, Data<In>(call.arg(0)), Data<float>(call.arg(1)), call.ArgRun(1), m.batch, m.rows,
        m.cols, Mutable<uint8_t>(call.ret(0)), Mutable<uint8_t>(call.ret(1))));
  });
}

// x = decode(data) * scale_inv, rounded once to the dtype of x.
QSHARD_DEFINE_OP(dequantize) {
  const int64_t length = call.ArgRun(1), runs = Elements(call.arg(1));
  return DispatchFp8(call, call.ret(0), [&](auto code, auto out) {
    using Code = typename decltype(code)::type;
    using Out = typename decltype(out)::type;
    return call(kernels::Dequantize<Code, Out>(call.exec, Data<uint8_t>(call.arg(0)),
                                               Data<float>(call.arg(1)), runs, length,
                                               Mutable<Out>(call.ret(0))));
  });
}

// codes[i] = encode(x[i]), one code a byte (E8M0 rounds up). No scale, no packing: for looking at a
// format, and for holding the conversions that every kernel uses against their definition.
QSHARD_DEFINE_OP(encode) {
  return DispatchCode(call, call.arg(0), [&](auto code, auto in) {
    using Code = typename decltype(code)::type;
    using In = typename decltype(in)::type;
    return call(kernels::EncodeElements<In, Code>(
        call.exec, Data<In>(call.arg(0)), Elements(call.arg(0)), Mutable<uint8_t>(call.ret(0))));
  });
}

// x[i] = decode(codes[i]), exact: the inverse of encode.
QSHARD_DEFINE_OP(decode) {
  return DispatchCode(call, [&](auto code) {
    using Code = typename decltype(code)::type;
    return call(kernels::DecodeElements<Code>(call.exec, Data<uint8_t>(call.arg(0)),
                                              Elements(call.arg(0)), Mutable<float>(call.ret(0))));
  });
}

}  // namespace qshard
