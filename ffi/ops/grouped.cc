// Amax and casts of the rows of all experts in one call, with one scale for each expert.
//
// `rows` has for each padded row the row of x that it holds, and `stops` the end of each expert's
// padded rows. Numbers outside x are padding, which counts as zeros. Both operands are data and are
// read as int32.
#include "kernels/grouped.h"

#include "ops/row_map.h"
#include "schema/handler.h"

namespace qshard {
namespace {

template <class Platform>
Error CastGrouped(const Call<Platform>& call, bool transposed) {
  return DispatchFp8(call, call.arg(0), [&](auto code, auto in) {
    using In = decltype(in);
    const kernels::ExpertScales scales{Data<float>(call.arg(3)), StopsOf(call), call.nonfinite()};
    return call(kernels::CastGrouped<In, decltype(code)>(
        call.exec, Data<In>(call.arg(0)), call.binding.Length(1), RowMapOf(call), scales,
        Mutable<uint8_t>(call.ret(0)), transposed ? Mutable<uint8_t>(call.ret(1)) : nullptr));
  });
}

}  // namespace

// amax[e] = max |x| over the rows of expert e, in fp32: amax_tensor of the gathered rows of each
// expert. Padding is not read. Expert e has the padded rows from the stop of expert e - 1, or 0, to
// its own stop. A row belongs to the first expert that stops after it, and to none after all
// stops. An expert without rows gives 0.
QSHARD_DEFINE_OP(amax_grouped) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    using In = decltype(in);
    return call(kernels::AmaxGrouped(call.exec, Data<In>(call.arg(0)), call.binding.Length(1),
                                     RowMapOf(call), StopsOf(call), Mutable<float>(call.ret(0))));
  });
}

// amax_grouped, and in amax_t the amax of the Hadamard transform of each 16 padded rows of a
// column.
QSHARD_DEFINE_OP(amax_hadamard_grouped) {
  return DispatchFloat(call.arg(0), [&](auto in) {
    using In = decltype(in);
    return call(kernels::AmaxHadamardGrouped(
        call.exec, Data<In>(call.arg(0)), call.binding.Length(1), RowMapOf(call), StopsOf(call),
        Mutable<float>(call.ret(0)), Mutable<float>(call.ret(1))));
  });
}

// data[p] = encode(x[rows[p]] * scale of the expert of p): cast_tensor, or cast_transpose, of the
// gathered rows of each expert. Rows of no expert have code 0.
QSHARD_DEFINE_OP(cast_grouped) { return CastGrouped(call, false); }
QSHARD_DEFINE_OP(cast_transpose_grouped) { return CastGrouped(call, true); }

}  // namespace qshard
