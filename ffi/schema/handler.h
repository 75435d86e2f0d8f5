// Building blocks of the op bodies in ops/*.cc. A body names its op, picks types and launches. Its
// arguments were checked against the op's row (schema/bind.h):
//
//   QSHARD_DEFINE_OP(cast_tensor) {
//     return DispatchFloat(call.arg(0), [&](auto in) {
//       ...
//     });
//   }
//
// This defines the XLA FFI handlers qshard_cast_tensor_cpu and, in a CUDA build,
// qshard_cast_tensor_cuda. They use only XLA's C API, because its C++ headers take longer to
// compile than all ops.
#ifndef QSHARD_SCHEMA_HANDLER_H_
#define QSHARD_SCHEMA_HANDLER_H_

#include <algorithm>
#include <iterator>
#include <string_view>
#include <type_traits>
#include <vector>

#include "core/block.h"
#include "core/exec.h"
#include "core/format.h"
#include "core/scale.h"
#include "schema/bind.h"
#include "xla/ffi/api/c_api.h"

namespace qshard {

// A checked call of an op.
template <class Platform>
struct Call {
  const Exec<Platform>& exec;
  const Binding& binding;
  Buffers args, rets;

  // Operand or result number `operand`. For a list, its tensor i. Lists come last.
  const Buffer& arg(int operand, int64_t i = 0) const {
    return args[binding.ArgBegin(operand) + i];
  }
  const Buffer& ret(int output, int64_t i = 0) const { return rets[binding.RetBegin(output) + i]; }
  bool has_arg(int operand) const { return binding.ArgBegin(operand) >= 0; }

  const char* op() const { return binding.row().name.c_str(); }
  int64_t integer(std::string_view name) const { return binding.attribute(name).integer; }
  Nonfinite nonfinite() const {
    return text("nonfinite") == "nan" ? Nonfinite::kNan : Nonfinite::kSaturate;
  }
  bool flag(std::string_view name) const { return binding.attribute(name).integer != 0; }
  float number(std::string_view name) const {
    return static_cast<float>(binding.attribute(name).number);
  }
  std::string_view text(std::string_view name) const { return binding.attribute(name).text(); }

  // Converts a launcher's result to an Error.
  Error operator()(Status status) const {
    if (!status) return {};
    return MakeError(ErrorKind::kInternal, op(), ": ", status.error);
  }

  // Checks that a result shares its operand's memory, for ops that write only a part of it.
  Error InPlace(int output) const {
    const Operand& out = binding.row().outputs[output];
    for (int64_t i = 0; i < (out.many ? binding.list_length() : 1); ++i)
      QSHARD_REQUIRE(ret(output, i).data == arg(out.alias, i).data || Elements(ret(output, i)) == 0,
                     op(), ": ", out.name, " ", Shape(ret(output, i)),
                     " is not the memory of its operand; alias the two");
    return {};
  }

