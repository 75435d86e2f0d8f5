// Handlers of all ops, by platform.
#include <iterator>

#include "host/call.h"
#include "host/run.h"

namespace nb = nanobind;

namespace qshard::host {

constexpr char kHandlerCapsule[] = "xla._CUSTOM_CALL_TARGET";  // the name jax.ffi expects

#define QSHARD_OP(name, ...) extern "C" XLA_FFI_Handler qshard_##name##_cpu, qshard_##name##_cuda;
#include "ops.def"
#undef QSHARD_OP

XLA_FFI_Handler* HandlerOf(Op op, const DLDevice& device) {
#define QSHARD_OP(name, ...) qshard_##name##_cpu,
  static constexpr XLA_FFI_Handler* kCpu[] = {
#include "ops.def"
  };
#undef QSHARD_OP
#if defined(QSHARD_WITH_CUDA)
#define QSHARD_OP(name, ...) qshard_##name##_cuda,
  static constexpr XLA_FFI_Handler* kCuda[] = {
#include "ops.def"
  };
#undef QSHARD_OP
  if (device.device_type == kDLCUDA) return kCuda[static_cast<size_t>(op)];
#else
  if (device.device_type == kDLCUDA) return nullptr;
#endif
  return kCpu[static_cast<size_t>(op)];
}

nb::dict Handlers(const std::string& platform) {
#define QSHARD_OP(name, ...) #name,
  static constexpr const char* kNames[] = {
#include "ops.def"
  };
#undef QSHARD_OP
  if (platform != "cpu" && platform != "cuda")
    throw nb::value_error("handlers: platform is not cpu or cuda");
  const DLDevice device{platform == "cuda" ? kDLCUDA : kDLCPU, 0};
  nb::dict handlers;
  for (size_t op = 0; op < std::size(kNames); ++op)
    if (XLA_FFI_Handler* const handler = HandlerOf(static_cast<Op>(op), device))
      handlers[kNames[op]] = nb::capsule(reinterpret_cast<void*>(handler), kHandlerCapsule);
  return handlers;
}

std::string NoKernels(const std::string& op, const DLDevice& device) {
  return op + ": this build of qshard has no kernels for device (cuda:" +
         std::to_string(device.device_id) +
         "); install a build with CUDA, or move the tensors to the CPU";
}

XLA_FFI_Handler* HandlerOf(nb::str op, const DLDevice& device) {
  static const nb::dict& cpu = *new nb::dict(Handlers("cpu"));
  static const nb::dict& cuda = *new nb::dict(Handlers("cuda"));
  const nb::dict& handlers = device.device_type == kDLCUDA ? cuda : cpu;
  PyObject* handler = PyDict_GetItemWithError(handlers.ptr(), op.ptr());
  if (handler != nullptr)
    return reinterpret_cast<XLA_FFI_Handler*>(PyCapsule_GetPointer(handler, kHandlerCapsule));
  if (PyErr_Occurred()) nb::raise_python_error();
  if (handlers.size() > 0)
    throw nb::value_error(("call: no op " + std::string(op.c_str())).c_str());
  PyErr_SetString(PyExc_NotImplementedError, NoKernels(op.c_str(), device).c_str());
  nb::raise_python_error();
}

}  // namespace qshard::host
