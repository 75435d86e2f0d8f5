// Runs handlers on tensors of a framework: on the device they share, in a call frame.
#ifndef QSHARD_HOST_RUN_H_
#define QSHARD_HOST_RUN_H_

#include <nanobind/nanobind.h>

#include <cstdint>

#include "host/tensor.h"
#include "xla/ffi/api/c_api.h"

namespace qshard::host {

// What the tensors of a call have in common.
struct Common {
  DLDevice device{kDLCPU, 0};
  nanobind::handle any;  // one of them
  double numbers = 0;    // in all

  // Raises ValueError if `tensor` is on another device than those before it.
  void Add(nanobind::handle object, const Tensor& tensor);
};

// A handler to be called: a call frame but for what all handlers of a call share.
struct Step {
  XLA_FFI_Handler* handler;
  XLA_FFI_Args args;
  XLA_FFI_Rets rets;
  XLA_FFI_Attrs attrs;
};

// The handler of an op for the device of some tensors. Raises ValueError or NotImplementedError.
XLA_FFI_Handler* HandlerOf(nanobind::str op, const DLDevice& device);

// Calls `steps` one after another: on CUDA they are enqueued on the framework's current stream. The
// first that fails ends it, and raises.
void Run(const Common& common, const Step* steps, size_t count);

// Before a large call, FollowNumThreads of what `framework` returns.
void FollowThreadsOf(nanobind::callable framework);

}  // namespace qshard::host

#endif  // QSHARD_HOST_RUN_H_
