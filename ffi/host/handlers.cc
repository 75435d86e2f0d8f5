// Handlers of all ops, by platform.
#include "host/call.h"
#include "host/run.h"

namespace nb = nanobind;

namespace qshard::host {

constexpr char kHandlerCapsule[] = "xla._CUSTOM_CALL_TARGET";  // the name jax.ffi expects

#define QSHARD_OP(name, ...) extern "C" XLA_FFI_Handler qshard_##name##_cpu, qshard_##name##_cuda;
#include "ops.def"
#undef QSHARD_OP

nb::dict Handlers(const std::string& platform) {
  nb::dict handlers;
  const auto add = [&](const char* name, XLA_FFI_Handler* handler) {
    handlers[name] = nb::capsule(reinterpret_cast<void*>(handler), kHandlerCapsule);
  };
  if (platform == "cpu") {
#define QSHARD_OP(name, ...) add(#name, qshard_##name##_cpu);
#include "ops.def"
#undef QSHARD_OP
  } else if (platform == "cuda") {
#if defined(QSHARD_WITH_CUDA)
#define QSHARD_OP(name, ...) add(#name, qshard_##name##_cuda);
#include "ops.def"
#undef QSHARD_OP
#endif
  } else {
    throw nb::value_error("handlers: platform is not cpu or cuda");
  }
  return handlers;
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
  PyErr_Format(PyExc_NotImplementedError,
               "%U: this build of qshard has no kernels for device (cuda:%d); "
               "install a build with CUDA, or move the tensors to the CPU",
               op.ptr(), device.device_id);
  nb::raise_python_error();
}

}  // namespace qshard::host
