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
  QSHARD_REQUIRE(IsPrefix(amax->dimensions(), x.dimensions()), "amax_tensor: amax ", Shape(*amax),
                 " is not the first axes of x ", Shape(x),
                 "; give it one element for each run of x");
  float* out = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf("amax_tensor", "amax", *amax, &out));
  const Runs r(amax->dimensions(), x.dimensions());
  return DispatchFloat("amax_tensor", "x", x.element_type(), [&](auto in) {
    using In = typename decltype(in)::type;
    return ToError("amax_tensor", kernels::Amax(exec, Data<In>(x), r.runs, r.length, out));
  });
}

}  // namespace

QSHARD_DEFINE_OP(amax_tensor, AmaxTensor, .Arg<AnyBuffer>() /* x */.Ret<AnyBuffer>() /* amax */)

}  // namespace qshard
