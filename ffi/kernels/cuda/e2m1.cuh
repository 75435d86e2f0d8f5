// E2M1 in a few instructions an element, for hardware without FP4 conversions. Bit for bit the
// results of core/round.h and core/stochastic.h.
//
// How: on magnitudes u, codes are the nearest whole numbers to a curve of straight lines: 2u up to
// 2, then u + 2 up to 4, then u / 2 + 4. It is concave, so the least of the lines; rounding keeps
// order, and what is added is even, so that ties go the same way. Beside 2^23, one addition rounds
// each.
#ifndef QSHARD_KERNELS_CUDA_E2M1_CUH_
#define QSHARD_KERNELS_CUDA_E2M1_CUH_

#include <cstdint>

#include "core/round.h"

// Conversions to FP4 are in code for a family of devices, or for one, from compute capability 10
// on.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000
#define QSHARD_CUDA_FP4
#endif
#endif

namespace qshard::kernels {

namespace e2m1 {

#if defined(QSHARD_CUDA_FP4)
constexpr bool kIsInHardware = true;
#else
constexpr bool kIsInHardware = false;
#endif

constexpr float kOne = 8388608.0f;  // 2^23, whose last bit is 1

// The code of a magnitude below 7, in the bits of a float after those of 2^23. Of any magnitude, or
// NaN, more than the largest code if it is above.
__device__ __forceinline__ int32_t Nearest(float u) {
  return min(min(__float_as_int(__fmaf_rn(u, 2.0f, kOne)), __float_as_int(__fadd_rn(u, kOne + 2))),
             __float_as_int(__fmaf_rn(u, 0.5f, kOne + 4)));
}

// Two at a time, of bfloat16 elements under powers of two: such a product has 8 bits like its
// factors, so beside 2^7 one addition rounds each line, as above. The bits are those of 2^7 plus
// the code of the magnitude, with the largest for all above it and for NaN.
constexpr uint32_t kOneOfTwo = 0x43004300;

__device__ __forceinline__ uint32_t FmaOfTwo(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ uint32_t PowersOfTwo(float lo, float hi) {
  return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632);
}
__device__ __forceinline__ uint32_t NearestOfTwo(uint32_t x, uint32_t scales) {
  const uint32_t u = FmaOfTwo(x & 0x7FFF7FFFu, scales, 0);
  const uint32_t twice = FmaOfTwo(u, 0x40004000u, kOneOfTwo);
  const uint32_t once = FmaOfTwo(u, 0x3F803F80u, kOneOfTwo + 0x00020002u);
  const uint32_t half = FmaOfTwo(u, 0x3F003F00u, kOneOfTwo + 0x00040004u);
  return __vminu2(__vminu2(twice, once), __vminu2(half, kOneOfTwo + E2M1::kNan * 0x00010001u));
}

// The same of a magnitude below 8, rounded down.
__device__ __forceinline__ int32_t Down(float u) {
  return min(min(__float_as_int(__fmaf_rz(u, 2.0f, kOne)), __float_as_int(__fadd_rz(u, kOne + 2))),
             __float_as_int(__fmaf_rz(u, 0.5f, kOne + 4)));
}

// Rounded at random, two at a time, of magnitudes as fp32 products are. The bits of a half as it
// grows from 0 through the subnormals are E2M1's curve: those of u * 2^-14 have the code of u in
// bits 9 to 11, and the part of a step that is above it in bits 0 to 8. A random byte, doubled,
// carries into the code where it is to be rounded up. Halves are rounded towards 0, as all that
// matters is how u compares with whole 256ths of a step; but for the rounding of the sum in
// core/stochastic.h, which takes 2^-26 below 1/2 up to it. That much more shows nowhere else: from
// 1/4 on, magnitudes have steps of 2^-25 and more.
constexpr uint32_t kLargestHalves = 0x0E000E00u;  // the code 7, and that of NaN

__device__ __forceinline__ uint32_t HalvesOf(float lo, float hi) {
  const float a = __fmaf_rz(lo, PowerOfTwo(-14), PowerOfTwo(-40));
  const float b = __fmaf_rz(hi, PowerOfTwo(-14), PowerOfTwo(-40));
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(b), "f"(a));
  // Drops NaN. A minimum of integers would do, and is slow.
  asm("min.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(kLargestHalves));
  return halves;
}
// Bytes `first` and `first` + 1 of random bytes, in halves.
template <int kFirst>
__device__ __forceinline__ uint32_t SpreadBytes(uint32_t random) {
  return __byte_perm(random, 0, kFirst == 0 ? 0x4140 : 0x4342);
}
// Rounded: codes in bits 9 to 11 of halves, signs, the highest bits of `signs`, in bit 15.
__device__ __forceinline__ uint32_t RoundedHalves(float lo, float hi, uint32_t random,
                                                  uint32_t signs) {
  return (HalvesOf(lo, hi) + 2 * random) | (signs & 0x80008000u);
}
// Eight of those as packed codes, from the higher bytes of numbers 0, 2, 4, 6 and of 1, 3, 5, 7.
__device__ __forceinline__ uint32_t PackHalves(uint32_t even, uint32_t odd) {
  const uint32_t low = (even >> 1 & 0x07070707u) | (even >> 4 & 0x08080808u);
  return low | (odd << 3 & 0x70707070u) | (odd & 0x80808080u);
}

// v within +-6. NaN becomes 6, whose code is what NaN has: minimum and maximum drop NaNs.
__device__ __forceinline__ float Clamp(float v) { return fmaxf(fminf(v, E2M1::kMax), -E2M1::kMax); }

// The bits of the power of two of the steps at `magnitude`: 1, 2 or 4.
__device__ __forceinline__ int32_t StepPower(float magnitude) {
  return __float_as_int(fmaxf(magnitude, 1.0f)) & 0x7F800000;
}

__device__ __forceinline__ uint32_t Signed(int32_t code, float v) {
  return (static_cast<uint32_t>(code) & 7) | (__float_as_uint(v) >> 28 & 8);
}

}  // namespace e2m1

// Encode<E2M1>(v).
__device__ __forceinline__ uint32_t EncodeE2M1(float v) {
  const float c = e2m1::Clamp(v);
  return e2m1::Signed(e2m1::Nearest(fabsf(c)), c);
}

// Decode<E2M1>(Encode<E2M1>(v)): the fp32 adder rounds to a whole number of steps.
__device__ __forceinline__ float RoundE2M1(float v) {
  const float c = e2m1::Clamp(v), m = fabsf(c);
  const float anchor = __int_as_float(e2m1::StepPower(m) + (22 << 23));  // whose last bit is a step
  return copysignf(__fadd_rn(__fadd_rn(m, anchor), -anchor), c);
}

// EncodeStochastic(v, random).
__device__ __forceinline__ uint32_t EncodeStochasticE2M1(float v, uint32_t random) {
  const float c = e2m1::Clamp(v), m = fabsf(c);
  const float unit = __int_as_float(e2m1::StepPower(m) - (9 << 23));  // step / 256
  // random as a float: the last bits of 2^23 + random. unit * random is exact: one rounding.
  const float r = __fadd_rn(__uint_as_float(0x4B000000u | random), -e2m1::kOne);
  return e2m1::Signed(e2m1::Down(__fmaf_rn(unit, r, m)), c);
}

// --- eight codes a word ---

// Signs of eight elements, each in the highest bit of its nibble.
// From the highest bytes of elements 0, 2, 4, 6 and of elements 1, 3, 5, 7.
__device__ __forceinline__ uint32_t SignNibbles(uint32_t even, uint32_t odd) {
  return (even >> 4 & 0x08080808u) | (odd & 0x80808080u);
}
__device__ __forceinline__ uint32_t WordTops(uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  return __byte_perm(__byte_perm(a, b, 0x0073), __byte_perm(c, d, 0x0073), 0x5410);
}

// code(i) for 0 <= i < 8, as Nearest gives them.
template <class Code>
__device__ __forceinline__ uint32_t PackMagnitudes(const Code& code) {
  uint32_t word = 0;
#pragma unroll
  for (int i = 7; i >= 0; --i) word = word * 16 + static_cast<uint32_t>(code(i));
  return word - 0xFB000000u;  // what the 2^23s have summed up to, modulo 2^32
}

// Encode<E2M1> of eight elements, packed.
__device__ __forceinline__ uint32_t PackE2M1(const float* v) {
  uint32_t c[8];
#pragma unroll
  for (int j = 0; j < 8; ++j) c[j] = __float_as_uint(e2m1::Clamp(v[j]));
  return PackMagnitudes([&](int j) { return e2m1::Nearest(fabsf(__uint_as_float(c[j]))); }) |
         SignNibbles(WordTops(c[0], c[2], c[4], c[6]), WordTops(c[1], c[3], c[5], c[7]));
}

// Decode<E2M1> of a word. As halves: the bits of a code, moved to the top of the significand and
// the bottom of the exponent, are the half of its value * 2^-14.
__device__ __forceinline__ void UnpackE2M1(uint32_t w, float* v) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // codes j and j + 4
    const uint32_t magnitude = (j < 3 ? w << (9 - 4 * j) : w >> 3) & 0x0E000E00u;
    const uint32_t sign = w << (12 - 4 * j) & 0x80008000u;
    uint32_t halves;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(halves) : "r"(magnitude | sign), "r"(0x74007400u));
    asm("{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %2; cvt.f32.f16 %0, lo; cvt.f32.f16 %1, hi; }"
        : "=f"(v[j]), "=f"(v[j + 4])
        : "r"(halves));
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_E2M1_CUH_
