#include "host/run.h"

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "host/thread_pool.h"

#if defined(QSHARD_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace nb = nanobind;

// An XLA FFI host without XLA: the part of XLA_FFI_Api that our handlers use. Handlers reach it
// only through `call_frame->api`, never through a global, so we may define the two types that the C
// API leaves opaque.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  void* stream = nullptr;  // the framework's current CUDA stream
};

namespace qshard::host {
namespace {

// Returned when an error cannot be allocated.
XLA_FFI_Error no_memory{XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, "call: no memory is left"};

void Destroy(XLA_FFI_Error* error) {
  if (error != &no_memory) delete error;
}

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  try {
    return new XLA_FFI_Error{args->errc, args->message};
  } catch (const std::bad_alloc&) {
    return &no_memory;
  }
}
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { Destroy(args->error); }

XLA_FFI_Error* GetStream(XLA_FFI_Stream_Get_Args* args) {
  args->stream = args->ctx->stream;
  return nullptr;
}
XLA_FFI_Error* ScheduleTask(XLA_FFI_ThreadPool_Schedule_Args* args) {
  Schedule(args->task, args->data);
  return nullptr;
}
XLA_FFI_Error* GetNumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  *args->num_threads = NumThreads();
  return nullptr;
}

// The API functions that our handlers call. All others are null.
const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api a{};
    a.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    a.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
    a.XLA_FFI_Error_Create = CreateError;
    a.XLA_FFI_Error_Destroy = DestroyError;
    a.XLA_FFI_Stream_Get = GetStream;
    a.XLA_FFI_ThreadPool_Schedule = ScheduleTask;
    a.XLA_FFI_ThreadPool_NumThreads = GetNumThreads;
    return a;
  }();
  return &api;
}

// Makes the tensors' device current for a scope, as XLA does before it calls a handler.
class ScopedDevice {
 public:
  ScopedDevice(const ScopedDevice&) = delete;
#if defined(QSHARD_WITH_CUDA)
  explicit ScopedDevice(DLDevice device) {
    if (device.device_type != kDLCUDA) return;
    cudaError_t error = cudaGetDevice(&previous_);
    if (error == cudaSuccess && previous_ != device.device_id) {
      error = cudaSetDevice(device.device_id);
      changed_ = error == cudaSuccess;
    }
    if (error == cudaSuccess) return;
    (void)cudaGetLastError();  // the next CUDA call must not report this error
    error_ = cudaGetErrorString(error);
  }
  ~ScopedDevice() {
    if (changed_) cudaSetDevice(previous_);
  }
  const char* error() const { return error_; }  // null if the device is the current one

 private:
  const char* error_ = nullptr;
  int previous_ = 0;
  bool changed_ = false;
#else
  explicit ScopedDevice(DLDevice) {}
  const char* error() const { return nullptr; }
#endif
};

[[noreturn]] void Raise(const Failure& failure) {
  if (failure.code == XLA_FFI_Error_Code_INVALID_ARGUMENT)
    throw nb::value_error(failure.message.c_str());
  if (failure.code == XLA_FFI_Error_Code_RESOURCE_EXHAUSTED) {
    PyErr_SetString(PyExc_MemoryError, failure.message.c_str());
    nb::raise_python_error();
  }
  throw std::runtime_error(failure.message);
}

constexpr double kSmall = 1024;    // below: a call takes microseconds
constexpr double kShared = 16384;  // above: kernels may use several threads
PyObject* get_num_threads = nullptr;

XLA_FFI_Error* RunAll(XLA_FFI_ExecutionContext* context, const Step* steps, size_t count) {
  XLA_FFI_CallFrame frame;
  frame.extension_start = nullptr;
  frame.future = nullptr;
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  for (size_t i = 0; i < count; ++i) {
    frame.args = steps[i].args;
    frame.rets = steps[i].rets;
    frame.attrs = steps[i].attrs;
    if (XLA_FFI_Error* error = steps[i].handler(&frame)) return error;
  }
  return nullptr;
}

}  // namespace

void SharedProperties::Add(nb::handle object, const Tensor& tensor) {
  if (!any.is_valid()) device = tensor.device;
  any = object;
  if (tensor.device.device_type != device.device_type ||
      tensor.device.device_id != device.device_id)
    throw nb::value_error("call: the tensors are on different devices; move them to one");
  double all = 1;
  for (int64_t axis = 0; axis < tensor.buffer.rank; ++axis) all *= tensor.buffer.dims[axis];
  numbers += all;
}

void FollowThreadsOf(nb::callable framework) {
  Py_XDECREF(get_num_threads);
  get_num_threads = framework.release().ptr();
}

std::optional<Failure> RunOn(const DLDevice& device, void* stream, const Step* steps,
                             size_t count) {
  const ScopedDevice current(device);
  if (current.error() != nullptr)
    return Failure{XLA_FFI_Error_Code_INTERNAL,
                   "call: cuda:" + std::to_string(device.device_id) +
                       " cannot be made the current device: " + current.error()};
  XLA_FFI_ExecutionContext context{stream};
  XLA_FFI_Error* const error = RunAll(&context, steps, count);
  if (error == nullptr) return std::nullopt;
  const std::unique_ptr<XLA_FFI_Error, void (*)(XLA_FFI_Error*)> owned(error, Destroy);
  return Failure{error->code, error->message};
}

bool MayUseThreads(double numbers) { return numbers > kShared; }

void Run(const SharedProperties& shared, const Step* steps, size_t count) {
  const DLDevice device = shared.device;
  void* stream = nullptr;
  if (device.device_type == kDLCUDA) {
    const DLPackExchangeAPI* api = FrameworkOf(Py_TYPE(shared.any.ptr())).api;
    if (api == nullptr || api->current_work_stream == nullptr)
      throw nb::type_error("call: CUDA tensors of this framework do not give their stream");
    if (api->current_work_stream(device.device_type, device.device_id, &stream) != 0)
      nb::raise_python_error();
  } else if (MayUseThreads(shared.numbers) && get_num_threads != nullptr) {
    FollowNumThreads(nb::cast<int64_t>(nb::handle(get_num_threads)()));
  }
  std::optional<Failure> failure;
  if (device.device_type == kDLCPU && shared.numbers < kSmall) {
    failure = RunOn(device, stream, steps, count);  // releasing the GIL would take longer
  } else {
    nb::gil_scoped_release unlocked;
    failure = RunOn(device, stream, steps, count);
  }
  if (failure) Raise(*failure);
}

}  // namespace qshard::host
