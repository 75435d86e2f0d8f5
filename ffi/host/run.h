// Runs handlers on a framework's tensors, on their device.
#ifndef QSHARD_HOST_RUN_H_
#define QSHARD_HOST_RUN_H_

#include <nanobind/nanobind.h>

#include <cstdint>
#include <optional>
#include <string>

#include "host/tensor.h"
#include "schema/pattern.h"
#include "xla/ffi/api/c_api.h"

namespace qshard::host {

// Properties shared by the tensors of a call.
struct SharedProperties {
  DLDevice device{kDLCPU, 0};
  nanobind::handle any;  // one of the tensors
  double numbers = 0;    // elements of all tensors

  // Raises ValueError if `tensor` is on another device than earlier tensors.
  void Add(nanobind::handle object, const Tensor& tensor);
};

// One handler invocation: the per-handler part of XLA_FFI_CallFrame.
struct Step {
  XLA_FFI_Handler* handler;
  XLA_FFI_Args args;
  XLA_FFI_Rets rets;
  XLA_FFI_Attrs attrs;
};

// Returns the handler of an op for `device`. Raises ValueError or NotImplementedError.
XLA_FFI_Handler* HandlerOf(nanobind::str op, const DLDevice& device);

// Returns the handler of an op for `device`, or null if this build has none.
XLA_FFI_Handler* HandlerOf(Op op, const DLDevice& device);

// Error of a call on a device for which this build has no kernels.
std::string NoKernels(const std::string& op, const DLDevice& device);

// The error of a handler, or of its device.
struct Failure {
  XLA_FFI_Error_Code code;
  std::string message;
};

// Calls `steps` in order, on CUDA on `stream`. Stops at the first failure. Needs no GIL.
std::optional<Failure> RunOn(const DLDevice& device, void* stream, const Step* steps, size_t count);

// Whether a call on the CPU with this many elements in its tensors may use several threads.
bool MayUseThreads(double numbers);

// Calls `steps` in order. On CUDA they are enqueued on the framework's current stream. Stops and
// raises at the first failure.
void Run(const SharedProperties& shared, const Step* steps, size_t count);

// Before each large CPU call, passes the result of `framework` to FollowNumThreads.
void FollowThreadsOf(nanobind::callable framework);

}  // namespace qshard::host

#endif  // QSHARD_HOST_RUN_H_
