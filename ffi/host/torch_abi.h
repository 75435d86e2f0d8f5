// C functions of PyTorch's stable ABI, found at run time, so that building needs no PyTorch.
#ifndef QSHARD_HOST_TORCH_ABI_H_
#define QSHARD_HOST_TORCH_ABI_H_

#include <cstddef>
#include <cstdint>

namespace qshard::host {

// Opaque types of torch/csrc/inductor/aoti_torch/c/shim.h and torch/csrc/stable/c/shim.h.
struct TorchTensor;
struct TorchLibrary;
struct TorchString;
struct TorchList;

// An argument or result of an op: an int64, double, bool, dtype number, or owning pointer to a
// tensor, string or list, in the lowest bytes. A list does not own its items.
using TorchValue = uint64_t;

// A kernel reads its arguments from `stack`, in the order of the schema, and replaces them by its
// results. It owns the arguments.
using TorchKernel = void (*)(TorchValue* stack, uint64_t arguments, uint64_t results);

using TorchStatus = int32_t;  // 0: success

// Version of the ABI that the declarations below follow, from PyTorch 2.11.
inline constexpr uint64_t kTorchAbi = uint64_t{2} << 56 | uint64_t{11} << 48;

// name, result, parameters
#define QSHARD_FOR_EACH_TORCH_FUNCTION(F)                                                        \
  F(aoti_torch_library_init_impl, TorchStatus, const char* space, const char* key,               \
    const char* file, uint32_t line, TorchLibrary** library)                                     \
  F(torch_library_impl, TorchStatus, TorchLibrary* library, const char* op, TorchKernel kernel,  \
    uint64_t abi)                                                                                \
  F(torch_call_dispatcher, TorchStatus, const char* op, const char* overload, TorchValue* stack, \
    uint64_t abi)                                                                                \
  F(aoti_torch_grad_mode_is_enabled, bool)                                                       \
  F(aoti_torch_new_tensor_handle, TorchStatus, TorchTensor* tensor, TorchTensor** same)          \
  F(aoti_torch_is_defined, TorchStatus, TorchTensor* tensor, bool* defined)                      \
  F(aoti_torch_get_dim, TorchStatus, TorchTensor* tensor, int64_t* rank)                         \
  F(aoti_torch_get_sizes, TorchStatus, TorchTensor* tensor, int64_t** sizes)                     \
  F(aoti_torch_get_strides, TorchStatus, TorchTensor* tensor, int64_t** strides)                 \
  F(aoti_torch_get_dtype, TorchStatus, TorchTensor* tensor, int32_t* dtype)                      \
  F(aoti_torch_get_device_type, TorchStatus, TorchTensor* tensor, int32_t* type)                 \
  F(aoti_torch_get_device_index, TorchStatus, TorchTensor* tensor, int32_t* index)               \
  F(aoti_torch_get_data_ptr, TorchStatus, TorchTensor* tensor, void** data)                      \
  F(aoti_torch_empty_strided, TorchStatus, int64_t rank, const int64_t* sizes,                   \
    const int64_t* strides, int32_t dtype, int32_t device_type, int32_t device_index,            \
    TorchTensor** tensor)                                                                        \
  F(aoti_torch_delete_tensor_object, TorchStatus, TorchTensor* tensor)                           \
  F(torch_string_length, TorchStatus, TorchString* text, size_t* length)                         \
  F(torch_string_c_str, TorchStatus, TorchString* text, const char** data)                       \
  F(torch_delete_string, TorchStatus, TorchString* text)                                         \
  F(torch_new_list_reserve_size, TorchStatus, size_t size, TorchList** list)                     \
  F(torch_list_size, TorchStatus, TorchList* list, size_t* size)                                 \
  F(torch_list_get_item, TorchStatus, TorchList* list, size_t i, TorchValue* item)               \
  F(torch_list_push_back, TorchStatus, TorchList* list, TorchValue item)                         \
  F(torch_delete_list, TorchStatus, TorchList* list)                                             \
  F(torch_get_num_threads, TorchStatus, uint32_t* count)                                         \
  F(aoti_torch_device_type_cpu, int32_t)                                                         \
  F(aoti_torch_device_type_cuda, int32_t)                                                        \
  F(aoti_torch_dtype_float32, int32_t)                                                           \
  F(aoti_torch_dtype_uint8, int32_t)                                                             \
  F(aoti_torch_dtype_bfloat16, int32_t)                                                          \
  F(aoti_torch_dtype_float16, int32_t)                                                           \
  F(aoti_torch_dtype_int32, int32_t)                                                             \
  F(aoti_torch_dtype_uint32, int32_t)                                                            \
  F(aoti_torch_dtype_float8_e4m3fn, int32_t)                                                     \
  F(aoti_torch_dtype_float8_e5m2, int32_t)                                                       \
  F(torch_dtype_float8_e8m0fnu, int32_t)                                                         \
  F(torch_dtype_float4_e2m1fn_x2, int32_t)                                                       \
  F(aoti_torch_dtype_int8, int32_t)                                                              \
  F(aoti_torch_dtype_int16, int32_t)                                                             \
  F(aoti_torch_dtype_uint16, int32_t)                                                            \
  F(aoti_torch_dtype_int64, int32_t)                                                             \
  F(aoti_torch_dtype_uint64, int32_t)                                                            \
  F(aoti_torch_dtype_float64, int32_t)                                                           \
  F(aoti_torch_dtype_bool, int32_t)

struct TorchAbi {
#define QSHARD_MEMBER(name, Result, ...) Result (*name)(__VA_ARGS__) = nullptr;
  QSHARD_FOR_EACH_TORCH_FUNCTION(QSHARD_MEMBER)
#undef QSHARD_MEMBER
};

}  // namespace qshard::host

#endif  // QSHARD_HOST_TORCH_ABI_H_
