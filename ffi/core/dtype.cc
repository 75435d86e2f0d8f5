#include "core/dtype.h"

#include <iterator>

namespace qshard {
namespace {

struct Entry {
  DataType dtype;
  std::string_view name;
};
constexpr Entry kTypes[] = {
    {XLA_FFI_DataType_F32, "float32"},
    {XLA_FFI_DataType_U8, "uint8"},
    {XLA_FFI_DataType_BF16, "bfloat16"},
    {XLA_FFI_DataType_F16, "float16"},
    {XLA_FFI_DataType_F8E4M3FN, "float8_e4m3fn"},
    {XLA_FFI_DataType_F8E5M2, "float8_e5m2"},
    {XLA_FFI_DataType_F8E8M0FNU, "float8_e8m0fnu"},
    {XLA_FFI_DataType_S32, "int32"},
    {XLA_FFI_DataType_U32, "uint32"},
    {XLA_FFI_DataType_S8, "int8"},
    {XLA_FFI_DataType_S16, "int16"},
    {XLA_FFI_DataType_U16, "uint16"},
    {XLA_FFI_DataType_F64, "float64"},
    {XLA_FFI_DataType_S64, "int64"},
    {XLA_FFI_DataType_U64, "uint64"},
    {XLA_FFI_DataType_PRED, "bool"},
};

#define QSHARD_TRAITS(per_byte, F) {F::kName, kDataTypeOf<F>, per_byte<F>},
constexpr FormatTraits kFormats[] = {QSHARD_FOR_EACH_CODE(QSHARD_TRAITS, kCodesPerByte)};
#undef QSHARD_TRAITS

const Entry* Find(DataType dtype) {
  for (const Entry& e : kTypes)
    if (e.dtype == dtype) return &e;
  return nullptr;
}

}  // namespace

std::string_view NameOf(DataType dtype) {
  const Entry* e = Find(dtype);
  return e == nullptr ? std::string_view("a dtype that no op takes") : e->name;
}

DataType DataTypeAt(int i) {
  return i < static_cast<int>(std::size(kTypes)) ? kTypes[i].dtype : XLA_FFI_DataType_INVALID;
}

DataType DataTypeOf(std::string_view name) {
  for (const Entry& e : kTypes)
    if (e.name == name) return e.dtype;
  return XLA_FFI_DataType_INVALID;
}

const FormatTraits* FindFormat(std::string_view name) {
  for (const FormatTraits& f : kFormats)
    if (f.name == name) return &f;
  return nullptr;
}

}  // namespace qshard
