// A framework's tensor as an XLA_FFI_Buffer.
#ifndef QSHARD_HOST_TENSOR_H_
#define QSHARD_HOST_TENSOR_H_

#include <nanobind/nanobind.h>

#include "dlpack/dlpack.h"
#include "xla/ffi/api/c_api.h"

namespace qshard::host {

// What the framework of a type of tensors offers in C; null for what it lacks.
struct Framework {
  const DLPackExchangeAPI* api;
  PyCFunction is_neg;  // torch's: whether the memory has other signs than the tensor
};
Framework FrameworkOf(PyTypeObject* type);

// A tensor borrowed for one call.
struct Tensor {
  XLA_FFI_Buffer buffer;
  DLDevice device;
};

// What a call does with its tensors.
struct Use {
  const char* role;  // names them in errors ("input")
  bool writable;
  bool refuse_negated;  // floats alone: torch negates no others
};

// Fills `tensor` from a Python object, number `index` of its role. Returns what the memory needs to
// be held, if the fall-back path made it.
nanobind::object Import(nanobind::handle object, const Use& use, size_t index, Tensor& tensor);

}  // namespace qshard::host

#endif  // QSHARD_HOST_TENSOR_H_
