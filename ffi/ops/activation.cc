// Activations and norms between matrix products.
#include "kernels/activation.h"

#include "schema/handler.h"

namespace qshard {

// h = silu(gate) * up, rounded once, and amax[lead] = max |h[lead, run]| of the rounded h.
QSHARD_DEFINE_OP(swiglu) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    using In = decltype(in);
    return call(kernels::SwiGluForward<In>(call.exec, Data<In>(call.arg(0)), Data<In>(call.arg(1)),
                                           call.binding.Length(0), call.binding.Length(1),
                                           Mutable<In>(call.ret(0)), Mutable<float>(call.ret(1))));
  });
}

// Gradients of gate and up for the gradient of h, and the amax of each.
QSHARD_DEFINE_OP(swiglu_grad) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    using In = decltype(in);
    return call(kernels::SwiGluBackward<In>(
        call.exec, Data<In>(call.arg(0)), Data<In>(call.arg(1)), Data<In>(call.arg(2)),
        call.binding.Length(0), call.binding.Length(1), Mutable<In>(call.ret(0)),
        Mutable<In>(call.ret(1)), Mutable<float>(call.ret(2)), Mutable<float>(call.ret(3))));
  });
}

// h = silu(gate) * up for rows that have gate, then up: the result of one product. With the amax of
// each row of h.
QSHARD_DEFINE_OP(swiglu_gate_up) {
  const Buffer& gate_up = call.arg(0);
  return DispatchFloat(gate_up, [&](auto in) {
    using In = decltype(in);
    return call(kernels::SwiGluGateUp<In>(call.exec, Data<In>(gate_up), call.binding.Length(0),
                                          gate_up.dims[gate_up.rank - 1], Mutable<In>(call.ret(0)),
                                          Mutable<float>(call.ret(1))));
  });
}

// The gradient of gate_up for the gradient of h, and the amax of each of its rows.
QSHARD_DEFINE_OP(swiglu_gate_up_grad) {
  const Buffer& gate_up = call.arg(0);
  return DispatchFloat(gate_up, [&](auto in) {
    using In = decltype(in);
    return call(kernels::SwiGluGateUpGrad<In>(
        call.exec, Data<In>(gate_up), Data<In>(call.arg(1)), call.binding.Length(0),
        gate_up.dims[gate_up.rank - 1], Mutable<In>(call.ret(0)), Mutable<float>(call.ret(1))));
  });
}

// data_t = encode(h * scale), transposed. Recomputes h, so h needs no memory.
QSHARD_DEFINE_OP(swiglu_cast_t) {
  const Buffer& gate = call.arg(0);
  return DispatchFp8(call, gate, [&](auto code, auto in) {
    using In = decltype(in);
    return call(kernels::SwiGluCastTransposed<In, decltype(code)>(
        call.exec, Data<In>(gate), Data<In>(call.arg(1)), Data<float>(call.arg(2)), gate.dims[0],
        gate.dims[1], Mutable<uint8_t>(call.ret(0))));
  });
}

// y = x / sqrt(mean(x^2) + eps) * weight over the last axis, rounded once; rstd = 1 /
// sqrt(mean(x^2) + eps); and the amax of y.
QSHARD_DEFINE_OP(rms_norm) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    return DispatchFloat(call.arg(1), [&](auto weight) {
      using In = decltype(in);
      using Weight = decltype(weight);
      return call(kernels::RmsNormForward<In, Weight>(
          call.exec, Data<In>(call.arg(0)), Data<Weight>(call.arg(1)), call.binding.Length(0),
          call.binding.Length(1), call.binding.Length(2), call.number("eps"),
          Mutable<In>(call.ret(0)), Mutable<float>(call.ret(1)), Mutable<float>(call.ret(2))));
    });
  });
}

// Gradients of x and weight for the gradient of y. `rows` is kSumRows.
QSHARD_DEFINE_OP(rms_norm_grad) {
  const Buffer& x = call.arg(0);
  const int64_t rows = x.dims[x.rank - 2], cols = x.dims[x.rank - 1];
  return DispatchFloat(x, [&](auto in) {
    return DispatchFloat(call.arg(1), [&](auto weight) {
      using In = decltype(in);
      using Weight = decltype(weight);
      return call(kernels::RmsNormBackward<In, Weight>(
          call.exec, Data<In>(x), Data<Weight>(call.arg(1)), Data<float>(call.arg(2)),
          Data<In>(call.arg(3)), call.binding.Length(0), rows, cols, Mutable<In>(call.ret(0)),
          Mutable<float>(call.ret(2)), Mutable<float>(call.ret(1))));
    });
  });
}

}  // namespace qshard
