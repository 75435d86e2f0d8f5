// E2M1 in a few instructions an element, for hardware without FP4 conversions. Bit for bit the
// results of core/round.h and core/stochastic.h.
//
// How: where the values of E2M1 are `step` apart (0.5 below 2, 1 below 4, else 2), adding 2^23
// steps to a magnitude makes the fp32 adder itself round it to a whole number of steps, in the low
// bits of the sum. The exponent of max(magnitude, 1) says which steps.
#ifndef QSHARD_KERNELS_CUDA_E2M1_CUH_
#define QSHARD_KERNELS_CUDA_E2M1_CUH_

#include <cstdint>

#include "core/round.h"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

namespace e2m1 {

// v within +-6. NaN becomes 6, whose code is what NaN has: minimum and maximum drop NaNs.
__device__ __forceinline__ float Clamp(float v) { return fmaxf(fminf(v, E2M1::kMax), -E2M1::kMax); }

// The bits of the power of two of the steps at `magnitude`: 1, 2 or 4.
__device__ __forceinline__ int32_t StepPower(float magnitude) {
  return __float_as_int(fmaxf(magnitude, 1.0f)) & 0x7F800000;
}

// What is added to round to steps: 2^22, 2^23 or 2^24, whose last bit is a step, and 2 steps more,
// which round alike and make `Code` simpler.
__device__ __forceinline__ float Anchor(int32_t power) {
  return __int_as_float(power + (22 << 23) + 2);
}

// The code of a sum with the anchor. It holds the number of steps, plus 2; codes count from 0, 2 or
// 4 less, for an exponent of 127, 128 or 129: modulo 8 that is twice the exponent, plus 2.
__device__ __forceinline__ uint32_t Code(float sum, int32_t power, float v) {
  const uint32_t magnitude = __float_as_uint(sum) + (static_cast<uint32_t>(power) >> 22);
  return (magnitude & 7) | (__float_as_uint(v) >> 28 & 8);
}

}  // namespace e2m1

// Encode<E2M1>(v).
__device__ __forceinline__ uint32_t EncodeE2M1(float v) {
  const float c = e2m1::Clamp(v), m = fabsf(c);
  const int32_t power = e2m1::StepPower(m);
  return e2m1::Code(__fadd_rn(m, e2m1::Anchor(power)), power, c);
}

// Decode<E2M1>(Encode<E2M1>(v)).
__device__ __forceinline__ float RoundE2M1(float v) {
  const float c = e2m1::Clamp(v), m = fabsf(c);
  const float anchor = e2m1::Anchor(e2m1::StepPower(m));
  return copysignf(__fadd_rn(__fadd_rn(m, anchor), -anchor), c);
}

// EncodeStochastic(v, random).
__device__ __forceinline__ uint32_t EncodeStochasticE2M1(float v, uint32_t random) {
  const float c = e2m1::Clamp(v), m = fabsf(c);
  const float unit = __int_as_float(e2m1::StepPower(m) - (9 << 23));  // step / 256
  // random as a float: the last bits of 2^23 + random. unit * random is exact: one rounding.
  const float r = __fadd_rn(__uint_as_float(0x4B000000u | random), -8388608.0f);
  const float t = __fmaf_rn(unit, r, m);  // below 8
  const int32_t power = e2m1::StepPower(t);
  return e2m1::Code(__fadd_rz(t, e2m1::Anchor(power)), power, c);
}

// The codes of v, packed.
template <int kCount, class Encode>
__device__ __forceinline__ Words<kCount / 2> PackE2M1(const Encode& encode) {
  Words<kCount / 2> packed;
  if constexpr (kCount == 2) {
    packed.value = static_cast<uint8_t>(encode(0) | encode(1) << 4);
  } else {
#pragma unroll
    for (int i = 0; i < kCount / 8; ++i) {
      uint32_t word = encode(8 * i);
#pragma unroll
      for (int j = 1; j < 8; ++j) word |= encode(8 * i + j) << (4 * j);
      packed.w[i] = word;
    }
  }
  return packed;
}

// Decode<E2M1> of packed codes. As halves: the bits of a code, moved to the top of the significand
// and the bottom of the exponent, are the half of its value * 2^-14.
template <int kCount>
__device__ __forceinline__ void UnpackE2M1(const Words<kCount / 2>& packed, float (&v)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    const uint32_t w = packed.w[i];
#pragma unroll
    for (int j = 0; j < 4; ++j) {  // codes j and j + 4
      const uint32_t magnitude = (j < 3 ? w << (9 - 4 * j) : w >> 3) & 0x0E000E00u;
      const uint32_t sign = w << (12 - 4 * j) & 0x80008000u;
      uint32_t halves;
      asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(magnitude | sign), "r"(0x74007400u));
      asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
          : "=f"(v[8 * i + j]), "=f"(v[8 * i + j + 4])
          : "r"(halves));
    }
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_E2M1_CUH_
