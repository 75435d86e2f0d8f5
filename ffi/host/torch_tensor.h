// Tensors of PyTorch in C++, by the stable ABI: read, allocated and released.
#ifndef QSHARD_HOST_TORCH_TENSOR_H_
#define QSHARD_HOST_TORCH_TENSOR_H_

#include <nanobind/nanobind.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "host/tensor.h"
#include "host/torch_abi.h"
#include "schema/bind.h"
#include "schema/dtype.h"

namespace qshard::host {

// PyTorch's C functions, after LoadTorch.
extern TorchAbi torch;

// Finds PyTorch in a loaded `library`, and the type of its tensors. Returns false if it was called
// before.
bool LoadTorch(const std::string& library, nanobind::handle tensor);

// Returns the dtype with PyTorch's number, or XLA_FFI_DataType_INVALID.
DataType DtypeOf(int32_t number);

// Prepares a call on `device` with this many elements: returns PyTorch's current stream, and on a
// CPU follows its number of threads.
void* BeginCall(DLDevice device, double elements);

// Raises RuntimeError if a function of PyTorch failed.
inline void Check(TorchStatus status, const char* what) {
  if (status != 0)
    throw std::runtime_error(std::string("torch.ops.qshard: PyTorch cannot ") + what);
}

// Raises ValueError.
template <class... Parts>
[[noreturn]] void Refuse(const Parts&... parts) {
  throw std::invalid_argument(ValueError(parts...).text());
}

// A tensor that a kernel owns, and its memory.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  OwnedTensor(const OwnedTensor&) = delete;
  ~OwnedTensor() {
    if (handle_ != nullptr) torch.aoti_torch_delete_tensor_object(handle_);
  }

  void Take(TorchValue value) { handle_ = reinterpret_cast<TorchTensor*>(value); }
  TorchValue Release() { return reinterpret_cast<TorchValue>(std::exchange(handle_, nullptr)); }

  // Fills buffer and device from operand `name` of `op`. Refuses strided tensors.
  void Read(const std::string& op, const std::string& name);

  bool RequiresGrad() const;

  // Allocates an uninitialized result of `op`.
  void Allocate(const std::string& op, const int64_t* dims, int64_t rank, DataType dtype,
                DLDevice on);

  Buffer buffer;
  DLDevice device;

 private:
  TorchTensor* handle_ = nullptr;
};

}  // namespace qshard::host

#endif  // QSHARD_HOST_TORCH_TENSOR_H_
