// adam: a step of Adam or AdamW for any number of tensors, each by its row of `constants`, which
// adam_constants made.
//
// Attributes say what the lists are, and which there are. In order:
//   grad                      float32 or bfloat16
//   param                     left out if neither `decay` nor `low` nor the result needs it
//   low                       with `low` "remainder" int16, the lower halves of the fp32 parameters
//                             that bfloat16 params are the upper halves of; with "master" float32,
//                             the fp32 parameters themselves; left out with "none"
//   exp_avg, its scale_inv    of dtype `exp_avg_dtype`; scales of float16 and FP8 alone: float32
//                             [*lead, blocks] for a parameter [*lead, *run], one for every
//                             kAdamBlock elements of a run
//   exp_avg_sq, its scale_inv likewise
// Results are the same but for grad, and may be the operands. With `update` the first is, as
// float32, what is to be added to a parameter in place of the parameter.
#include "kernels/adam.h"

#include "core/multi_op.h"

namespace qshard {
namespace {

using kernels::AdamKinds;
using kernels::AdamLow;
using kernels::AdamTensor;
using kernels::AdamType;

constexpr char kOp[] = "adam";

// Reads a name that is one of several.
template <class Kind>
struct Named {
  const char* name;
  Kind kind;
};
template <class Kind, size_t kCount>
Error Find(const char* argument, std::string_view name, const Named<Kind> (&names)[kCount],
           Kind* kind) {
  for (const auto& n : names) {
    if (name == n.name) {
      *kind = n.kind;
      return Error::Success();
    }
  }
  std::string legal;
  for (const auto& n : names) legal += std::string(legal.empty() ? "" : ", ") + n.name;
  return InvalidArgument(kOp, ": ", argument, " (", name, ") is not one of ", legal);
}

constexpr Named<AdamType> kTypes[] = {{"float32", kernels::kAdamFloat32},
                                      {"bfloat16", kernels::kAdamBFloat16},
                                      {"float16", kernels::kAdamFloat16},
                                      {E4M3::kName, kernels::kAdamE4M3},
                                      {E5M2::kName, kernels::kAdamE5M2}};
constexpr Named<AdamLow> kLows[] = {
    {"none", AdamLow::kNone}, {"remainder", AdamLow::kRemainder}, {"master", AdamLow::kMaster}};
constexpr Named<Decay> kDecays[] = {
    {"none", Decay::kNone}, {"coupled", Decay::kCoupled}, {"decoupled", Decay::kDecoupled}};

Error FloatType(const char* argument, const AnyBuffer& buffer, AdamType* type) {
  return DispatchFloat(kOp, argument, buffer.element_type(), [&](auto t) {
    using T = typename decltype(t)::type;
    *type = std::is_same_v<T, float>      ? kernels::kAdamFloat32
            : std::is_same_v<T, bfloat16> ? kernels::kAdamBFloat16
                                          : kernels::kAdamFloat16;
    return Error::Success();
  });
}

bool Holds(DataType t, AdamType type) {
  switch (type) {
    case kernels::kAdamFloat32:
      return t == DataType::F32;
    case kernels::kAdamBFloat16:
      return t == DataType::BF16;
    case kernels::kAdamFloat16:
      return t == DataType::F16;
    case kernels::kAdamE4M3:
      return t == DataType::U8 || t == DataType::F8E4M3FN;
    default:
      return t == DataType::U8 || t == DataType::F8E5M2;
  }
}

// The lists of a call, operands and results alike, in their order.
class Lists {
 public:
  Lists(std::vector<BufferList> args, std::vector<BufferList> rets)
      : args_(std::move(args)), rets_(std::move(rets)) {}

  const BufferList& Operand() { return args_[arg_++]; }
  const BufferList& Result() { return rets_[ret_++]; }

 private:
  std::vector<BufferList> args_, rets_;
  size_t arg_ = 0, ret_ = 0;
};

// Checks the two forms of a state of tensor i, and gives the memory of its data and its scales.
struct StateLists {
  const char* name;
  const char* scale_name;
  AdamType type;
  const BufferList *data, *scale_inv;

