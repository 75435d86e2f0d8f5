// Kernels of torch.ops.qshard in C++, so that a compiled graph runs no Python for an op. They run
// with and without the GIL, and call Python in grad mode alone (OwnedTensor::RequiresGrad).
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "host/call.h"
#include "host/run.h"
#include "host/thread_pool.h"
#include "host/torch_abi.h"
#include "schema/bind.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

TorchAbi torch;
const DLPackExchangeAPI* exchange = nullptr;  // PyTorch's, for its current stream

struct NumberedDtype {
  int32_t number;
  DataType dtype;
};
std::vector<NumberedDtype> dtypes;

DataType DtypeOf(int32_t number) {
  for (const NumberedDtype& d : dtypes)
    if (d.number == number) return d.dtype;
  return XLA_FFI_DataType_INVALID;
}

int32_t NumberOf(DataType dtype) {
  for (const NumberedDtype& d : dtypes)
    if (d.dtype == dtype) return d.number;
  throw std::runtime_error("torch.ops.qshard: PyTorch has no such dtype");
}

void Check(TorchStatus status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string("torch.ops.qshard: PyTorch cannot ") + what);
}

// Becomes a ValueError in Python.
template <class... Parts>
[[noreturn]] void Refuse(const Parts&... parts) {
  throw std::invalid_argument(ValueError(parts...).text());
}
void Require(const Error& error) {
  if (!error) return;
  if (error.kind() == ErrorKind::kInternal) throw std::runtime_error(error.text());
  throw std::invalid_argument(error.text());
}

// A tensor that the kernel owns, and its memory.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(const OwnedTensor&) = delete;
  ~OwnedTensor() {
    if (handle_ != nullptr) torch.aoti_torch_delete_tensor_object(handle_);
  }

  void Take(TorchValue value) { handle_ = reinterpret_cast<TorchTensor*>(value); }
  TorchValue Release() { return reinterpret_cast<TorchValue>(std::exchange(handle_, nullptr)); }

  void Read(const Row& row, int operand);
  bool RequiresGrad() const;
  void Allocate(const Row& row, const Dims& dims, DataType dtype, DLDevice on);

  Buffer buffer;
  DLDevice device;

 private:
  TorchTensor* handle_ = nullptr;
};

// Fills buffer and device from operand `operand` of a call.
void OwnedTensor::Read(const Row& row, int operand) {
  const std::string& name = row.inputs[operand].name;
  bool is_defined = false;
  int64_t *sizes, *strides, rank;
  int32_t dtype, type, index;
  void* data;
  Check(torch.aoti_torch_is_defined(handle_, &is_defined), "read a tensor");
  if (!is_defined) Refuse(row.name, ": ", name, " is not a tensor; pass one");
  const bool failed = torch.aoti_torch_get_dim(handle_, &rank) != 0 ||
                      torch.aoti_torch_get_sizes(handle_, &sizes) != 0 ||
                      torch.aoti_torch_get_strides(handle_, &strides) != 0 ||
                      torch.aoti_torch_get_dtype(handle_, &dtype) != 0 ||
                      torch.aoti_torch_get_device_type(handle_, &type) != 0 ||
                      torch.aoti_torch_get_device_index(handle_, &index) != 0 ||
                      torch.aoti_torch_get_data_ptr(handle_, &data) != 0;
  Check(failed, "read a tensor");
  const bool is_cuda = type == torch.aoti_torch_device_type_cuda();
  if (!is_cuda && type != torch.aoti_torch_device_type_cpu())
    Refuse(row.name, ": ", name, " is not on a CPU or CUDA device; move it to one");
  device = {is_cuda ? kDLCUDA : kDLCPU, is_cuda ? index : 0};
  buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, DtypeOf(dtype), data, rank, sizes};
  const bool is_empty = std::find(sizes, sizes + rank, 0) != sizes + rank;
  int64_t expected = 1;
  for (int64_t axis = rank - 1; axis >= 0 && !is_empty; --axis) {
    if (sizes[axis] != 1 && strides[axis] != expected)
      Refuse(row.name, ": ", name, " (strides ", Shape(strides, rank),
             ") is not contiguous; call .contiguous() on it");
    expected *= sizes[axis];
  }
  if (data == nullptr && !is_empty)
    Refuse(row.name, ": ", name, " ", Shape(buffer),
           " has no memory (fake, meta or wrapper tensor); pass the plain tensor inside it");
}

