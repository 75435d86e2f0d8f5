// Ops on tensors with one scale, or with one scale per contiguous run.
#include "kernels/cast.h"

#include "schema/handler.h"

namespace qshard {

// amax[lead] = max |x[lead, run]|, in fp32. It is an exact maximum over the bit patterns of |x|: a
// run may be split in any way, and an integer max-reduce of the parts gives the same bits. NaN
// propagates. An empty run gives 0.
QSHARD_DEFINE_OP(amax_tensor) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    return call(kernels::Amax(call.exec, Data<decltype(in)>(call.arg(0)), call.binding.Length(0),
                              call.binding.Length(1), Mutable<float>(call.ret(0))));
  });
}

namespace {

// Returns x and its scales. For delayed scaling, `amax` is the result that records the amax, and
// the next result the inverse scale; 0 for other casts.
template <class Code, class In, class Platform>
kernels::Scaled<In> ScaledOf(const Call<Platform>& call, int amax) {
  kernels::Scaled<In> x{Data<In>(call.arg(0)), Data<float>(call.arg(1)), 0, call.nonfinite()};
  if (amax == 0) {
    x.length = call.ArgRun(1);
    return x;
  }
  x.runs = Elements(call.ret(amax));
  x.length = x.runs > 0 ? Elements(call.arg(0)) / x.runs : 0;
  x.target = DelayedTarget<Code>(call.integer("margin"));
  x.amax = Mutable<float>(call.ret(amax));
  x.scale_inv = Mutable<float>(call.ret(amax + 1));
  return x;
}

template <class Platform>
Error Cast(const Call<Platform>& call, int amax = 0) {
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    using Code = decltype(code);
    return call(
        kernels::Cast<decltype(in), Code>(call.exec, ScaledOf<Code, decltype(in)>(call, amax),
                                          Elements(call.arg(0)), Mutable<uint8_t>(call.ret(0))));
  });
}

template <class Platform>
Error CastTranspose(const Call<Platform>& call, int amax = 0) {
  const Matrices m(call.binding);
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    using Code = decltype(code);
    return call(kernels::CastTranspose<decltype(in), Code>(
        call.exec, ScaledOf<Code, decltype(in)>(call, amax), m.batch, m.rows, m.cols,
        Mutable<uint8_t>(call.ret(0)), Mutable<uint8_t>(call.ret(1))));
  });
}

}  // namespace

// data = encode(x * scale). cast_transpose also gives the transpose, in the same read of x.
QSHARD_DEFINE_OP(cast_tensor) { return Cast(call); }
QSHARD_DEFINE_OP(cast_transpose) { return CastTranspose(call); }

// Casts of delayed scaling, with one scale per leading index. The same read of x also gives its
// amax, for the next scale, and the inverse scale. A tensor without history has scale 0. Its first
// scale comes from its own amax, which takes one more read.
QSHARD_DEFINE_OP(cast_delayed) { return Cast(call, 1); }
QSHARD_DEFINE_OP(cast_transpose_delayed) { return CastTranspose(call, 2); }

// x = decode(data) * scale_inv, rounded once to the dtype of x.
QSHARD_DEFINE_OP(dequantize) {
  const int64_t length = call.ArgRun(1), runs = length > 0 ? Elements(call.arg(0)) / length : 0;
  return DispatchFp8(call, call.ret(0), [&](auto code, auto out) {
    return call(kernels::Dequantize<decltype(code), decltype(out)>(
        call.exec, Data<uint8_t>(call.arg(0)), Data<float>(call.arg(1)), runs, length,
        Mutable<decltype(out)>(call.ret(0))));
  });
}

// codes[i] = encode(x[i]), one code a byte (E8M0 rounds up). No scale and no packing: for
// inspecting a format, and for testing the conversions of all kernels.
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
