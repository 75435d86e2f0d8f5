// What an op in ops/*.cc is made of: its buffers, its checks, the choice of types, and the one line
// that turns a template over the platform into XLA FFI handlers.
#ifndef QSHARD_CORE_OP_H_
#define QSHARD_CORE_OP_H_

#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "core/exec.h"
#include "core/format.h"
#include "xla/ffi/api/ffi.h"

namespace qshard {

using xla::ffi::AnyBuffer;
using xla::ffi::DataType;
using xla::ffi::Error;
template <class Buffer>
using Result = xla::ffi::Result<Buffer>;

// --- errors: "op: argument (got) is not what is needed; what to do" ---

template <class... Parts>
Error InvalidArgument(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return Error::InvalidArgument(text.str());
}

#define QSHARD_REQUIRE(condition, ...) \
  if (!(condition)) return ::qshard::InvalidArgument(__VA_ARGS__)

#define QSHARD_RETURN_IF_ERROR(expression) \
  if (::qshard::Error error = (expression); error.failure()) return error

inline Error ToError(const char* op, Status status) {
  if (status.error == nullptr) return Error::Success();
  return Error::Internal(std::string(op) + ": " + status.error);
}

// --- shapes ---

using Dims = AnyBuffer::Dimensions;

// Prints as (2, 3).
struct Shape {
  explicit Shape(const AnyBuffer& buffer) : dims(buffer.dimensions()) {}
  explicit Shape(Dims d) : dims(d) {}
  friend std::ostream& operator<<(std::ostream& out, const Shape& shape) {
    out << '(';
    for (size_t i = 0; i < shape.dims.size(); ++i) out << (i ? ", " : "") << shape.dims[i];
    return out << ')';
  }
  Dims dims;
};

inline int64_t Product(Dims dims, size_t begin, size_t end) {
  int64_t product = 1;
  for (size_t i = begin; i < end; ++i) product *= dims[i];
  return product;
}

inline bool SameShape(Dims a, Dims b) {
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin());
}

// True if `prefix` is the first axes of `dims`: then each of its elements stands for one contiguous
// run.
inline bool IsPrefix(Dims prefix, Dims dims) {
  return prefix.size() <= dims.size() && std::equal(prefix.begin(), prefix.end(), dims.begin());
}

// True if `out` has the shape of the transpose [*batch, *k, m] of `dims` = [*batch, m, *k], or
// `dims` itself: XLA keeps the logical shape and gives the transposed memory a layout, which a
// handler does not see.
inline bool IsTransposeOf(Dims out, Dims dims, int64_t batch_axes) {
  if (SameShape(out, dims)) return true;
  if (out.size() != dims.size()) return false;
  const size_t m = batch_axes, last = dims.size() - 1;
  for (size_t i = 0; i < m; ++i)
    if (out[i] != dims[i]) return false;
  for (size_t i = m; i < last; ++i)
    if (out[i] != dims[i + 1]) return false;
  return out[last] == dims[m];
}

// --- checks of shapes ---

inline Error CheckSameShape(const char* op, const char* argument, const AnyBuffer& buffer,
                            const char* like_argument, const AnyBuffer& like) {
  QSHARD_REQUIRE(SameShape(buffer.dimensions(), like.dimensions()), op, ": ", argument, " ",
                 Shape(buffer), " does not have the shape of ", like_argument, " ", Shape(like));
  return Error::Success();
}

inline Error CheckPrefix(const char* op, const char* argument, const AnyBuffer& prefix,
                         const char* whole_argument, const AnyBuffer& whole) {
  QSHARD_REQUIRE(IsPrefix(prefix.dimensions(), whole.dimensions()), op, ": ", argument, " ",
                 Shape(prefix), " is not the first axes of ", whole_argument, " ", Shape(whole),
                 "; give it one element for each run of ", whole_argument);
  return Error::Success();
}