// Asks Python: the ABI has no function for it.
bool OwnedTensor::RequiresGrad() const {
  TorchTensor* same;
  Check(torch.aoti_torch_new_tensor_handle(handle_, &same), "share a tensor");
  TorchValue stack[] = {reinterpret_cast<TorchValue>(same)};
  Check(torch.torch_call_dispatcher("qshard::_requires_grad", "", stack, kTorchAbi),
        "tell whether a tensor requires grad");
  bool answer;
  std::memcpy(&answer, stack, sizeof(answer));
  return answer;
}

// Allocates an uninitialized result.
void OwnedTensor::Allocate(const Row& row, const Dims& dims, DataType dtype, DLDevice on) {
  int64_t strides[kMaxRank], *sizes, step = 1;
  for (int64_t axis = dims.rank - 1; axis >= 0; --axis) {
    strides[axis] = step;
    if (!Multiply(step, std::max<int64_t>(dims.sizes[axis], 1), &step))
      Refuse(row.name, ": a result ", Shape(dims.sizes, dims.rank), " has more than 2^63 elements");
  }
  const int32_t type = on.device_type == kDLCUDA ? torch.aoti_torch_device_type_cuda()
                                                 : torch.aoti_torch_device_type_cpu();
  void* data;
  const bool failed =
      torch.aoti_torch_empty_strided(dims.rank, dims.sizes, strides, NumberOf(dtype), type,
                                     on.device_id, &handle_) != 0 ||
      torch.aoti_torch_get_sizes(handle_, &sizes) != 0 ||
      torch.aoti_torch_get_data_ptr(handle_, &data) != 0;
  if (failed)
    // Trainers look for this text.
    throw std::runtime_error(MakeError(ErrorKind::kInternal, row.name, ": no room for a result ",
                                       Shape(dims.sizes, dims.rank), "; ",
                                       on.device_type == kDLCUDA ? "CUDA " : "", "out of memory")
                                 .text());
  device = on;
  buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data, dims.rank, sizes};
}

// Attributes of a call in XLA's C layout, and the strings that the kernel owns.
class TorchAttributes {
 public:
  explicit TorchAttributes(const Row& row) : size_(row.attributes.size()) {}
  TorchAttributes(const TorchAttributes&) = delete;
  ~TorchAttributes() {
    for (size_t i = 0; i < size_; ++i)
      if (texts_[i] != nullptr) torch.torch_delete_string(texts_[i]);
  }

  // Takes all values, before anything can throw.
  void Take(const Row& row, const TorchValue* values) {
    for (size_t i = 0; i < size_; ++i) {
      values_[i] = values[i];
      if (row.attributes[i].kind == Attribute::kText)
        texts_[i] = reinterpret_cast<TorchString*>(values[i]);
    }
  }

  XLA_FFI_Attrs Get(const Row& row) {
    for (size_t i = 0; i < size_; ++i) {
      const Attribute& attribute = row.attributes[i];
      names_[i] = {attribute.name.data(), attribute.name.size()};
      name_pointers_[i] = &names_[i];
      types_[i] = XLA_FFI_AttrType_SCALAR;
      pointers_[i] = &scalars_[i];
      switch (attribute.kind) {
        case Attribute::kInt:
          scalars_[i] = {XLA_FFI_DataType_S64, &values_[i]};
          break;
        case Attribute::kBool:
          std::memcpy(&flags_[i], &values_[i], sizeof(bool));
          scalars_[i] = {XLA_FFI_DataType_PRED, &flags_[i]};
          break;
        case Attribute::kFloat: {
          double number;
          std::memcpy(&number, &values_[i], sizeof(number));
          numbers_[i] = static_cast<float>(number);
          scalars_[i] = {XLA_FFI_DataType_F32, &numbers_[i]};
          break;
        }
        case Attribute::kText: {
          types_[i] = XLA_FFI_AttrType_STRING;
          pointers_[i] = &spans_[i];
          const bool failed = torch.torch_string_length(texts_[i], &spans_[i].len) != 0 ||
                              torch.torch_string_c_str(texts_[i], &spans_[i].ptr) != 0;
          Check(failed, "read a string");
          break;
        }
        case Attribute::kExtents:
          Refuse(row.name, ": ", attribute.name, " is a tuple, which no kernel in C++ takes");
      }
    }
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(size_),
            types_,
            name_pointers_,
            pointers_};
  }

 private:
  size_t size_;
  TorchString* texts_[kMaxAttributes] = {};
  TorchValue values_[kMaxAttributes];
  bool flags_[kMaxAttributes];
  float numbers_[kMaxAttributes];
  XLA_FFI_ByteSpan names_[kMaxAttributes], spans_[kMaxAttributes];
  XLA_FFI_Scalar scalars_[kMaxAttributes];
  XLA_FFI_AttrType types_[kMaxAttributes];
  XLA_FFI_ByteSpan* name_pointers_[kMaxAttributes];
  void* pointers_[kMaxAttributes];
};

