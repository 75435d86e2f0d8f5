#include "host/tensor.h"

#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <string>
#include <string_view>

#include "schema/dtype.h"

namespace nb = nanobind;

namespace qshard::host {
namespace {

struct Entry {
  uint8_t code, bits;
  XLA_FFI_DataType dtype;
};
// Most frequent dtypes first.
constexpr Entry kDtypes[] = {
    {kDLFloat, 32, XLA_FFI_DataType_F32},
    {kDLUInt, 8, XLA_FFI_DataType_U8},
    {kDLBfloat, 16, XLA_FFI_DataType_BF16},
    {kDLFloat, 16, XLA_FFI_DataType_F16},
    {kDLInt, 32, XLA_FFI_DataType_S32},
    {kDLUInt, 32, XLA_FFI_DataType_U32},
    {kDLFloat8_e4m3fn, 8, XLA_FFI_DataType_F8E4M3FN},
    {kDLFloat8_e5m2, 8, XLA_FFI_DataType_F8E5M2},
    {kDLFloat8_e8m0fnu, 8, XLA_FFI_DataType_F8E8M0FNU},
    {kDLInt, 8, XLA_FFI_DataType_S8},
    {kDLInt, 16, XLA_FFI_DataType_S16},
    {kDLUInt, 16, XLA_FFI_DataType_U16},
    {kDLInt, 64, XLA_FFI_DataType_S64},
    {kDLUInt, 64, XLA_FFI_DataType_U64},
    {kDLFloat, 64, XLA_FFI_DataType_F64},
    {kDLBool, 8, XLA_FFI_DataType_PRED},
};

XLA_FFI_DataType ToXla(DLDataType t) {
  // torch's float4_e2m1fn_x2 is one byte with two codes.
  if (t.code == kDLFloat4_e2m1fn && t.lanes == 2) return XLA_FFI_DataType_U8;
  for (const Entry& e : kDtypes)
    if (e.code == t.code && e.bits == t.bits && t.lanes == 1) return e.dtype;
  return XLA_FFI_DataType_INVALID;
}

std::string Name(nb::handle object, const Access& access, size_t index) {
  return std::string("call: ") + access.role + " " + std::to_string(index) + " (" +
         nb::type_name(object.type()).c_str() + ")";
}

bool IsContiguous(const DLTensor& t) {
  if (t.strides == nullptr) return true;
  // An empty tensor may have any strides: numpy gives 0, and so does torch on numpy's memory.
  if (std::find(t.shape, t.shape + t.ndim, 0) != t.shape + t.ndim) return true;
  int64_t expected = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.strides[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

void Fill(const DLTensor& t, nb::handle object, const Access& access, size_t index,
          Tensor& tensor) {
  const XLA_FFI_DataType dtype = ToXla(t.dtype);
  if (dtype == XLA_FFI_DataType_INVALID)
    throw nb::type_error((Name(object, access, index) +
                          " has a dtype that no kernel takes; view packed or 4-bit data as uint8")
                             .c_str());
  if (!IsContiguous(t))
    throw nb::value_error(
        (Name(object, access, index) + " is strided; call .contiguous() on it").c_str());
  bool empty = false;
  for (int i = 0; i < t.ndim; ++i) empty |= t.shape[i] == 0;
  if (t.data == nullptr && !empty)
    throw nb::value_error(
        (Name(object, access, index) +
         " has no memory (fake, meta or wrapper tensor); pass the plain tensor inside it")
            .c_str());
  tensor.buffer = {XLA_FFI_Buffer_STRUCT_SIZE,
                   nullptr,
                   dtype,
                   static_cast<char*>(t.data) + t.byte_offset,
                   t.ndim,
                   t.shape};
  tensor.device = t.device;
}

// Imports through nanobind: numpy arrays and any object with __dlpack__. Returns the owner, which
// must outlive the buffer.
template <class... Options>
nb::object ImportSlow(nb::handle object, const Access& access, size_t index, Tensor& tensor) {
  using Array = nb::ndarray<Options...>;
  auto owner = std::make_unique<Array>(nb::cast<Array>(object, /*convert=*/false));
  Array& array = *owner;
  const DLTensor t{const_cast<void*>(static_cast<const void*>(array.data())),
                   {static_cast<DLDeviceType>(array.device_type()), array.device_id()},
                   static_cast<int32_t>(array.ndim()),
                   {array.dtype().code, array.dtype().bits, array.dtype().lanes},
                   const_cast<int64_t*>(array.shape_ptr()),
                   const_cast<int64_t*>(array.stride_ptr()),
                   /*byte_offset=*/0};
  Fill(t, object, access, index, tensor);
  return nb::capsule(owner.release(), [](void* p) noexcept { delete static_cast<Array*>(p); });
}

// Returns a method of `type` that is written in C, or null. The type owns it.
PyObject* MethodOf(PyTypeObject* type, const char* name) {
  const nb::object method =
      nb::getattr(nb::handle(reinterpret_cast<PyObject*>(type)), name, nb::none());
  return PyObject_TypeCheck(method.ptr(), &PyMethodDescr_Type) ? method.ptr() : nullptr;
}

void CheckNotNegated(PyObject* is_neg, nb::handle object, const Access& access, size_t index) {
  PyObject* const self = object.ptr();
  const nb::object negated = nb::steal(PyObject_Vectorcall(is_neg, &self, 1, nullptr));
  if (!negated.is_valid()) nb::raise_python_error();
  if (negated.ptr() == Py_True)
    throw nb::value_error(
        (Name(object, access, index) +
         " is a negated view, whose memory has the opposite signs; call .resolve_neg() on it")
            .c_str());
}

// Returns true if the module of the object's type starts with `package`.
bool IsOf(const char* package, nb::handle object) {
  const nb::object module = nb::getattr(object.type(), "__module__", nb::none());
  return nb::isinstance<nb::str>(module) &&
         std::string_view(nb::borrow<nb::str>(module).c_str()).rfind(package, 0) == 0;
}

// Returns the dtype of a numpy array that numpy cannot export, such as ml_dtypes', by name. INVALID
// for anything else.
DataType UnknownToNumpy(nb::handle object) {
  if (!IsOf("numpy", object)) return XLA_FFI_DataType_INVALID;
  const nb::object given = object.attr("dtype");
  const DataType dtype = DataTypeOf(nb::str(given.attr("name")).c_str());
  const bool known = SizeOf(dtype) <= 2 && nb::bool_(given.attr("isnative"));
  return known ? dtype : XLA_FFI_DataType_INVALID;
}

}  // namespace

Framework FrameworkOf(PyTypeObject* type) {
  // Called under the GIL. Caches a few types, and keeps them alive so that no new type reuses their
  // address.
  struct Known {
    PyTypeObject* type;
    Framework framework;
  };
  constexpr size_t kMany = 16;
  static Known known[kMany];
  static size_t count = 0;
  for (size_t i = 0; i < count; ++i)
    if (known[i].type == type) return known[i].framework;
  Framework framework{nullptr, MethodOf(type, "is_neg")};
  PyObject* capsule =
      PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
  if (capsule != nullptr) {
    auto* offered =
        static_cast<const DLPackExchangeAPI*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (offered != nullptr && offered->header.version.major == DLPACK_MAJOR_VERSION)
      framework.api = offered;
  }
  PyErr_Clear();
  if (count < kMany) {
    Py_INCREF(reinterpret_cast<PyObject*>(type));
    known[count++] = {type, framework};
  }
  return framework;
}

nb::object Import(nb::handle object, const Access& access, size_t index, Tensor& tensor) {
  const Framework framework = FrameworkOf(Py_TYPE(object.ptr()));
  if (framework.api != nullptr) {
    DLTensor t;
    if (framework.api->dltensor_from_py_object_no_sync(object.ptr(), &t) != 0)
      nb::raise_python_error();
    Fill(t, object, access, index, tensor);
    if (access.refuse_negated && t.dtype.code == kDLFloat && framework.is_neg != nullptr)
      CheckNotNegated(framework.is_neg, object, access, index);
    return {};
  }
  // JAX arrays are immutable and may share memory.
  if (access.writable && IsOf("jax", object))
    throw nb::type_error((Name(object, access, index) +
                          " is a JAX array, which cannot be written; call the op in qshard.jax.ops")
                             .c_str());
  const auto import = [&](nb::handle array) {
    return access.writable ? ImportSlow<>(array, access, index, tensor)
                           : ImportSlow<nb::ro>(array, access, index, tensor);
  };
  try {
    return import(object);
  } catch (const nb::cast_error&) {
  }
  const DataType dtype = UnknownToNumpy(object);
  try {
    if (dtype != XLA_FFI_DataType_INVALID) {
      nb::object owner = import(object.attr("view")(SizeOf(dtype) == 1 ? "uint8" : "uint16"));
      tensor.buffer.dtype = dtype;
      return owner;
    }
  } catch (const nb::cast_error&) {
  }
  throw nb::type_error(
      (Name(object, access, index) + " is not an array that DLPack can share").c_str());
}

}  // namespace qshard::host
