// E2M1 conversions in a few instructions per element, for hardware without FP4 conversions. Bit for
// bit equal to core/round.h and core/stochastic.h.
//
// As a function of the magnitude u, the code is a rounded piecewise linear curve: 2u up to 2, then
// u + 2 up to 4, then u / 2 + 4. Added to 2^23, one fp32 addition rounds a line to an integer. The
// bits of a half, as it grows from 0 through the subnormals, also follow this curve: the bits of u
// * 2^-14 have the code of u in bits 9 to 11, and the fraction of a step above it in bits 0 to 8.
#ifndef QSHARD_KERNELS_CUDA_E2M1_CUH_
#define QSHARD_KERNELS_CUDA_E2M1_CUH_

#include <cstdint>

#include "core/round.h"

// FP4 conversions exist in code for a family of devices, or for one device, from compute capability
// 10 on.
#if defined(__CUDA_ARCH_FAMILY_SPECIFIC__) || defined(__CUDA_ARCH_SPECIFIC__)
#if __CUDA_ARCH__ >= 1000
#define QSHARD_CUDA_FP4
#endif
#endif

namespace qshard::kernels {

namespace e2m1 {

constexpr float kOne = 8388608.0f;  // 2^23, with an ulp of 1

// Returns the code of a magnitude below 8, rounded down, in the low bits of a float near 2^23. The
// curve is concave, so it is the minimum of the lines.
__device__ __forceinline__ int32_t Down(float u) {
  return min(min(__float_as_int(__fmaf_rz(u, 2.0f, kOne)), __float_as_int(__fadd_rz(u, kOne + 2))),
             __float_as_int(__fmaf_rz(u, 0.5f, kOne + 4)));
}

// Stochastic rounding of two fp32 magnitudes at a time. A random byte, doubled, carries into the
// code if it rounds up. Halves are rounded towards 0, because only the comparison of u with whole
// 256ths of a step matters. One exception: core/stochastic.h rounds the sum, which takes a value
// 2^-26 below 1/2 up to 1/2. Adding 2^-26 (2^-40 after scaling) reproduces that and changes nothing
// else, because from 1/4 on magnitudes have steps of 2^-25 and more.
constexpr uint32_t kLargestHalves = 0x0E000E00u;  // code 7, which NaN also has

__device__ __forceinline__ uint32_t HalvesOf(float lo, float hi) {
  const float a = __fmaf_rz(lo, PowerOfTwo(-14), PowerOfTwo(-40));
  const float b = __fmaf_rz(hi, PowerOfTwo(-14), PowerOfTwo(-40));
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(b), "f"(a));
  // Drops NaN. An integer minimum would also do, but is slow.
  asm("min.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(kLargestHalves));
  return halves;
}
// Returns bytes kFirst and kFirst + 1 of the random bytes, one per half.
template <int kFirst>
__device__ __forceinline__ uint32_t SpreadBytes(uint32_t random) {
  return __byte_perm(random, 0, kFirst == 0 ? 0x4140 : 0x4342);
}
// Returns rounded codes in bits 9 to 11 of each half, and the sign, the highest bit of a half of
// `signs`, in bit 15.
__device__ __forceinline__ uint32_t RoundedHalves(float lo, float hi, uint32_t random,
                                                  uint32_t signs) {
  return (HalvesOf(lo, hi) + 2 * random) | (signs & 0x80008000u);
}
// Packs eight rounded codes, given the upper bytes of numbers 0, 2, 4, 6 and of numbers 1, 3, 5, 7.
__device__ __forceinline__ uint32_t PackHalves(uint32_t even, uint32_t odd) {
  const uint32_t low = (even >> 1 & 0x07070707u) | (even >> 4 & 0x08080808u);
  return low | (odd << 3 & 0x70707070u) | (odd & 0x80808080u);
}

// Rounding to nearest, ties to even codes, two at a time. Halves are rounded towards 0, so bit 8
// tells whether u is at least halfway to the next code. Ties are 1/4, 3/4, 1 1/4, 1 3/4, 2 1/2, 3
// 1/2 and 5. Ties with a significand of 1 1/2 or 1 3/4 go up, and ties with 1 or 1 1/4 must be
// moved below the midpoint. The first step adds one ulp if the significand is above 1 1/3, and the
// second subtracts one from everything. So values above a midpoint stay at or above it, values
// below stay below, and ties that go up stay.
constexpr float kTiesUp = 0.375f * PowerOfTwo(-23);
constexpr float kUnitDown = (1.0f - PowerOfTwo(-24)) * PowerOfTwo(-14);
static_assert(1.25f * kTiesUp < PowerOfTwo(-24) && 1.5f * kTiesUp > PowerOfTwo(-24));

// Returns halves of |v| below 7, or with kLimit of any v, where NaN has no sign. The highest byte
// of a half is the sign, three zeros, the code rounded down, and the round-up bit.
template <bool kLimit>
__device__ __forceinline__ uint32_t NearestHalves(float lo, float hi) {
  const float a = __fmul_rz(__fmaf_rn(lo, kTiesUp, lo), kUnitDown);
  const float b = __fmul_rz(__fmaf_rn(hi, kTiesUp, hi), kUnitDown);
  uint32_t halves;
  asm("cvt.rz.f16x2.f32 %0, %1, %2;" : "=r"(halves) : "f"(b), "f"(a));
  if constexpr (kLimit)
    asm("min.xorsign.abs.f16x2 %0, %0, %1;" : "+r"(halves) : "r"(kLargestHalves));
  return halves;
}

// Packs eight codes, given halves of numbers 0 and 2, 4 and 6, 1 and 3, 5 and 7.
__device__ __forceinline__ uint32_t PackNearest(uint32_t h02, uint32_t h46, uint32_t h13,
                                                uint32_t h57) {
  const uint32_t even = __byte_perm(h02, h46, 0x7531) + 0x01010101u;
  const uint32_t odd = __byte_perm(h13, h57, 0x7531);
  const auto select = [](uint32_t mask, uint32_t a, uint32_t b) {
    return (a & mask) | (b & ~mask);
  };
  const uint32_t low = select(0x07070707u, even >> 1, even >> 4);
  const uint32_t codes = select(0x70707070u, (odd << 3) + 0x08080808u, low);
  return select(0x80808080u, odd, codes);
}

// Clamps v to +-6. NaN becomes 6, because fminf and fmaxf drop it. Code 7 serves both.
__device__ __forceinline__ float Clamp(float v) { return fmaxf(fminf(v, E2M1::kMax), -E2M1::kMax); }

// Returns the bits of a power of two proportional to the step at `magnitude`: 1, 2 or 4.
__device__ __forceinline__ int32_t StepPower(float magnitude) {
  return __float_as_int(fmaxf(magnitude, 1.0f)) & 0x7F800000;
}

__device__ __forceinline__ uint32_t Signed(int32_t code, float v) {
  return (static_cast<uint32_t>(code) & 7) | (__float_as_uint(v) >> 28 & 8);
}

}  // namespace e2m1

// Decode<E2M1>(Encode<E2M1>(v)). The fp32 addition rounds to a whole number of steps.
__device__ __forceinline__ float RoundE2M1(float v) {
  const float c = e2m1::Clamp(v), m = fabsf(c);
  const float anchor = __int_as_float(e2m1::StepPower(m) + (22 << 23));  // its ulp is a step
  return copysignf(__fadd_rn(__fadd_rn(m, anchor), -anchor), c);
}

// EncodeStochastic(v, random).
__device__ __forceinline__ uint32_t EncodeStochasticE2M1(float v, uint32_t random) {
  const float c = e2m1::Clamp(v), m = fabsf(c);
  const float unit = __int_as_float(e2m1::StepPower(m) - (9 << 23));  // step / 256
  // `random` as a float: the low bits of 2^23 + random. unit * random is exact, so there is one
  // rounding.
  const float r = __fadd_rn(__uint_as_float(0x4B000000u | random), -e2m1::kOne);
  return e2m1::Signed(e2m1::Down(__fmaf_rn(unit, r, m)), c);
}

// --- nearest codes: eight per word, or fewer ---

// Packs Encode<E2M1> of eight elements. Without kLimit they must be below 7.
template <bool kLimit = true>
__device__ __forceinline__ uint32_t PackE2M1(const float* v) {
#if defined(QSHARD_CUDA_FP4)
  uint32_t codes;
  asm("{ .reg .b8 a, b, c, d; cvt.rn.satfinite.e2m1x2.f32 a, %2, %1; "
      "cvt.rn.satfinite.e2m1x2.f32 b, %4, %3; cvt.rn.satfinite.e2m1x2.f32 c, %6, %5; "
      "cvt.rn.satfinite.e2m1x2.f32 d, %8, %7; mov.b32 %0, {a, b, c, d}; }"
      : "=r"(codes)
      : "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "f"(v[4]), "f"(v[5]), "f"(v[6]), "f"(v[7]));
  return codes;
#else
  const auto two = [&](int i) { return e2m1::NearestHalves<kLimit>(v[i], v[i + 2]); };
  return e2m1::PackNearest(two(0), two(4), two(1), two(5));
#endif
}

// Packs Encode<E2M1> of four elements, and encodes a single one.
__device__ __forceinline__ uint32_t FourE2M1(const float* v) {
  return e2m1::PackNearest(e2m1::NearestHalves<true>(v[0], v[2]), 0,
                           e2m1::NearestHalves<true>(v[1], v[3]), 0);
}
__device__ __forceinline__ uint32_t EncodeE2M1(float v) {
  return e2m1::PackNearest(e2m1::NearestHalves<true>(v, 0.0f), 0, 0, 0);
}

// Decode<E2M1> of a word. The bits of a code, shifted to the top of a half's significand and the
// bottom of its exponent, are its value * 2^-14.
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