  Error Get(size_t i, const AnyBuffer& grad, void** memory, float** scales, Dims* blocks) const {
    const AnyBuffer& x = (*data)[i];
    QSHARD_REQUIRE(Holds(x.element_type(), type), kOp, ": ", name, " (", x.element_type(),
                   ") is not ", kTypes[type].name, ", as attribute ", name, "_dtype says");
    QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, name, x, "grad", grad));
    *memory = x.untyped_data();
    if (scale_inv == nullptr) return Error::Success();
    const AnyBuffer& scale = (*scale_inv)[i];
    QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, scale_name, scale, scales));
    const Dims dims = grad.dimensions(), s = scale.dimensions();
    const size_t lead = s.size() - 1;
    const bool fits = s.size() > 0 && lead < dims.size() && IsPrefix(Dims(s.begin(), lead), dims) &&
                      s[lead] == (Product(dims, lead, dims.size()) + kAdamBlock - 1) / kAdamBlock;
    QSHARD_REQUIRE(fits, kOp, ": ", scale_name, " ", Shape(scale), " is not one for every ",
                   kAdamBlock, " elements of runs of ", Shape(grad));
    QSHARD_REQUIRE(blocks->size() == 0 || SameShape(*blocks, s), kOp, ": ", scale_name, " ",
                   Shape(scale), " is not in the blocks ", Shape(*blocks), " of the other state");
    *blocks = s;
    return Error::Success();
  }
};

// Rows and columns of the kernel's view. Where rows are whole blocks, or there are none, all is
// one.
void SetShape(const Dims& dims, const Dims& blocks, AdamTensor* t) {
  const size_t lead = blocks.size() == 0 ? 0 : blocks.size() - 1;
  t->rows = Product(dims, 0, lead);
  t->cols = Product(dims, lead, dims.size());
  if (t->cols % kAdamBlock == 0) {
    t->cols *= t->rows;
    t->rows = 1;
  }
}

