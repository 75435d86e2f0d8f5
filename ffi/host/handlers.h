// The handlers of all ops, by platform.
#ifndef QSHARD_HOST_HANDLERS_H_
#define QSHARD_HOST_HANDLERS_H_

#include <nanobind/nanobind.h>

#include <string>

#include "dlpack/dlpack.h"
#include "xla/ffi/api/c_api.h"

namespace qshard::host {

inline constexpr char kHandlerCapsule[] = "xla._CUSTOM_CALL_TARGET";  // the name jax.ffi expects

// {op name: capsule} for "cpu" or "cuda".
nanobind::dict Handlers(const std::string& platform);

// The handler of an op for the device of some tensors. Raises ValueError or NotImplementedError.
XLA_FFI_Handler* HandlerOf(nanobind::str op, const DLDevice& device);

}  // namespace qshard::host

#endif  // QSHARD_HOST_HANDLERS_H_
