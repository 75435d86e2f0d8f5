#include "host/call.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "host/attributes.h"
#include "host/tensor.h"
#include "host/thread_pool.h"

#if defined(QSHARD_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace nb = nanobind;

// An XLA FFI host without XLA: just enough of XLA_FFI_Api to run a handler of ours. It touches only
// `call_frame->api`, never a global, so the two types that the C API leaves opaque are ours to
// define.
struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

struct XLA_FFI_ExecutionContext {
  void* stream = nullptr;  // the framework's current CUDA stream
};

namespace qshard::host {
namespace {

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  return new XLA_FFI_Error{args->errc, args->message};
}
void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

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

// What handlers of ours call, and nothing else.
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

// An array that does not allocate while it is short.
template <class T>
class Short {
 public:
  explicit Short(size_t size) : more_(size > kShort ? new T[size] : nullptr) {}
  T* data() { return more_ ? more_.get() : few_.data(); }
  T& operator[](size_t i) { return data()[i]; }

 private:
  static constexpr size_t kShort = 16;
  std::array<T, kShort> few_;
  std::unique_ptr<T[]> more_;
};

// What the tensors of a call have in common.
struct Common {
  DLDevice device{kDLCPU, 0};
  nb::handle any;      // one of them
  double numbers = 0;  // in all
};

// The inputs, or the outputs, of one call. `Type` is the C API's enum that says that they are
// buffers.
template <class Type>
struct Side {
  // The tensors are held for the call, whatever another thread does to the list of them.
  Side(nb::sequence given, const Use& use, Type buffer, Common* common)
      : objects(nb::steal<nb::tuple>(PySequence_Tuple(given.ptr()))),
        size(nb::len(objects)),
        tensors(size),
        pointers(size),
        types(size) {
    for (size_t i = 0; i < size; ++i) {
      const nb::handle object = PyTuple_GET_ITEM(objects.ptr(), i);
      Tensor& t = tensors[i];
      nb::object owner = Import(object, use, i, t);
      if (owner.is_valid()) owners.push_back(std::move(owner));
      if (!common->any.is_valid()) common->device = t.device;
      common->any = object;
      if (t.device.device_type != common->device.device_type ||
          t.device.device_id != common->device.device_id)
        throw nb::value_error("call: the tensors are on different devices; move them to one");
      double numbers = 1;
      for (int64_t axis = 0; axis < t.buffer.rank; ++axis) numbers *= t.buffer.dims[axis];
      common->numbers += numbers;
      pointers[i] = &t.buffer;
      types[i] = buffer;
    }
  }
  Side(const Side&) = delete;

  nb::tuple objects;
  std::vector<nb::object> owners;  // held likewise
  size_t size;
  Short<Tensor> tensors;
  Short<void*> pointers;
  Short<Type> types;
};

// Makes the device of the tensors the current one, as XLA does before it calls a handler.
class ScopedDevice {
 public:
  ScopedDevice(const ScopedDevice&) = delete;
#if defined(QSHARD_WITH_CUDA)
  explicit ScopedDevice(DLDevice device) {
    if (device.device_type != kDLCUDA || cudaGetDevice(&previous_) != cudaSuccess) return;
    changed_ = previous_ != device.device_id && cudaSetDevice(device.device_id) == cudaSuccess;
  }
  ~ScopedDevice() {
    if (changed_) cudaSetDevice(previous_);
  }

 private:
  int previous_ = 0;
  bool changed_ = false;
#else
  explicit ScopedDevice(DLDevice) {}
#endif
};

[[noreturn]] void Raise(XLA_FFI_Error* error) {
  const std::unique_ptr<XLA_FFI_Error> owned(error);
  if (error->code == XLA_FFI_Error_Code_INVALID_ARGUMENT)
    throw nb::value_error(error->message.c_str());
  throw std::runtime_error(error->message);
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
               "%U: device (cuda:%d) is not one that this build of qshard has kernels for; "
               "build it where nvcc is found, or move the tensors to the CPU",
               op.ptr(), device.device_id);
  nb::raise_python_error();
}

constexpr double kSmall = 1024;    // numbers whose handling is the work of microseconds
constexpr double kShared = 16384;  // what more than one thread may share
PyObject* get_num_threads = nullptr;

}  // namespace

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

void FollowThreadsOf(nb::callable framework) {
  Py_XDECREF(get_num_threads);
  get_num_threads = framework.release().ptr();
}

void Call(nb::str op, nb::sequence inputs, nb::sequence outputs, nb::dict attributes,
          bool refuse_negated) {
  Common common;
  Side<XLA_FFI_ArgType> args(inputs, {"input", /*writable=*/false, refuse_negated},
                             XLA_FFI_ArgType_BUFFER, &common);
  Side<XLA_FFI_RetType> rets(outputs, {"output", /*writable=*/true, refuse_negated},
                             XLA_FFI_RetType_BUFFER, &common);
  Attributes attrs(attributes);
  const DLDevice device = common.device;
  auto* run = HandlerOf(op, device);

  XLA_FFI_ExecutionContext context;
  if (device.device_type == kDLCUDA) {
    const DLPackExchangeAPI* api = FrameworkOf(Py_TYPE(common.any.ptr())).api;
    if (api == nullptr || api->current_work_stream == nullptr)
      throw nb::type_error("call: CUDA tensors of this framework do not tell their stream");
    if (api->current_work_stream(device.device_type, device.device_id, &context.stream) != 0)
      nb::raise_python_error();
  } else if (common.numbers > kShared && get_num_threads != nullptr) {
    FollowNumThreads(nb::cast<int64_t>(nb::handle(get_num_threads)()));
  }

  XLA_FFI_CallFrame frame;
  frame.extension_start = nullptr;
  frame.future = nullptr;
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size),
                args.types.data(), args.pointers.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size),
                rets.types.data(), rets.pointers.data()};
  frame.attrs = attrs.Get();

  XLA_FFI_Error* error;
  if (device.device_type == kDLCPU && common.numbers < kSmall) {
    error = run(&frame);  // To let go of the lock would take longer than the call.
  } else {
    nb::gil_scoped_release unlocked;
    const ScopedDevice current(device);
    error = run(&frame);
  }
  if (error != nullptr) Raise(error);
}

}  // namespace qshard::host