// Runs an op on single tensors: `stack` has its operands, its attributes, and the dtype of results
// that may have any.
void RunOp(Op op, TorchValue* stack, uint64_t arguments) {
  const Row& row = RowOf(op);
  const size_t inputs = row.inputs.size(), outputs = row.outputs.size();
  OwnedTensor operands[kMaxOperands], results[kMaxOperands];
  TorchAttributes attributes(row);
  for (size_t i = 0; i < inputs; ++i) operands[i].Take(stack[i]);
  attributes.Take(row, stack + inputs);
  std::string_view chosen;
  if (const size_t read = inputs + row.attributes.size(); arguments > read) {
    int32_t number;
    std::memcpy(&number, &stack[read], sizeof(number));
    chosen = NameOf(DtypeOf(number));
  }

  Buffer *args[kMaxOperands], *rets[kMaxOperands];
  double numbers = 0;
  for (size_t i = 0; i < inputs; ++i) {
    operands[i].Read(row, static_cast<int>(i));
    args[i] = &operands[i].buffer;
    numbers += static_cast<double>(Elements(*args[i]));
    if (operands[i].device.device_type != operands[0].device.device_type ||
        operands[i].device.device_id != operands[0].device.device_id)
      Refuse(row.name, ": operands (", row.inputs[0].name, ", ", row.inputs[i].name,
             ") are not on one device; move them to one");
  }
  if (torch.aoti_torch_grad_mode_is_enabled())  // neither in autograd nodes nor in compiled graphs
    for (size_t i = 0; i < inputs; ++i)
      if (operands[i].RequiresGrad())
        Refuse(row.name, ": ", row.inputs[i].name,
               " requires grad, but the op has no derivative; pass .detach(), or use "
               "qshard.torch_bridge.Linear");
  const DLDevice device = operands[0].device;
  const XLA_FFI_Attrs attrs = attributes.Get(row);
  const Buffers given{args, static_cast<int64_t>(inputs)};
  Binding binding(row);
  Require(binding.Bind(attrs, given));
  for (size_t i = 0; i < outputs; ++i) {
    Dims dims;
    DataType dtype;
    Require(binding.OutputShape(static_cast<int>(i), &dims));
    Require(binding.OutputDtype(static_cast<int>(i), given, chosen, &dtype));
    // Codes and one-byte scales are uint8 (torch_bridge/_ops/bind.py).
    if (row.outputs[i].dtype != Operand::kSame && SizeOf(dtype) == 1) dtype = XLA_FFI_DataType_U8;
    results[i].Allocate(row, dims, dtype, device);
    rets[i] = &results[i].buffer;
    numbers += static_cast<double>(Elements(*rets[i]));
  }

  void* stream = nullptr;
  if (device.device_type == kDLCUDA) {
    Check(exchange->current_work_stream(device.device_type, device.device_id, &stream),
          "give its current stream");
  } else if (uint32_t count; MayUseThreads(numbers) && torch.torch_get_num_threads(&count) == 0) {
    FollowNumThreads(count);
  }
  XLA_FFI_ArgType arg_types[kMaxOperands];
  XLA_FFI_RetType ret_types[kMaxOperands];
  std::fill_n(arg_types, inputs, XLA_FFI_ArgType_BUFFER);
  std::fill_n(ret_types, outputs, XLA_FFI_RetType_BUFFER);
  XLA_FFI_Handler* const handler = HandlerOf(op, device);
  if (handler == nullptr) throw std::runtime_error(NoKernels(row.name, device));
  const Step step{handler,
                  {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(inputs), arg_types,
                   reinterpret_cast<void**>(args)},
                  {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(outputs), ret_types,
                   reinterpret_cast<void**>(rets)},
                  attrs};
  if (const auto failure = RunOn(device, stream, &step, 1)) {
    if (failure->code == XLA_FFI_Error_Code_INVALID_ARGUMENT)
      throw std::invalid_argument(failure->message);
    throw std::runtime_error(failure->message);
  }
  for (size_t i = 0; i < outputs; ++i) stack[i] = results[i].Release();
}

