// Dtypes of buffers, with their ml_dtypes names and sizes.
#ifndef QSHARD_SCHEMA_DTYPE_H_
#define QSHARD_SCHEMA_DTYPE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "core/format.h"
#include "xla/ffi/api/c_api.h"

namespace qshard {

using DataType = XLA_FFI_DataType;

struct DataTypeTraits {
  DataType dtype;
  std::string_view name;
  int64_t size;  // bytes per element, and its alignment
};

// Dtypes that ops take, most frequent first. Errors list them in this order.
inline constexpr DataTypeTraits kDataTypes[] = {
    {XLA_FFI_DataType_F32, "float32", 4},
    {XLA_FFI_DataType_U8, "uint8", 1},
    {XLA_FFI_DataType_BF16, "bfloat16", 2},
    {XLA_FFI_DataType_F16, "float16", 2},
    {XLA_FFI_DataType_F8E4M3FN, "float8_e4m3fn", 1},
    {XLA_FFI_DataType_F8E5M2, "float8_e5m2", 1},
    {XLA_FFI_DataType_F8E8M0FNU, "float8_e8m0fnu", 1},
    {XLA_FFI_DataType_S32, "int32", 4},
    {XLA_FFI_DataType_U32, "uint32", 4},
    {XLA_FFI_DataType_S8, "int8", 1},
    {XLA_FFI_DataType_S16, "int16", 2},
    {XLA_FFI_DataType_U16, "uint16", 2},
    {XLA_FFI_DataType_F64, "float64", 8},
    {XLA_FFI_DataType_S64, "int64", 8},
    {XLA_FFI_DataType_U64, "uint64", 8},
    {XLA_FFI_DataType_PRED, "bool", 1},
};

// Returns the name of a dtype for errors.
constexpr std::string_view NameOf(DataType dtype) {
  for (const DataTypeTraits& t : kDataTypes)
    if (t.dtype == dtype) return t.name;
  return "a dtype that no op takes";
}

inline constexpr auto kSizes = [] {
  std::array<int8_t, 64> sizes{};
  for (const DataTypeTraits& t : kDataTypes) sizes[t.dtype] = static_cast<int8_t>(t.size);
  return sizes;
}();

// Returns bytes per element, or 0 for a dtype that no op takes. A table lookup, because every call
// needs it.
constexpr int64_t SizeOf(DataType dtype) {
  const auto i = static_cast<size_t>(dtype);
  return i < kSizes.size() ? kSizes[i] : 0;
}

// Returns the dtype with this name, or INVALID.
constexpr DataType DataTypeOf(std::string_view name) {
  for (const DataTypeTraits& t : kDataTypes)
    if (t.name == name) return t.dtype;
  return XLA_FFI_DataType_INVALID;
}

// Dtype that stores a format: its own, or uint8 for codes below 8 bits.
template <class F>
constexpr DataType kDataTypeOf = XLA_FFI_DataType_U8;
template <>
inline constexpr DataType kDataTypeOf<float> = XLA_FFI_DataType_F32;
template <>
inline constexpr DataType kDataTypeOf<bfloat16> = XLA_FFI_DataType_BF16;
template <>
inline constexpr DataType kDataTypeOf<float16> = XLA_FFI_DataType_F16;
template <>
inline constexpr DataType kDataTypeOf<E4M3> = XLA_FFI_DataType_F8E4M3FN;
template <>
inline constexpr DataType kDataTypeOf<E5M2> = XLA_FFI_DataType_F8E5M2;
template <>
inline constexpr DataType kDataTypeOf<E8M0> = XLA_FFI_DataType_F8E8M0FNU;

// Properties of a format that the binder needs.
struct FormatTraits {
  std::string_view name;
  DataType dtype;
  int64_t codes_per_byte;
};

inline constexpr FormatTraits kFormats[] = {
#define QSHARD_TRAITS(per_byte, F) {F::kName, kDataTypeOf<F>, per_byte<F>},
    QSHARD_FOR_EACH_CODE(QSHARD_TRAITS, kCodesPerByte)
#undef QSHARD_TRAITS
};

// Returns the format with this name, or null.
constexpr const FormatTraits* FindFormat(std::string_view name) {
  for (const FormatTraits& format : kFormats)
    if (format.name == name) return &format;
  return nullptr;
}

}  // namespace qshard

#endif  // QSHARD_SCHEMA_DTYPE_H_