template <class Platform>
Error AdamStep(Exec<Platform> exec, std::string_view decay, std::string_view exp_avg_dtype,
               std::string_view exp_avg_sq_dtype, std::string_view low, bool update,
               AnyBuffer constants, RemainingArgs args, RemainingRets rets) {
  AdamKinds kinds{};
  kinds.update = update;
  QSHARD_RETURN_IF_ERROR(Find("decay", decay, kDecays, &kinds.decay));
  QSHARD_RETURN_IF_ERROR(Find("low", low, kLows, &kinds.low));
  QSHARD_RETURN_IF_ERROR(Find("exp_avg_dtype", exp_avg_dtype, kTypes, &kinds.exp_avg));
  QSHARD_RETURN_IF_ERROR(Find("exp_avg_sq_dtype", exp_avg_sq_dtype, kTypes, &kinds.exp_avg_sq));
  QSHARD_REQUIRE(!update || kinds.low != AdamLow::kRemainder, kOp,
                 ": update is not for parameters with a remainder, which must change as one");
  const bool has_low = kinds.low != AdamLow::kNone;
  const bool has_param = !update || kinds.decay != Decay::kNone || has_low;
  const bool scaled1 = IsScaled(kinds.exp_avg), scaled2 = IsScaled(kinds.exp_avg_sq);
  const size_t results = 3 + has_low + scaled1 + scaled2, operands = results + has_param;

  std::vector<BufferList> of, to;
  QSHARD_RETURN_IF_ERROR(ListsOf(kOp, args, operands, &of));
  const size_t count = of[0].size();
  QSHARD_REQUIRE(rets.size() == count * results, kOp, ": results (", rets.size(), ") are not ",
                 results, " for each of ", count, " tensors");
  to.resize(results);
  for (size_t i = 0; i < rets.size(); ++i) {
    auto buffer = rets.get<AnyBuffer>(i);
    if (buffer.has_error()) return buffer.error();
    to[i / count].push_back(**buffer);
  }
  if (count == 0) return Error::Success();

  float* rows = nullptr;
  const Dims table = constants.dimensions();
  QSHARD_RETURN_IF_ERROR(FloatsOf(kOp, "constants", constants, &rows));
  QSHARD_REQUIRE(table.size() > 0 && table[table.size() - 1] == kAdamConstants, kOp, ": constants ",
                 Shape(constants), " is not ", kAdamConstants, " numbers for each tensor");

  Lists lists(std::move(of), std::move(to));
  const BufferList& grad = lists.Operand();
  const BufferList* param = has_param ? &lists.Operand() : nullptr;
  const BufferList* lows = has_low ? &lists.Operand() : nullptr;
  const BufferList& new_param = lists.Result();
  const BufferList* new_lows = has_low ? &lists.Result() : nullptr;
  const auto state = [&](const char* name, const char* scale_name, AdamType type, auto next) {
    const BufferList* data = &next();
    return StateLists{name, scale_name, type, data, IsScaled(type) ? &next() : nullptr};
  };
  const auto operand = [&]() -> const BufferList& { return lists.Operand(); };
  const auto result = [&]() -> const BufferList& { return lists.Result(); };
  const StateLists m = state("exp_avg", "exp_avg_scale_inv", kinds.exp_avg, operand);
  const StateLists v = state("exp_avg_sq", "exp_avg_sq_scale_inv", kinds.exp_avg_sq, operand);
  const StateLists new_m = state("exp_avg", "exp_avg_scale_inv", kinds.exp_avg, result);
  const StateLists new_v = state("exp_avg_sq", "exp_avg_sq_scale_inv", kinds.exp_avg_sq, result);

  QSHARD_RETURN_IF_ERROR(FloatType("grad", grad[0], &kinds.grad));
  kinds.param = kernels::kAdamFloat32;
  if (has_param) QSHARD_RETURN_IF_ERROR(FloatType("param", (*param)[0], &kinds.param));
  QSHARD_REQUIRE(kinds.low != AdamLow::kRemainder || kinds.param == kernels::kAdamBFloat16, kOp,
                 ": param (", (*param)[0].element_type(),
                 ") is not bfloat16, which alone takes a remainder");
  const AdamType out_type = update ? kernels::kAdamFloat32 : kinds.param;

  std::vector<AdamTensor> tensors(count);
  for (size_t i = 0; i < count; ++i) {
    AdamTensor& t = tensors[i];
    t = {};
    const AnyBuffer& g = grad[i];
    QSHARD_REQUIRE(Holds(g.element_type(), kinds.grad), kOp, ": grad (", g.element_type(),
                   ") is not ", kTypes[kinds.grad].name,
                   " as the first is; group tensors by dtype");
    t.grad = g.untyped_data();
    if (has_param) {
      const AnyBuffer& p = (*param)[i];
      QSHARD_REQUIRE(Holds(p.element_type(), kinds.param), kOp, ": param (", p.element_type(),
                     ") is not ", kTypes[kinds.param].name,
                     " as the first is; group tensors by dtype");
      QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "param", p, "grad", g));
      t.param = p.untyped_data();
    }
    QSHARD_REQUIRE(Holds(new_param[i].element_type(), out_type), kOp, ": new param (",
                   new_param[i].element_type(), ") is not ", kTypes[out_type].name);
    QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "new param", new_param[i], "grad", g));
    t.new_param = new_param[i].untyped_data();
    for (const BufferList* list : {lows, new_lows}) {
      if (list == nullptr) continue;
      const AnyBuffer& x = (*list)[i];
      const DataType type = x.element_type();
      const bool fits = kinds.low == AdamLow::kMaster
                            ? type == DataType::F32
                            : type == DataType::S16 || type == DataType::U16;
      QSHARD_REQUIRE(fits, kOp, ": low (", type, ") is not ",
                     kinds.low == AdamLow::kMaster ? "float32" : "int16", ", which a ", low, " is");
      QSHARD_RETURN_IF_ERROR(CheckSameShape(kOp, "low", x, "grad", g));
      (list == lows ? const_cast<void*&>(t.low) : t.new_low) = x.untyped_data();
    }
    Dims blocks;
    void *from1 = nullptr, *from2 = nullptr;
    float *scale1 = nullptr, *scale2 = nullptr;
    QSHARD_RETURN_IF_ERROR(m.Get(i, g, &from1, &scale1, &blocks));
    QSHARD_RETURN_IF_ERROR(v.Get(i, g, &from2, &scale2, &blocks));
    t.exp_avg = {from1, scale1};
    t.exp_avg_sq = {from2, scale2};
    QSHARD_RETURN_IF_ERROR(new_m.Get(i, g, &t.new_exp_avg.data, &t.new_exp_avg.scale_inv, &blocks));
    QSHARD_RETURN_IF_ERROR(
        new_v.Get(i, g, &t.new_exp_avg_sq.data, &t.new_exp_avg_sq.scale_inv, &blocks));
    SetShape(g.dimensions(), blocks, &t);
  }
  QSHARD_REQUIRE(constants.element_count() >= count * kAdamConstants, kOp, ": constants ",
                 Shape(constants), " is not ", kAdamConstants, " numbers for each of ", count,
                 " tensors");
  return ToError(kOp,
                 kernels::Adam(exec, tensors.data(), static_cast<int64_t>(count), kinds, rows));
}

}  // namespace

QSHARD_DEFINE_OP(adam, AdamStep,
                 .Attr<std::string_view>("decay")
                     .Attr<std::string_view>("exp_avg_dtype")
                     .Attr<std::string_view>("exp_avg_sq_dtype")
                     .Attr<std::string_view>("low")
                     .Attr<bool>("update")
                     .Arg<AnyBuffer>() /* constants */
                     .RemainingArgs()  /* grad[], param[], low[], states[] */
                     .RemainingRets() /* param[], low[], states[] */)

}  // namespace qshard