template <Op op>
void Kernel(TorchValue* stack, uint64_t arguments, uint64_t /*results*/) {
  RunOp(op, stack, arguments);
}

void Find(const std::string& library) {
  void* const handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle == nullptr) throw std::runtime_error("PyTorch is not loaded from " + library);
#define QSHARD_FIND(name, ...)                                               \
  torch.name = reinterpret_cast<decltype(torch.name)>(dlsym(handle, #name)); \
  if (torch.name == nullptr)                                                 \
    throw std::runtime_error("this PyTorch has no function " #name           \
                             ", which qshard needs; install PyTorch 2.11 or newer");
  QSHARD_FOR_EACH_TORCH_FUNCTION(QSHARD_FIND)
#undef QSHARD_FIND
}

}  // namespace

void DefineTorchKernels(const std::string& library, nb::handle tensor) {
  if (!dtypes.empty()) return;
  Find(library);
  exchange = FrameworkOf(reinterpret_cast<PyTypeObject*>(tensor.ptr())).api;
  if (exchange == nullptr || exchange->current_work_stream == nullptr)
    throw nb::type_error("PyTorch's tensors do not give their stream");
  dtypes = {
      {torch.aoti_torch_dtype_float32(), XLA_FFI_DataType_F32},
      {torch.aoti_torch_dtype_uint8(), XLA_FFI_DataType_U8},
      {torch.aoti_torch_dtype_bfloat16(), XLA_FFI_DataType_BF16},
      {torch.aoti_torch_dtype_float16(), XLA_FFI_DataType_F16},
      {torch.aoti_torch_dtype_int32(), XLA_FFI_DataType_S32},
      {torch.aoti_torch_dtype_uint32(), XLA_FFI_DataType_U32},
      {torch.aoti_torch_dtype_float8_e4m3fn(), XLA_FFI_DataType_F8E4M3FN},
      {torch.aoti_torch_dtype_float8_e5m2(), XLA_FFI_DataType_F8E5M2},
      {torch.torch_dtype_float8_e8m0fnu(), XLA_FFI_DataType_F8E8M0FNU},
      {torch.torch_dtype_float4_e2m1fn_x2(), XLA_FFI_DataType_U8},  // a byte with two codes
      {torch.aoti_torch_dtype_int8(), XLA_FFI_DataType_S8},
      {torch.aoti_torch_dtype_int16(), XLA_FFI_DataType_S16},
      {torch.aoti_torch_dtype_uint16(), XLA_FFI_DataType_U16},
      {torch.aoti_torch_dtype_int64(), XLA_FFI_DataType_S64},
      {torch.aoti_torch_dtype_uint64(), XLA_FFI_DataType_U64},
      {torch.aoti_torch_dtype_float64(), XLA_FFI_DataType_F64},
      {torch.aoti_torch_dtype_bool(), XLA_FFI_DataType_PRED},
  };
  for (const char* key : {"CPU", "CUDA"}) {
    TorchLibrary* kernels = nullptr;  // never deleted: kernels stay until the process ends
    Check(torch.aoti_torch_library_init_impl("qshard", key, __FILE__, __LINE__, &kernels),
          "take kernels");
#define QSHARD_OP(name, ...)                                                                \
  if (!RowOf(Op::name).many)                                                                \
    Check(torch.torch_library_impl(kernels, "qshard::" #name, Kernel<Op::name>, kTorchAbi), \
          "take the kernel of " #name);
#include "ops.def"
#undef QSHARD_OP
  }
}

}  // namespace qshard::host
