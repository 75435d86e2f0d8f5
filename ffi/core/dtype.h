// The dtypes of buffers: their names, as ml_dtypes has them, and their sizes.
#ifndef QSHARD_CORE_DTYPE_H_
#define QSHARD_CORE_DTYPE_H_

#include <cstdint>
#include <string_view>

#include "core/format.h"
#include "xla/ffi/api/c_api.h"

namespace qshard {

using DataType = XLA_FFI_DataType;

// For errors: says so of what no op takes.
std::string_view NameOf(DataType dtype);

// The dtypes that ops take, in the order in which errors list them; INVALID past the last.
DataType DataTypeAt(int i);

// INVALID for a name of none.
DataType DataTypeOf(std::string_view name);

// Bytes of one number, also its alignment. 0 for what no op takes.
constexpr int64_t SizeOf(DataType dtype) {
  switch (dtype) {
    case XLA_FFI_DataType_PRED:
    case XLA_FFI_DataType_S8:
    case XLA_FFI_DataType_U8:
    case XLA_FFI_DataType_F8E4M3FN:
    case XLA_FFI_DataType_F8E5M2:
    case XLA_FFI_DataType_F8E8M0FNU:
      return 1;
    case XLA_FFI_DataType_S16:
    case XLA_FFI_DataType_U16:
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
    case XLA_FFI_DataType_F32:
      return 4;
    case XLA_FFI_DataType_S64:
    case XLA_FFI_DataType_U64:
    case XLA_FFI_DataType_F64:
      return 8;
    default:
      return 0;
  }
}

// What holds numbers of a format: its own dtype, or bytes where the codes are not of 8 bits.
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

// A format as data: what the binder needs to know of it.
struct FormatTraits {
  std::string_view name;
  DataType dtype;
  int64_t codes_per_byte;
};

// Null for a name of none.
const FormatTraits* FindFormat(std::string_view name);

}  // namespace qshard

#endif  // QSHARD_CORE_DTYPE_H_
