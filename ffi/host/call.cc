#include "host/call.h"

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "host/api.h"
#include "host/attributes.h"
#include "host/tensor.h"

#if defined(QSHARD_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace nb = nanobind;

namespace qshard::host {
namespace {

constexpr size_t kFewBuffers = 16;  // what a call holds without allocating

// The inputs, or the outputs, of one call: a few, or as many as an op on lists of tensors takes.
template <class Type, Type kBuffer>
class Buffers {
 public:
  // The tensors are held for the call, whatever another thread does to the list of them.
  Buffers(nb::sequence objects, const Use& use)
      : objects_(nb::steal<nb::tuple>(PySequence_Tuple(objects.ptr()))), size_(nb::len(objects_)) {
    if (size_ > kFewBuffers) {
      more_tensors_.reset(new Tensor[size_]);
      more_pointers_.reset(new void*[size_]);
      more_types_.assign(size_, kBuffer);
    }
    for (size_t i = 0; i < size_; ++i) {
      nb::object made = Import(PyTuple_GET_ITEM(objects_.ptr(), i), use, i, tensors()[i]);
      if (made.is_valid()) made_.push_back(std::move(made));
      pointers()[i] = &tensors()[i].buffer;
    }
  }
  Buffers(const Buffers&) = delete;

  size_t size() const { return size_; }
  const Tensor& operator[](size_t i) const {
    return more_tensors_ ? more_tensors_[i] : few_tensors_[i];
  }
  nb::object object(size_t i) const { return objects_[i]; }
  // Whether handling these is the work of microseconds.
  bool AreFew() const {
    double numbers = 0;
    for (size_t i = 0; i < size_; ++i) {
      const XLA_FFI_Buffer& buffer = (*this)[i].buffer;
      double count = 1;
      for (int64_t axis = 0; axis < buffer.rank; ++axis) count *= buffer.dims[axis];
      numbers += count;
    }
    return numbers < 1024;
  }
  void** pointers() { return more_pointers_ ? more_pointers_.get() : few_pointers_.data(); }
  Type* types() {
    static constexpr auto kFew = [] {
      std::array<Type, kFewBuffers> types{};
      for (auto& t : types) t = kBuffer;
      return types;
    }();
    return more_types_.empty() ? const_cast<Type*>(kFew.data()) : more_types_.data();
  }

 private:
  Tensor* tensors() { return more_tensors_ ? more_tensors_.get() : few_tensors_.data(); }

  nb::tuple objects_;
  std::vector<nb::object> made_;  // held likewise
  size_t size_;
  std::array<Tensor, kFewBuffers> few_tensors_;
  std::array<void*, kFewBuffers> few_pointers_;
  std::unique_ptr<Tensor[]> more_tensors_;
  std::unique_ptr<void*[]> more_pointers_;
  std::vector<Type> more_types_;
};

using Arguments = Buffers<XLA_FFI_ArgType, XLA_FFI_ArgType_BUFFER>;
using Returns = Buffers<XLA_FFI_RetType, XLA_FFI_RetType_BUFFER>;

bool SameDevice(DLDevice a, DLDevice b) {
  return a.device_type == b.device_type && a.device_id == b.device_id;
}

// Raises if the tensors are not all on one device; returns that device.
DLDevice CommonDevice(const Arguments& inputs, const Returns& outputs) {
  if (outputs.size() == 0) throw nb::value_error("call: no output to write to");
  const DLDevice device = outputs[0].device;
  const auto check = [&](const auto& buffers) {
    for (size_t i = 0; i < buffers.size(); ++i)
      if (!SameDevice(buffers[i].device, device))
        throw nb::value_error("call: the tensors are on different devices; move them to one");
  };
  check(inputs);
  check(outputs);
  return device;
}

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
  const std::string message = std::move(error->message);
  const XLA_FFI_Error_Code code = error->code;
  delete error;
  switch (code) {
    case XLA_FFI_Error_Code_INVALID_ARGUMENT:
      throw nb::value_error(message.c_str());
    case XLA_FFI_Error_Code_UNIMPLEMENTED:
      PyErr_SetString(PyExc_NotImplementedError, message.c_str());
      nb::raise_python_error();
    default:
      throw std::runtime_error(message);
  }
}

}  // namespace

void Call(nb::capsule handler, nb::sequence inputs, nb::sequence outputs, nb::dict attributes,
          bool refuse_negated) {
  Arguments args(inputs, {"input", /*writable=*/false, refuse_negated});
  Returns rets(outputs, {"output", /*writable=*/true, refuse_negated});
  Attributes attrs(attributes);
  const DLDevice device = CommonDevice(args, rets);

  XLA_FFI_ExecutionContext context;
  context.device_ordinal = device.device_id;
  if (device.device_type == kDLCUDA) {
    const DLPackExchangeAPI* api = FrameworkOf(Py_TYPE(rets.object(0).ptr())).api;
    if (api == nullptr || api->current_work_stream == nullptr)
      throw nb::type_error("call: CUDA tensors of this framework do not tell their stream");
    if (api->current_work_stream(device.device_type, device.device_id, &context.stream) != 0)
      nb::raise_python_error();
  }

  XLA_FFI_CallFrame frame;
  frame.extension_start = nullptr;
  frame.future = nullptr;
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = &context;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), args.types(),
                args.pointers()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()), rets.types(),
                rets.pointers()};
  frame.attrs = attrs.Get();

  auto* run = reinterpret_cast<XLA_FFI_Handler*>(handler.data(kHandlerCapsule));
  XLA_FFI_Error* error;
  if (device.device_type == kDLCPU && args.AreFew() && rets.AreFew()) {
    error = run(&frame);  // To let go of the lock would take longer than the call.
  } else {
    nb::gil_scoped_release unlocked;
    const ScopedDevice current(device);
    error = run(&frame);
  }
  if (error != nullptr) Raise(error);
}

}  // namespace qshard::host
