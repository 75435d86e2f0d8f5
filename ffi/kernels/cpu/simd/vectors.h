// The vector layer of this SIMD target.
#ifndef QSHARD_KERNELS_CPU_SIMD_VECTORS_H_
#define QSHARD_KERNELS_CPU_SIMD_VECTORS_H_

#include "core/round.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

template <class V>
QSHARD_INLINE V Load(const void* p) {
  V v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

template <class V>
QSHARD_INLINE void Store(void* p, V v) {
  __builtin_memcpy(p, &v, sizeof(v));
}

}  // namespace
}  // namespace qshard::kernels

#if QSHARD_SIMD_BYTES > 0
#include "kernels/cpu/simd/vectors_x86.h"
#else
#include "kernels/cpu/simd/vectors_plain.h"
#endif

#endif  // QSHARD_KERNELS_CPU_SIMD_VECTORS_H_