  // Number of elements, or blocks, of the first operand per value of a `...` operand or result.
  int64_t ArgRun(int operand) const {
    return binding.Run(binding.row().inputs[operand], arg(operand));
  }
  int64_t RetRun(int output) const {
    return binding.Run(binding.row().outputs[output], ret(output));
  }
};

template <class T>
const T* Data(const Buffer& buffer) {
  return static_cast<const T*>(buffer.data);
}
template <class T>
T* Mutable(const Buffer& buffer) {
  return static_cast<T*>(buffer.data);
}

// A first operand such as `*batch m *k` or `*batch *outer m *k`, as matrices of rows x cols.
struct Matrices {
  explicit Matrices(const Binding& binding)
      : last(static_cast<int>(binding.row().inputs[0].terms.size()) - 1),
        batch(binding.Length(0)),
        rows((last > 2 ? binding.Length(1) : 1) * binding.Length(last - 1)),
        cols(binding.Length(last)) {}
  int last;  // index of the term of columns
  int64_t batch, rows, cols;
};

// Blocks of a first operand `*batch (m block_rows) (k block_cols)`, or with `*outer` before the
// rows.
inline Blocks BlocksOf(const Binding& binding) {
  const Matrices m(binding);
  return {m.batch, m.rows, m.cols, binding.Minor(m.last - 1), binding.Minor(m.last)};
}

// --- types ---

// Calls f(T{}) with the type of a buffer of floats.
template <class Fn>
Error DispatchFloat(const Buffer& buffer, Fn&& f) {
#define QSHARD_TRY(dtype, T) \
  if (dtype == kDataTypeOf<T>) return f(T{});
  QSHARD_FOR_EACH_INPUT(QSHARD_TRY, buffer.dtype)
#undef QSHARD_TRY
  return MakeError(ErrorKind::kInternal, NameOf(buffer.dtype), " is not dispatched");
}

// Calls f(F{}) with attribute `element` of a call: an 8-bit element, any element, or any code. With
// a buffer of floats, calls f(F{}, T{}).
#define QSHARD_TRY(name, F) \
  if (name == F::kName) return f(F{});
#define QSHARD_NAME_OF(member, F) F::member,
#define QSHARD_DISPATCH(Name, FOR_EACH)                                    \
  template <class Platform, class Fn>                                      \
  Error Name(const Call<Platform>& call, Fn&& f) {                         \
    const std::string_view element = call.text("element");                 \
    FOR_EACH(QSHARD_TRY, element)                                          \
    return MakeError(ErrorKind::kInternal, element, " is not dispatched"); \
  }                                                                        \
  template <class Platform, class Fn>                                      \
  Error Name(const Call<Platform>& call, const Buffer& floats, Fn&& f) {   \
    return Name(call, [&](auto code) {                                     \
      return DispatchFloat(floats, [&](auto in) { return f(code, in); });  \
    });                                                                    \
  }
QSHARD_DISPATCH(DispatchFp8, QSHARD_FOR_EACH_FP8)
QSHARD_DISPATCH(DispatchElement, QSHARD_FOR_EACH_ELEMENT)
QSHARD_DISPATCH(DispatchCode, QSHARD_FOR_EACH_CODE)
#undef QSHARD_DISPATCH
#undef QSHARD_TRY

// Calls f(F{}) with attribute `element` of a call with scales stored as Scale: any element with
// E8M0 scales, 8-bit elements with fp32 scales.
template <class Scale, class Platform, class Fn>
Error DispatchScaledElement(const Call<Platform>& call, Fn&& f) {
  if constexpr (std::is_same_v<Scale, E8M0>) {
    return DispatchElement(call, f);
  } else {
    constexpr std::string_view kFp8[] = {QSHARD_FOR_EACH_FP8(QSHARD_NAME_OF, kName)};
    const std::string_view element = call.text("element");
    QSHARD_REQUIRE(std::find(std::begin(kFp8), std::end(kFp8), element) != std::end(kFp8),
                   call.op(), ": element (", element,
                   ") has no float32 scales; give scale_dtype=", E8M0::kName);
    return DispatchFp8(call, f);
  }
}
#undef QSHARD_NAME_OF

// --- definition ---

// Answers XLA's metadata query, or decodes, checks and runs a call. Does not throw, but XLA may
// while it allocates an error.
template <class Platform>
XLA_FFI_Error* Handle(XLA_FFI_CallFrame* frame, Op op, const char* name,
                      Error (*run)(const Call<Platform>& call));
extern template XLA_FFI_Error* Handle<Cpu>(XLA_FFI_CallFrame*, Op, const char*,
                                           Error (*)(const Call<Cpu>&));
extern template XLA_FFI_Error* Handle<Cuda>(XLA_FFI_CallFrame*, Op, const char*,
                                            Error (*)(const Call<Cuda>&));

#define QSHARD_DEFINE_HANDLER(name, suffix, Platform)                             \
  extern "C" XLA_FFI_Error* qshard_##name##_##suffix(XLA_FFI_CallFrame* frame) {  \
    return ::qshard::Handle<::qshard::Platform>(frame, ::qshard::Op::name, #name, \
                                                Run_##name<Platform>);            \
  }
#if defined(QSHARD_WITH_CUDA)
#define QSHARD_DEFINE_HANDLERS(name)    \
  QSHARD_DEFINE_HANDLER(name, cpu, Cpu) \
  QSHARD_DEFINE_HANDLER(name, cuda, Cuda)
#else
#define QSHARD_DEFINE_HANDLERS(name) QSHARD_DEFINE_HANDLER(name, cpu, Cpu)
#endif
#define QSHARD_DEFINE_OP(name)                                   \
  template <class Platform>                                      \
  static ::qshard::Error Run_##name(const Call<Platform>& call); \
  QSHARD_DEFINE_HANDLERS(name)                                   \
  template <class Platform>                                      \
  static ::qshard::Error Run_##name(const Call<Platform>& call)

}  // namespace qshard

#endif  // QSHARD_SCHEMA_HANDLER_H_
