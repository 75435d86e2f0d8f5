// amax_tensor: amax[lead] = max |x[lead, run]|, fp32.
//
// A maximum over bit patterns of |x|: exact, so any split of a run followed by an integer
// max-reduce of the parts gives the same bits; NaN propagates; an empty run gives 0.
#include "core/op.h"
#include "kernels/amax.h"

namespace qshard {
namespace {

template <class Platform>
Error AmaxTensor(Exec<Platform> exec, AnyBuffer x, Result<AnyBuffer> amax) {
  constexpr char kOp[] = "amax_tensor";
  QSHARD_RETURN_IF_ERROR(CheckPrefix(kOp, "amax", *amax, "x", x));
  float* out = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "amax", *amax, &out));
  const Runs r(amax->dimensions(), x.dimensions());
  return DispatchFloat(kOp, "x", x.element_type(), [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError(kOp, kernels::Amax(exec, Data<In>(x), r.runs, r.length, out));
  });
}

}  // namespace

QSHARD_DEFINE_OP(amax_tensor, AmaxTensor, .Arg<AnyBuffer>() /* x */.Ret<AnyBuffer>() /* amax */)

}  // namespace qshard
