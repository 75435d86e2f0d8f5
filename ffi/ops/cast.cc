// Ops on tensors that have one scale, or one for each contiguous run.
#include "kernels/cast.h"

#include "core/handler.h"

namespace qshard {

// amax[lead] = max |x[lead, run]|, fp32. A maximum over bit patterns of |x|: exact, so any split of
// a run followed by an integer max-reduce of the parts gives the same bits; NaN propagates; an
// empty run gives 0.
QSHARD_DEFINE_OP(amax_tensor) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::Amax(call.exec, Data<decltype(in)>(call.arg(0)), call.binding.Length(0),
                              call.binding.Length(1), Mutable<float>(call.ret(0))));
  });
}

namespace {

// x, its scales and, of an op that records amaxes, result `amax` for them.
template <class In, class Platform>
kernels::Scaled<In> ScaledOf(const Call<Platform>& call, In, int amax) {
  kernels::Scaled<In> x{Data<In>(call.arg(0)), Data<float>(call.arg(1)), call.ArgRun(1)};
  if (amax > 0) {
    x.amax = Mutable<float>(call.ret(amax));
    x.runs = Elements(call.ret(amax));
    x.amax_length = call.RetRun(amax);
    x.nonfinite = call.nonfinite();
  }
  return x;
}

template <class Platform>
Error Cast(const Call<Platform>& call, int amax = 0) {
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    return call(kernels::Cast<decltype(in), decltype(code)>(
        call.exec, ScaledOf(call, in, amax), Elements(call.arg(0)), Mutable<uint8_t>(call.ret(0))));
  });
}

template <class Platform>
Error CastTranspose(const Call<Platform>& call, int amax = 0) {
  const Matrices m(call.binding);
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    return call(kernels::CastTranspose<decltype(in), decltype(code)>(
        call.exec, ScaledOf(call, in, amax), m.batch, m.rows, m.cols, Mutable<uint8_t>(call.ret(0)),
        Mutable<uint8_t>(call.ret(1))));
  });
}

}  // namespace

// data = encode(x * scale); its transpose; and, for delayed scaling, the amax of x for the next
// scale: all from one read of x.
QSHARD_DEFINE_OP(cast_tensor) { return Cast(call); }
QSHARD_DEFINE_OP(cast_amax) { return Cast(call, 1); }
QSHARD_DEFINE_OP(cast_transpose) { return CastTranspose(call); }
QSHARD_DEFINE_OP(cast_transpose_amax) { return CastTranspose(call, 2); }

// x = decode(data) * scale_inv, rounded once to the dtype of x.
QSHARD_DEFINE_OP(dequantize) {
  const int64_t length = call.ArgRun(1), runs = Elements(call.arg(1));
  return DispatchFp8(call, call.ret(0), [&](auto code, auto out) {
    return call(kernels::Dequantize<decltype(code), decltype(out)>(
        call.exec, Data<uint8_t>(call.arg(0)), Data<float>(call.arg(1)), runs, length,
        Mutable<decltype(out)>(call.ret(0))));
  });
}

// codes[i] = encode(x[i]), one code a byte (E8M0 rounds up). No scale, no packing: for looking at a
// format, and for holding the conversions that every kernel uses against their definition.
QSHARD_DEFINE_OP(encode) {
  return DispatchCode(call, call.arg(0), [&](auto code, auto in) {
    return call(kernels::EncodeElements<decltype(in), decltype(code)>(
        call.exec, Data<decltype(in)>(call.arg(0)), Elements(call.arg(0)),
        Mutable<uint8_t>(call.ret(0))));
  });
}

// x[i] = decode(codes[i]), exact: the inverse of encode.
QSHARD_DEFINE_OP(decode) {
  return DispatchCode(call, [&](auto code) {
    return call(kernels::DecodeElements<decltype(code)>(
        call.exec, Data<uint8_t>(call.arg(0)), Elements(call.arg(0)), Mutable<float>(call.ret(0))));
  });
}

}  // namespace qshard
