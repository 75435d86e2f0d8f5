// Imports a framework's tensor as an XLA_FFI_Buffer.
#ifndef QSHARD_HOST_TENSOR_H_
#define QSHARD_HOST_TENSOR_H_

#include <nanobind/nanobind.h>

#include "dlpack/dlpack.h"
#include "xla/ffi/api/c_api.h"

namespace qshard::host {

// Functions that a framework offers for a tensor type, or null.
struct Framework {
  const DLPackExchangeAPI* api;
  PyObject* is_neg;  // torch's method, borrowed from the type: whether the negation bit is set
};
Framework FrameworkOf(PyTypeObject* type);

// A tensor borrowed for one call.
struct Tensor {
  XLA_FFI_Buffer buffer;
  DLDevice device;
};

// How a call uses its tensors.
struct Access {
  const char* role;  // name in errors, such as "input"
  bool writable;
  bool refuse_negated;  // for floats only: torch negates no other dtype lazily
};

// Fills `tensor` from a Python object, which is number `index` of its role. Returns the owner of
// the memory if the slow path imported it, else an invalid object.
nanobind::object Import(nanobind::handle object, const Access& access, size_t index,
                        Tensor& tensor);

}  // namespace qshard::host

#endif  // QSHARD_HOST_TENSOR_H_
