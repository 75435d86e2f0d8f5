// adam_constants: what a step of Adam needs to know of each tensor, from the settings that all
// share and the number of steps that each has had, this one included. constants [*n, 10] is what
// `adam` takes; core/adam.h names the elements of both.
#include "core/op.h"
#include "kernels/adam.h"

namespace qshard {
namespace {

template <class Platform>
Error MakeConstants(Exec<Platform> exec, AnyBuffer step, AnyBuffer hyper,
                    Result<AnyBuffer> constants) {
  constexpr char kOp[] = "adam_constants";
  const Dims n = step.dimensions(), out = constants->dimensions();
  const Dims settings_dims = hyper.dimensions();
  const size_t last = settings_dims.size() - 1;
  QSHARD_REQUIRE(settings_dims.size() > 0 && settings_dims[last] == kHyperSize &&
                     IsPrefix(Dims(settings_dims.begin(), last), n),
                 kOp, ": hyper ", Shape(hyper), " is not ", int{kHyperSize},
                 " settings for the first axes of step ", Shape(step));
  QSHARD_REQUIRE(out.size() == n.size() + 1 && IsPrefix(n, out) && out[n.size()] == kAdamConstants,
                 kOp, ": constants ", Shape(*constants), " is not ", kAdamConstants,
                 " numbers for each step ", Shape(step));
  float *steps = nullptr, *settings = nullptr, *result = nullptr;
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "step", step, &steps));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "hyper", hyper, &settings));
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "constants", *constants, &result));
  const Runs runs(Dims(settings_dims.begin(), last), n);
  return ToError(kOp, kernels::AdamConstantsOf(exec, steps, runs.runs * runs.length, settings,
                                               runs.length, result));
}

}  // namespace

QSHARD_DEFINE_OP(adam_constants, MakeConstants,
                 .Arg<AnyBuffer>()     /* step */
                     .Arg<AnyBuffer>() /* hyper */
                     .Ret<AnyBuffer>() /* constants */)

}  // namespace qshard
