// Adam and AdamW. The lists of op adam:
//   grad                      float32, bfloat16 or float16
//   param                     absent if neither `decay`, `low` nor the result needs it
//   low                       for keeps="remainder": int16, the lower halves of the fp32 parameters
//                             (bfloat16 params are the upper halves); for keeps="master": float32,
//                             the fp32 parameters
//   exp_avg, its scale_inv    scales only for float16 and FP8: [*lead, blocks] for a parameter
//                             [*lead, *run], one for each kAdamBlock elements of a run
//   exp_avg_sq, its scale_inv likewise
#include "kernels/adam.h"

#include "core/ceil_div.h"
#include "schema/handler.h"

namespace qshard {
namespace {

using kernels::AdamKinds;
using kernels::AdamLow;
using kernels::AdamTensor;
using kernels::AdamType;

enum Argument { kConstants, kGrad, kParam, kLow, kExpAvg, kExpAvgScale, kExpAvgSq, kExpAvgSqScale };
enum Output { kNewParam, kNewLow, kNewExpAvg, kNewExpAvgScale, kNewExpAvgSq, kNewExpAvgSqScale };

template <class Kind>
struct Named {
  std::string_view name;
  Kind kind;
};
constexpr Named<AdamType> kTypes[] = {{"float32", kernels::kAdamFloat32},
                                      {"bfloat16", kernels::kAdamBFloat16},
                                      {"float16", kernels::kAdamFloat16},
                                      {E4M3::kName, kernels::kAdamE4M3},
                                      {E5M2::kName, kernels::kAdamE5M2}};
constexpr Named<AdamLow> kLows[] = {
    {"none", AdamLow::kNone}, {"remainder", AdamLow::kRemainder}, {"master", AdamLow::kMaster}};
constexpr Named<Decay> kDecays[] = {
    {"none", Decay::kNone}, {"coupled", Decay::kCoupled}, {"decoupled", Decay::kDecoupled}};

// Looks up a name that the binder has already checked.
template <class Kind, size_t kCount>
Kind KindOf(std::string_view name, const Named<Kind> (&names)[kCount]) {
  for (const auto& n : names)
    if (n.name == name) return n.kind;
  return names[0].kind;
}

template <class Platform>
Error KindsOf(const Call<Platform>& call, AdamKinds* kinds) {
  kinds->update = call.flag("update");
  kinds->decay = KindOf(call.text("decay"), kDecays);
  kinds->low = KindOf(call.text("keeps"), kLows);
  kinds->exp_avg = KindOf(call.text("exp_avg_dtype"), kTypes);
  kinds->exp_avg_sq = KindOf(call.text("exp_avg_sq_dtype"), kTypes);
  kinds->grad = KindOf(NameOf(call.arg(kGrad).dtype), kTypes);
  kinds->param = kernels::kAdamFloat32;
  if (call.has_arg(kParam)) kinds->param = KindOf(NameOf(call.arg(kParam).dtype), kTypes);
  QSHARD_REQUIRE(
      !kinds->update || kinds->low != AdamLow::kRemainder, call.op(),
      ": update does not support parameters with a remainder, which must change together");
  QSHARD_REQUIRE(kinds->low != AdamLow::kRemainder || kinds->param == kernels::kAdamBFloat16,
                 call.op(), ": param (", NameOf(call.arg(kParam).dtype),
                 ") is not bfloat16, the only dtype with a remainder");
  const AdamType result = kinds->update ? kernels::kAdamFloat32 : kinds->param;
  QSHARD_REQUIRE(NameOf(call.ret(kNewParam).dtype) == kTypes[result].name, call.op(),
                 ": new param (", NameOf(call.ret(kNewParam).dtype), ") is not ",
                 kTypes[result].name);
  return {};
}

Error CheckLow(const char* op, AdamLow kind, const Buffer& low) {
  const bool fits = kind == AdamLow::kMaster
                        ? low.dtype == XLA_FFI_DataType_F32
                        : low.dtype == XLA_FFI_DataType_S16 || low.dtype == XLA_FFI_DataType_U16;
  QSHARD_REQUIRE(
      fits, op, ": low (", NameOf(low.dtype), ") is not ",
      kind == AdamLow::kMaster ? "float32, which a master is" : "int16, which a remainder is");
  return {};
}

// Sets the rows and columns that the kernel sees: `scale` has one number for each kAdamBlock
// elements of a row. If rows are whole blocks, the whole tensor is one row.
Error SetShape(const char* op, const char* name, const Buffer& grad, const Buffer& scale,
               AdamTensor* t) {
  const int64_t lead = scale.rank - 1;
  bool fits =
      scale.rank > 0 && lead < grad.rank && std::equal(scale.dims, scale.dims + lead, grad.dims);
  int64_t rows = 1, cols = 1;
  for (int64_t i = 0; fits && i < grad.rank; ++i) (i < lead ? rows : cols) *= grad.dims[i];
  fits = fits && scale.dims[lead] == CeilDiv(cols, kAdamBlock);
  QSHARD_REQUIRE(fits, op, ": ", name, " ", Shape(scale), " is not one for every ", kAdamBlock,
                 " elements of runs of ", Shape(grad));
  t->rows = cols % kAdamBlock == 0 ? 1 : rows;
  t->cols = cols % kAdamBlock == 0 ? rows * cols : cols;
  return {};
}

template <class Platform>
Error SetTensor(const Call<Platform>& call, const AdamKinds& kinds, int64_t i, AdamTensor* t) {
  const Buffer& grad = call.arg(kGrad, i);
  *t = {};
  t->rows = 1;
  t->cols = Elements(grad);
  t->grad = grad.data;
  t->new_param = call.ret(kNewParam, i).data;
  if (call.has_arg(kParam)) t->param = call.arg(kParam, i).data;
  if (call.has_arg(kLow)) {
    QSHARD_RETURN_IF_ERROR(CheckLow(call.op(), kinds.low, call.arg(kLow, i)));
    QSHARD_RETURN_IF_ERROR(CheckLow(call.op(), kinds.low, call.ret(kNewLow, i)));
    t->low = call.arg(kLow, i).data;
    t->new_low = call.ret(kNewLow, i).data;
  }
  const auto state = [&](Argument data, Argument scale, Output new_data, Output new_scale,
                         AdamTensor::State* from, AdamTensor::NewState* to) -> Error {
    from->data = call.arg(data, i).data;
    to->data = call.ret(new_data, i).data;
    if (!call.has_arg(scale)) return {};
    from->scale_inv = Data<float>(call.arg(scale, i));
    to->scale_inv = Mutable<float>(call.ret(new_scale, i));
    const char* name = call.binding.row().inputs[scale].name.c_str();
    return SetShape(call.op(), name, grad, call.arg(scale, i), t);
  };
  QSHARD_RETURN_IF_ERROR(
      state(kExpAvg, kExpAvgScale, kNewExpAvg, kNewExpAvgScale, &t->exp_avg, &t->new_exp_avg));
  return state(kExpAvgSq, kExpAvgSqScale, kNewExpAvgSq, kNewExpAvgSqScale, &t->exp_avg_sq,
               &t->new_exp_avg_sq);
}

}  // namespace

// Constants of a step for each tensor, from the shared settings `hyper` and each tensor's step
// number, which counts this step. core/adam.h names the elements of both.
QSHARD_DEFINE_OP(adam_constants) {
  return call(kernels::AdamConstantsOf(call.exec, Data<float>(call.arg(0)), Elements(call.arg(0)),
                                       Data<float>(call.arg(1)), call.ArgRun(1),
                                       Mutable<float>(call.ret(0))));
}

// One step of Adam or AdamW for any number of tensors. Row i of `constants`, from adam_constants,
// belongs to tensor i. With `update` the first result is the float32 change to add to the
// parameter, instead of the new parameter.
QSHARD_DEFINE_OP(adam) {
  const int64_t count = call.binding.list_length();
  AdamKinds kinds{};
  QSHARD_RETURN_IF_ERROR(KindsOf(call, &kinds));
  QSHARD_REQUIRE(Elements(call.arg(kConstants)) >= count * kAdamConstants, call.op(),
                 ": constants ", Shape(call.arg(kConstants)), " is not ", kAdamConstants,
                 " numbers for each of ", count, " tensors");
  std::vector<AdamTensor> tensors(count);
  for (int64_t i = 0; i < count; ++i)
    QSHARD_RETURN_IF_ERROR(SetTensor(call, kinds, i, &tensors[i]));
  return call(
      kernels::Adam(call.exec, tensors.data(), count, kinds, Data<float>(call.arg(kConstants))));
}

}  // namespace qshard