// Checks that `transpose` is that of `buffer` [*batch, m, *k].
inline Error CheckTranspose(const char* op, const char* transpose_argument,
                            const AnyBuffer& transpose, const char* argument,
                            const AnyBuffer& buffer, int64_t batch) {
  const Dims dims = buffer.dimensions();
  QSHARD_REQUIRE(batch >= 0 && batch < static_cast<int64_t>(dims.size()), op, ": batch (", batch,
                 ") is not less than the number of axes of ", argument, " ", Shape(buffer));
  QSHARD_REQUIRE(IsTransposeOf(transpose.dimensions(), dims, batch), op, ": ", transpose_argument,
                 " ", Shape(transpose), " is not the transpose of ", argument, " ", Shape(buffer));
  return Error::Success();
}

// --- buffers as kernels see them ---

// A row-major buffer seen as `runs` runs of `length` elements, one per element of its prefix.
struct Runs {
  Runs(Dims prefix, Dims dims)
      : runs(Product(dims, 0, prefix.size())), length(Product(dims, prefix.size(), dims.size())) {}
  int64_t runs, length;
};

// [*batch, m, *k] as `batch` matrices of `rows` x `cols`.
struct Matrices {
  Matrices(Dims dims, int64_t batch_axes)
      : batch(Product(dims, 0, batch_axes)),
        rows(dims[batch_axes]),
        cols(Product(dims, batch_axes + 1, dims.size())) {}
  int64_t batch, rows, cols;
};

// --- dtypes ---

// Codes travel in the element's own dtype (JAX) or as plain bytes (torch).
inline bool IsByte(DataType t) {
  switch (t) {
    case DataType::U8:
    case DataType::S8:
    case DataType::F8E4M3FN:
    case DataType::F8E5M2:
    case DataType::F8E8M0FNU:
      return true;
    default:
      return false;
  }
}

template <class F>
constexpr DataType kDataTypeOf = DataType::INVALID;
template <>
inline constexpr DataType kDataTypeOf<E4M3> = DataType::F8E4M3FN;
template <>
inline constexpr DataType kDataTypeOf<E5M2> = DataType::F8E5M2;
template <>
inline constexpr DataType kDataTypeOf<E8M0> = DataType::F8E8M0FNU;

template <class T>
struct Type {
  using type = T;
};

// Calls f(Type<T>{}) with the C++ type of a float buffer.
template <class Fn>
Error DispatchFloat(const char* op, const char* argument, DataType t, Fn&& f) {
  switch (t) {
    case DataType::F32:
      return f(Type<float>{});
    case DataType::BF16:
      return f(Type<bfloat16>{});
    case DataType::F16:
      return f(Type<float16>{});
    default:
      return InvalidArgument(op, ": ", argument, " (", t,
                             ") is not float32, bfloat16 or float16; cast it first");
  }
}

namespace internal {
template <class Fn>
Error TryElements(const char* op, std::string_view element, Fn&&) {
  return InvalidArgument(op, ": element (", element, ") is not a format this op knows");
}
template <class Fn, class F, class... Rest>
Error TryElements(const char* op, std::string_view element, Fn&& f, Type<F>, Rest... rest) {
  if (element == F::kName) return f(Type<F>{});
  return TryElements(op, element, f, rest...);
}
}  // namespace internal

// Calls f(Type<F>{}) with that one of the formats Fs that `element` names.
template <class... Fs, class Fn>
Error DispatchElement(const char* op, std::string_view element, Fn&& f) {
  return internal::TryElements(op, element, f, Type<Fs>{}...);
}

// Codes of F as bytes, after checking that the buffer can hold them.
template <class F>
Error CodesOf(const char* op, const char* argument, const AnyBuffer& buffer, uint8_t** codes) {
  const DataType t = buffer.element_type();
  QSHARD_REQUIRE(t == DataType::U8 || t == kDataTypeOf<F>, op, ": ", argument, " (", t, ") is not ",
                 F::kName, " or uint8; view it as one of them");
  *codes = static_cast<uint8_t*>(buffer.untyped_data());
  return Error::Success();
}

