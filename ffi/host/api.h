// An XLA FFI host without XLA: just enough of XLA_FFI_Api to run a handler of ours in a process
// that has no XLA.
//
// A handler touches only `call_frame->api`; it never looks for a global. The two types that the C
// API leaves opaque are therefore ours to define.
#ifndef QSHARD_HOST_API_H_
#define QSHARD_HOST_API_H_

#include <string>

#include "xla/ffi/api/c_api.h"

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  void* stream = nullptr;  // the framework's current CUDA stream
};

namespace qshard::host {

// Has what handlers of ours call, and nothing else.
const XLA_FFI_Api* Api();

}  // namespace qshard::host

#endif  // QSHARD_HOST_API_H_
