#include "host/torch_tensor.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "host/run.h"
#include "host/thread_pool.h"

namespace nb = nanobind;

namespace qshard::host {

TorchAbi torch;

namespace {

const DLPackExchangeAPI* exchange = nullptr;  // PyTorch's, for its current stream

struct NumberedDtype {
  int32_t number;
  DataType dtype;
};
std::vector<NumberedDtype> dtypes;

int32_t NumberOf(DataType dtype) {
  for (const NumberedDtype& d : dtypes)
    if (d.dtype == dtype) return d.number;
  throw std::runtime_error("torch.ops.qshard: PyTorch has no such dtype");
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

DataType DtypeOf(int32_t number) {
  for (const NumberedDtype& d : dtypes)
    if (d.number == number) return d.dtype;
  return XLA_FFI_DataType_INVALID;
}

void* BeginCall(DLDevice device, double elements) {
  void* stream = nullptr;
  if (device.device_type == kDLCUDA) {
    Check(exchange->current_work_stream(device.device_type, device.device_id, &stream),
          "give its current stream");
  } else if (uint32_t count; MayUseThreads(elements) && torch.torch_get_num_threads(&count) == 0) {
    FollowNumThreads(count);
  }
  return stream;
}

void OwnedTensor::Read(const std::string& op, const std::string& name) {
  bool is_defined = false;
  int64_t *sizes, *strides, rank;
  int32_t dtype, type, index;
  void* data;
  Check(torch.aoti_torch_is_defined(handle_, &is_defined), "read a tensor");
  if (!is_defined) Refuse(op, ": ", name, " is not a tensor; pass one");
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
    Refuse(op, ": ", name, " is not on a CPU or CUDA device; move it to one");
  device = {is_cuda ? kDLCUDA : kDLCPU, is_cuda ? index : 0};
  buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, DtypeOf(dtype), data, rank, sizes};
  const bool is_empty = std::find(sizes, sizes + rank, 0) != sizes + rank;
  int64_t expected = 1;
  for (int64_t axis = rank - 1; axis >= 0 && !is_empty; --axis) {
    if (sizes[axis] != 1 && strides[axis] != expected)
      Refuse(op, ": ", name, " (strides ", Shape(strides, rank),
             ") is not contiguous; call .contiguous() on it");
    expected *= sizes[axis];
  }
  if (data == nullptr && !is_empty)
    Refuse(op, ": ", name, " ", Shape(buffer),
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

void OwnedTensor::Allocate(const std::string& op, const int64_t* dims, int64_t rank, DataType dtype,
                           DLDevice on) {
  int64_t strides[kMaxRank], *sizes, step = 1;
  for (int64_t axis = rank - 1; axis >= 0; --axis) {
    strides[axis] = step;
    if (!Multiply(step, std::max<int64_t>(dims[axis], 1), &step))
      Refuse(op, ": a result ", Shape(dims, rank), " has more than 2^63 elements");
  }
  const int32_t type = on.device_type == kDLCUDA ? torch.aoti_torch_device_type_cuda()
                                                 : torch.aoti_torch_device_type_cpu();
  void* data;
  const bool failed = torch.aoti_torch_empty_strided(rank, dims, strides, NumberOf(dtype), type,
                                                     on.device_id, &handle_) != 0 ||
                      torch.aoti_torch_get_sizes(handle_, &sizes) != 0 ||
                      torch.aoti_torch_get_data_ptr(handle_, &data) != 0;
  if (failed)
    // Trainers look for this text.
    throw std::runtime_error(MakeError(ErrorKind::kInternal, op, ": no room for a result ",
                                       Shape(dims, rank), "; ",
                                       on.device_type == kDLCUDA ? "CUDA " : "", "out of memory")
                                 .text());
  device = on;
  buffer = {XLA_FFI_Buffer_STRUCT_SIZE, nullptr, dtype, data, rank, sizes};
}

bool LoadTorch(const std::string& library, nb::handle tensor) {
  if (!dtypes.empty()) return false;
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
  return true;
}

}  // namespace qshard::host
