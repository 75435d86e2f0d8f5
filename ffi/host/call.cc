#include "host/call.h"

#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "host/api.h"
#include "host/tensor.h"

#if defined(QSHARD_WITH_CUDA)
#include <cuda_runtime_api.h>
#endif

namespace nb = nanobind;

namespace qshard::host {
namespace {

constexpr size_t kFewBuffers = 16;  // what a call holds without allocating
constexpr size_t kMaxAttributes = 16;

// The attributes of one call in the form XLA gives them: sorted by name; bool, int64, float32,
// string, and arrays of int64.
class Attributes {
 public:
  explicit Attributes(nb::dict attributes) {
    if (attributes.size() > kMaxAttributes) throw nb::value_error("call: too many attributes");
    for (auto [key, value] : attributes) Add(key, value);
    std::array<size_t, kMaxAttributes> order;
    for (size_t i = 0; i < size_; ++i) order[i] = i;
    std::sort(order.begin(), order.begin() + size_,
              [&](size_t a, size_t b) { return View(entries_[a].name) < View(entries_[b].name); });
    for (size_t i = 0; i < size_; ++i) {
      Entry& entry = entries_[order[i]];
      types_[i] = entry.type;
      names_[i] = &entry.name;
      values_[i] = entry.type == XLA_FFI_AttrType_STRING  ? static_cast<void*>(&entry.string)
                   : entry.type == XLA_FFI_AttrType_ARRAY ? static_cast<void*>(&entry.array)
                                                          : static_cast<void*>(&entry.scalar);
    }
  }
  Attributes(const Attributes&) = delete;

  XLA_FFI_Attrs Get() {
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(size_),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  struct Entry {
    XLA_FFI_ByteSpan name;
    XLA_FFI_AttrType type;
    XLA_FFI_Scalar scalar;
    XLA_FFI_ByteSpan string;
    XLA_FFI_Array array;
    std::vector<int64_t> integers;
    union {
      bool b;
      int64_t i;
      float f;
    };
  };

  static std::string_view View(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

  static XLA_FFI_ByteSpan Utf8(nb::handle text) {
    Py_ssize_t length;
    const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
    if (data == nullptr) nb::raise_python_error();
    return {data, static_cast<size_t>(length)};
  }

  static int64_t Integer(nb::handle value) {
    const int64_t i = PyLong_AsLongLong(value.ptr());
    if (i == -1 && PyErr_Occurred()) nb::raise_python_error();
    return i;
  }

  void Add(nb::handle key, nb::handle value) {
    Entry& entry = entries_[size_++];
    entry.name = Utf8(key);
    entry.type = XLA_FFI_AttrType_SCALAR;
    if (PyBool_Check(value.ptr())) {
      entry.b = value.ptr() == Py_True;
      entry.scalar = {XLA_FFI_DataType_PRED, &entry.b};
    } else if (PyLong_Check(value.ptr())) {
      entry.i = Integer(value);
      entry.scalar = {XLA_FFI_DataType_S64, &entry.i};
    } else if (PyFloat_Check(value.ptr())) {
      entry.f = static_cast<float>(PyFloat_AS_DOUBLE(value.ptr()));
      entry.scalar = {XLA_FFI_DataType_F32, &entry.f};
    } else if (PyUnicode_Check(value.ptr())) {
      entry.type = XLA_FFI_AttrType_STRING;
      entry.string = Utf8(value);
    } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
      entry.type = XLA_FFI_AttrType_ARRAY;
      for (nb::handle item : nb::borrow<nb::sequence>(value))
        entry.integers.push_back(Integer(item));
      entry.array = {XLA_FFI_DataType_S64, entry.integers.size(), entry.integers.data()};
    } else {
      throw nb::type_error((std::string("call: attribute ") + std::string(View(entry.name)) + " (" +
                            nb::type_name(value.type()).c_str() +
                            ") is not bool, int, float, str or a tuple of int")
                               .c_str());
    }
  }

  std::array<Entry, kMaxAttributes> entries_;
  size_t size_ = 0;
  std::array<XLA_FFI_AttrType, kMaxAttributes> types_;
  std::array<XLA_FFI_ByteSpan*, kMaxAttributes> names_;
  std::array<void*, kMaxAttributes> values_;
};

// The inputs, or the outputs, of one call: a few, or as many as an op on lists of tensors takes.
template <class Type, Type kBuffer>
class Buffers {
 public:
  Buffers(nb::sequence objects, const char* role, bool writable)
      : objects_(objects), size_(nb::len(objects)) {
    if (size_ > kFewBuffers) {
      more_tensors_.reset(new Tensor[size_]);
      more_pointers_.reset(new void*[size_]);
      more_types_.assign(size_, kBuffer);
    }
    size_t i = 0;
    for (nb::handle object : objects) {
      if (i == size_) throw nb::value_error("call: a sequence of tensors grew while it was read");
      Import(object, role, i, writable, tensors()[i]);
      pointers()[i] = &tensors()[i].buffer;
      ++i;
    }
    size_ = i;
  }
  Buffers(const Buffers&) = delete;

  size_t size() const { return size_; }
  const Tensor& operator[](size_t i) const {
    return more_tensors_ ? more_tensors_[i] : few_tensors_[i];
  }
  nb::object object(size_t i) const { return objects_[i]; }
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

  nb::sequence objects_;
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

void Call(nb::capsule handler, nb::sequence inputs, nb::sequence outputs, nb::dict attributes) {
  Arguments args(inputs, "input", /*writable=*/false);
  Returns rets(outputs, "output", /*writable=*/true);
  Attributes attrs(attributes);
  const DLDevice device = CommonDevice(args, rets);

  XLA_FFI_ExecutionContext context;
  context.device_ordinal = device.device_id;
  if (device.device_type == kDLCUDA) {
    const DLPackExchangeAPI* api = ExchangeApi(Py_TYPE(rets.object(0).ptr()));
    if (api == nullptr || api->current_work_stream == nullptr)
      throw nb::type_error("call: CUDA tensors of this framework do not tell their stream");
    if (api->current_work_stream(device.device_type, device.device_id, &context.stream) != 0)
      nb::raise_python_error();
  }

  XLA_FFI_CallFrame frame{};
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
  {
    nb::gil_scoped_release unlocked;
    const ScopedDevice current(device);
    error = run(&frame);
  }
  if (error != nullptr) Raise(error);
}

}  // namespace qshard::host
