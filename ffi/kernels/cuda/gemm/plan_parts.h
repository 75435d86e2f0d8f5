// Helpers of GEMM plans: attributes of descriptors, and sizes that share an algorithm.
#ifndef QSHARD_KERNELS_CUDA_GEMM_PLAN_PARTS_H_
#define QSHARD_KERNELS_CUDA_GEMM_PLAN_PARTS_H_

#include <cstdint>
#include <initializer_list>

#include "core/ceil_div.h"
#include "kernels/cuda/gemm/cublaslt.h"
#include "kernels/gemm.h"

namespace qshard::kernels {

template <class T>
bool Set(const cublaslt::Library& lt, cublaslt::Desc desc, cublaslt::DescAttribute attribute,
         T value) {
  return lt.desc_set(desc, attribute, &value, sizeof(value)) == cublaslt::kSuccess;
}

template <class T>
bool Set(const cublaslt::Library& lt, cublaslt::Preference preference,
         cublaslt::PreferenceAttribute attribute, T value) {
  return lt.preference_set(preference, attribute, &value, sizeof(value)) == cublaslt::kSuccess;
}

// Rounds a size up to five significant bits.
inline int64_t RoundUpBits(int64_t size) {
  int64_t unit = 1;
  while (size / unit >= 32) unit *= 2;
  return RoundUp(size, unit);
}

// Returns whether operands of a type are floats, which have no scales.
inline bool IsFloat(cublaslt::Type type) {
  return type == cublaslt::kFloat32 || type == cublaslt::kBFloat16 || type == cublaslt::kFloat16;
}

// Returns the library's type of an element. An element that it does not support gets an invalid
// type, which it refuses.
inline cublaslt::Type TypeOf(ElementId element) {
  switch (element) {
    case ElementId::kE4M3:
      return cublaslt::kE4M3;
    case ElementId::kE5M2:
      return cublaslt::kE5M2;
    case ElementId::kE2M1:
      return cublaslt::kE2M1;
    case ElementId::kFloat32:
      return cublaslt::kFloat32;
    case ElementId::kBFloat16:
      return cublaslt::kBFloat16;
    case ElementId::kFloat16:
      return cublaslt::kFloat16;
    default:
      return static_cast<cublaslt::Type>(-1);
  }
}

template <class Out>
constexpr cublaslt::Type kTypeOf = cublaslt::kFloat32;
template <>
constexpr cublaslt::Type kTypeOf<bfloat16> = cublaslt::kBFloat16;
template <>
constexpr cublaslt::Type kTypeOf<float16> = cublaslt::kFloat16;

constexpr int64_t kVector = 128;         // block length of fp32 scales
constexpr int64_t kMostAlignment = 256;  // in bytes; the library needs no more

// Returns the largest power of two, up to kMostAlignment, that divides all numbers.
inline int64_t AlignmentOf(std::initializer_list<uint64_t> numbers) {
  uint64_t all = kMostAlignment;
  for (const uint64_t number : numbers) all |= number;
  return static_cast<int64_t>(all & (~all + 1));
}

inline uint64_t Address(const void* p) { return reinterpret_cast<uintptr_t>(p); }

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_GEMM_PLAN_PARTS_H_
