// Attributes: a Python dict of attributes in the form that XLA FFI handlers read.
#ifndef QSHARD_HOST_ATTRIBUTES_H_
#define QSHARD_HOST_ATTRIBUTES_H_

#include <nanobind/nanobind.h>

#include <array>
#include <forward_list>
#include <string>
#include <string_view>
#include <vector>

#include "xla/ffi/api/c_api.h"

namespace qshard::host {

// Attributes of one call in XLA's C layout: bool, int64, float32, string and arrays of int64.
// Unlike XLA's, they are not sorted by name.
class Attributes {
  static constexpr size_t kMaxAttributes = 16;

 public:
  // Delegates, so that the destructor releases references if this constructor throws.
  explicit Attributes(nanobind::dict attributes) : Attributes() {
    for (auto [key, value] : attributes) Add(key, value);
    for (size_t i = 0; i < size_; ++i) {
      Entry& entry = entries_[i];
      types_[i] = entry.type;
      names_[i] = &entry.name;
      values_[i] = entry.type == XLA_FFI_AttrType_STRING  ? static_cast<void*>(&entry.string)
                   : entry.type == XLA_FFI_AttrType_ARRAY ? static_cast<void*>(&entry.array)
                                                          : static_cast<void*>(&entry.scalar);
    }
  }
  Attributes(const Attributes&) = delete;
  ~Attributes() {
    for (size_t i = 0; i < size_; ++i) {
      Py_DECREF(entries_[i].key);
      Py_DECREF(entries_[i].given);
    }
  }

  XLA_FFI_Attrs Get() {
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(size_),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  Attributes() {}  // `= default` would zero all members first

  struct Entry {
    PyObject *key, *given;  // owned references: their text is not copied
    XLA_FFI_ByteSpan name;
    XLA_FFI_AttrType type;
    XLA_FFI_Scalar scalar;
    XLA_FFI_ByteSpan string;
    XLA_FFI_Array array;
    union {
      bool b;
      int64_t i;
      float f;
    };
  };

  static std::string_view View(const XLA_FFI_ByteSpan& span) { return {span.ptr, span.len}; }

  static XLA_FFI_ByteSpan Utf8(nanobind::handle text) {
    Py_ssize_t length;
    const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
    if (data == nullptr) nanobind::raise_python_error();
    return {data, static_cast<size_t>(length)};
  }

  static int64_t Integer(nanobind::handle value) {
    const int64_t i = PyLong_AsLongLong(value.ptr());
    if (i == -1 && PyErr_Occurred()) nanobind::raise_python_error();
    return i;
  }

  void Add(nanobind::handle key, nanobind::handle value) {
    // Take references first: converting a value to int may run code that changes the dict.
    if (size_ == kMaxAttributes) throw nanobind::value_error("call: too many attributes");
    Entry& entry = entries_[size_++];
    entry.key = key.inc_ref().ptr();
    entry.given = value.inc_ref().ptr();
    entry.name = Utf8(key);
    entry.type = XLA_FFI_AttrType_SCALAR;
    if (PyBool_Check(value.ptr())) {
      entry.b = value.ptr() == Py_True;
      entry.scalar = {XLA_FFI_DataType_PRED, &entry.b};
    } else if (PyLong_Check(value.ptr())) {
      entry.i = Integer(value);
      entry.scalar = {XLA_FFI_DataType_S64, &entry.i};
    } else if (PyFloat_Check(value.ptr())) {
      entry.f = static_cast<float>(PyFloat_AsDouble(value.ptr()));
      entry.scalar = {XLA_FFI_DataType_F32, &entry.f};
    } else if (PyUnicode_Check(value.ptr())) {
      entry.type = XLA_FFI_AttrType_STRING;
      entry.string = Utf8(value);
    } else if (PyTuple_Check(value.ptr()) || PyList_Check(value.ptr())) {
      entry.type = XLA_FFI_AttrType_ARRAY;
      auto& integers = arrays_.emplace_front();
      for (nanobind::handle item : nanobind::borrow<nanobind::sequence>(value))
        integers.push_back(Integer(item));
      entry.array = {XLA_FFI_DataType_S64, integers.size(), integers.data()};
    } else {
      throw nanobind::type_error((std::string("call: attribute ") + std::string(View(entry.name)) +
                                  " (" + nanobind::type_name(value.type()).c_str() +
                                  ") is not bool, int, float, str or a tuple of int")
                                     .c_str());
    }
  }

  std::array<Entry, kMaxAttributes> entries_;
  std::forward_list<std::vector<int64_t>> arrays_;
  size_t size_ = 0;
  std::array<XLA_FFI_AttrType, kMaxAttributes> types_;
  std::array<XLA_FFI_ByteSpan*, kMaxAttributes> names_;
  std::array<void*, kMaxAttributes> values_;
};

}  // namespace qshard::host

#endif  // QSHARD_HOST_ATTRIBUTES_H_
