// A framework's tensor as an XLA_FFI_Buffer.
#ifndef QSHARD_HOST_TENSOR_H_
#define QSHARD_HOST_TENSOR_H_

#include <nanobind/nanobind.h>

#include "dlpack/dlpack.h"
#include "xla/ffi/api/c_api.h"

namespace qshard::host {

// The framework's table of C functions for tensors of this type, or null if it offers none.
const DLPackExchangeAPI* ExchangeApi(PyTypeObject* type);

// A tensor borrowed for one call. `keep` holds what the fall-back path allocated.
struct Tensor {
  XLA_FFI_Buffer buffer;
  DLDevice device;
  nanobind::object keep;
};

// Fills `tensor` from a Python object. `role` names it in errors ("input 0").
void Import(nanobind::handle object, const char* role, size_t index, bool writable, Tensor& tensor);

}  // namespace qshard::host

#endif  // QSHARD_HOST_TENSOR_H_
