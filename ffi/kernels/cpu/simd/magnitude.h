#ifndef QSHARD_KERNELS_CPU_SIMD_MAGNITUDE_H_
#define QSHARD_KERNELS_CPU_SIMD_MAGNITUDE_H_

#include "core/round.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

// The bits of |x|. Widening keeps their order, so the largest is looked for in the input's own.
QSHARD_INLINE int32_t Magnitude(float x) { return FloatBits(x) & kFloatMagnitudeMask; }
QSHARD_INLINE int16_t Magnitude(bfloat16 x) { return static_cast<int16_t>(x.bits & 0x7FFF); }
QSHARD_INLINE int16_t Magnitude(float16 x) { return static_cast<int16_t>(x.bits & 0x7FFF); }

template <class In>
using MagnitudeOf = decltype(Magnitude(In{}));

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_MAGNITUDE_H_