inline Error FloatsOf(const char* op, const char* argument, const AnyBuffer& buffer,
                      float** floats) {
  QSHARD_REQUIRE(buffer.element_type() == DataType::F32, op, ": ", argument, " (",
                 buffer.element_type(), ") is not float32; cast it first");
  *floats = static_cast<float*>(buffer.untyped_data());
  return Error::Success();
}

template <class T>
const T* Data(const AnyBuffer& buffer) {
  return static_cast<const T*>(buffer.untyped_data());
}
template <class T>
T* Data(Result<AnyBuffer>& buffer) {
  return static_cast<T*>(buffer->untyped_data());
}

}  // namespace qshard

// --- contexts ---

template <>
struct xla::ffi::CtxDecoding<qshard::Exec<qshard::Cpu>> {
  using Type = qshard::Exec<qshard::Cpu>;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine&) {
    Type exec;
    exec.api = api;
    exec.context = ctx;
    exec.schedule = [](const Type& exec, void (*task)(void*), void* data) {
      auto* api = static_cast<const XLA_FFI_Api*>(exec.api);
      XLA_FFI_ThreadPool_Schedule_Args args{};
      args.struct_size = XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE;
      args.ctx = static_cast<XLA_FFI_ExecutionContext*>(exec.context);
      args.task = task;
      args.data = data;
      if (XLA_FFI_Error* error = api->XLA_FFI_ThreadPool_Schedule(&args)) {
        internal::DestroyError(api, error);
        task(data);
      }
    };
    XLA_FFI_ThreadPool_NumThreads_Args args{};
    args.struct_size = XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE;
    args.ctx = ctx;
    args.num_threads = &exec.num_threads;
    if (XLA_FFI_Error* error = api->XLA_FFI_ThreadPool_NumThreads(&args)) {
      internal::DestroyError(api, error);
      exec.num_threads = 1;
    }
    return exec;
  }
};

template <>
struct xla::ffi::CtxDecoding<qshard::Exec<qshard::Cuda>> {
  using Type = qshard::Exec<qshard::Cuda>;

  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* ctx,
                                    DiagnosticEngine& diagnostic) {
    auto stream = CtxDecoding<PlatformStream<CUstream_st*>>::Decode(api, ctx, diagnostic);
    if (!stream) return std::nullopt;
    return Type{*stream};
  }
};

// --- definition: one line makes qshard_<name>_cpu and, in a CUDA build, qshard_<name>_cuda ---

#define QSHARD_DEFINE_HANDLER(name, suffix, Platform, impl, traits, ...)            \
  extern "C" XLA_FFI_Error* qshard_##name##_##suffix(XLA_FFI_CallFrame* frame) {    \
    static auto* handler = xla::ffi::Ffi::Bind()                                    \
                               .Ctx<::qshard::Exec<::qshard::Platform>>()           \
                                   __VA_ARGS__.To(impl<::qshard::Platform>, traits) \
                               .release();                                          \
    return handler->Call(frame);                                                    \
  }

#if defined(QSHARD_WITH_CUDA)
// Every handler only enqueues the same launches for the same shapes: XLA may record it into a
// command buffer.
#define QSHARD_DEFINE_OP(name, impl, ...)                                                 \
  QSHARD_DEFINE_HANDLER(name, cpu, Cpu, impl, {}, __VA_ARGS__)                            \
  QSHARD_DEFINE_HANDLER(name, cuda, Cuda, impl, {xla::ffi::Traits::kCmdBufferCompatible}, \
                        __VA_ARGS__)
#else
#define QSHARD_DEFINE_OP(name, impl, ...) \
  QSHARD_DEFINE_HANDLER(name, cpu, Cpu, impl, {}, __VA_ARGS__)
#endif

#endif  // QSHARD_CORE_OP_H_
