// HadamardTransform (core/hadamard.h) of 16 bfloat16 numbers, in fp32 as far as that is exact.
// Equals core/hadamard.h bit for bit.
//
// Sums are exact in fp32 while the largest is below 2^24 units of the smallest element, which holds
// if exponents span at most 12. Then order does not matter. Wider blocks are rarer than one in a
// hundred in ordinary data, but a third of all warps have one. Their fp32 sums are used if the
// largest possible error leaves each sum on its side of bfloat16's rounding boundary. The few other
// blocks are summed in fp64, exact for exponents that span at most 41, and rounded once. What
// remains goes through core/hadamard.h.
#ifndef QSHARD_KERNELS_CUDA_HADAMARD_HADAMARD_CUH_
#define QSHARD_KERNELS_CUDA_HADAMARD_HADAMARD_CUH_

#include <cstdint>
#include <type_traits>

#include "core/hadamard.h"
#include "kernels/cuda/convert.cuh"

namespace qshard::kernels {

namespace hadamard {

constexpr int kSize = kHadamardSize;
constexpr int kExactSpan = 12;         // 8 bits of significand + 12 + 4 for summing 16 numbers = 24
constexpr int kDoubleSpan = 41;        // 8 + 41 + 4 = 53
constexpr int kLargestExponent = 249;  // sums of 16 / 4 stay finite

// Error bound of fp32 sums, relative to the largest |x|. Each of 4 levels of additions contributes
// 16 * 2^-24 * largest / 4, so 2^-20 of the largest |x| in total. It is doubled because adding it
// rounds too.
constexpr float kError = PowerOfTwo(-19);

static __device__ __noinline__ Words<32> ByDefinition(Words<32> x) {
  bfloat16 in[kSize], out[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) in[i] = {static_cast<uint16_t>(x.w[i / 2] >> (i % 2 * 16))};
  HadamardTransform(in, out);
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i)
    x.w[i] = out[2 * i].bits | static_cast<uint32_t>(out[2 * i + 1].bits) << 16;
  return x;
}

// Sums and differences of numbers that are kFrom apart, then twice as far, up to kTo (exclusive).
template <int kFrom = 1, int kTo = kSize, class T, class Add>
__device__ __forceinline__ void Butterflies(T (&v)[kSize], const Add& add) {
#pragma unroll
  for (int half = kFrom; half < kTo; half *= 2) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (i & half) continue;
      const T a = v[i], b = v[i + half];
      v[i] = add(a, b);
      v[i + half] = add(a, -b);
    }
  }
}
struct AddFloats {
  __device__ __forceinline__ float operator()(float a, float b) const { return __fadd_rn(a, b); }
};

static __device__ __noinline__ Words<32> InDouble(Words<32> x) {
  float f[kSize];
  WidenWords<bfloat16>(x, f);
  double v[kSize];
  // + 0 removes -0, so sums have none either.
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    v[i] = __fma_rn(static_cast<double>(f[i]), kHadamardSigns >> i & 1 ? -0.25 : 0.25, 0.0);
  Butterflies(v, [](double a, double b) { return __dadd_rn(a, b); });
  // Round to odd: towards 0, with the last bit set if anything is lost. Rounding that rounds the
  // sum.
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    const float toward_zero = __double2float_rz(v[i]);
    f[i] = __uint_as_float(__float_as_uint(toward_zero) |
                           (static_cast<double>(toward_zero) != v[i] ? 1 : 0));
  }
  return NarrowWords<bfloat16>(f);
}

// Exponents of the largest number of a block and of the smallest nonzero number, 511 if all are
// zeros.
struct Span {
  int top, bottom;
  __device__ __forceinline__ bool Within(int span) const {
    return top - bottom <= span && top <= kLargestExponent;
  }
};

// Spans of two blocks, in the low and high halves of words. Uses minima and maxima of bfloat16,
// because integer ones are slow. `low` is the maximum of 0x7F81 - magnitude as bfloat16: for a zero
// that is NaN, which the maximum drops. If an element is NaN, its difference may borrow a 1 from
// its neighbour, which changes nothing else about the exponent.
struct Spans {
  __device__ __forceinline__ void Add(uint32_t w) {
    const uint32_t m = w & 0x7FFF7FFFu;
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(high) : "r"(m));
    asm("max.bf16x2 %0, %0, %1;" : "+r"(low) : "r"(0x7F817F81u - m));
  }
  __device__ __forceinline__ Span Of(int half) const {
    const int smallest = 0x7F81 - static_cast<int>(low >> 16 * half & 0xFFFF);
    return {static_cast<int>(high >> (16 * half + 7) & 0x1FF),
            smallest == 0x7F81 ? 511 : (smallest - 1) >> 7};
  }
  // Returns the largest magnitude.
  __device__ __forceinline__ float Largest(int half) const {
    return __uint_as_float(half == 0 ? high << 16 : high & 0xFFFF0000u);
  }
  __device__ __forceinline__ void Fold() {
    const uint32_t h = high >> 16 | high << 16, l = low >> 16 | low << 16;
    asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(high) : "r"(h));
    asm("max.bf16x2 %0, %0, %1;" : "+r"(low) : "r"(l));
  }
  uint32_t high = 0, low = 0;
};

static __device__ __noinline__ Words<32> Exactly(Words<32> x) {
  Spans spans;
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) spans.Add(x.w[i]);
  spans.Fold();
  return spans.Of(0).Within(kDoubleSpan) ? InDouble(x) : ByDefinition(x);
}

// Returns x * s / 4, the terms of sums. + 0 removes -0, so sums have none either.
__device__ __forceinline__ float Signed(float x, int i) {
  return __fmaf_rn(x, kHadamardSigns >> i & 1 ? -0.25f : 0.25f, 0.0f);
}

__device__ __forceinline__ uint32_t TwoBfloat16(float lo, float hi) {
  const float v[2] = {lo, hi};
  return NarrowWords<bfloat16>(v).w[0];
}

// Two blocks, in the low and high halves of words.
struct TwoBlocks {
  __device__ __forceinline__ explicit TwoBlocks(const uint32_t (&w)[kSize]) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      spans.Add(w[i]);
      lo[i] = Signed(__uint_as_float(w[i] << 16), i);
      hi[i] = Signed(__uint_as_float(w[i] & 0xFFFF0000u), i);
    }
  }
  // Returns whether sums are certainly exact.
  __device__ __forceinline__ bool AreExact() const {
    return spans.Of(0).Within(kExactSpan) && spans.Of(1).Within(kExactSpan);
  }
  // Returns 0xFFFF in the half of each block with uncertain sums: `lo` or `hi` may round to more
  // than one number.
  template <int kCount>
  __device__ __forceinline__ uint32_t Unknown(const float (&lo)[kCount],
                                              const float (&hi)[kCount]) const {
    return (IsUnknown(spans.Of(0), spans.Largest(0), lo) ? 0xFFFFu : 0) |
           (IsUnknown(spans.Of(1), spans.Largest(1), hi) ? 0xFFFF0000u : 0);
  }
  template <int kCount>
  static __device__ __forceinline__ bool IsUnknown(const Span& span, float largest,
                                                   const float (&v)[kCount]) {
    if (span.Within(kExactSpan)) return false;
    const float error = __fmul_rn(largest, kError);
    uint32_t differ = 0;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const float a = v[i], b = v[i + 1 < kCount ? i + 1 : i];
      differ |= TwoBfloat16(__fadd_rn(a, -error), __fadd_rn(b, -error)) ^
                TwoBfloat16(__fadd_rn(a, error), __fadd_rn(b, error));
    }
    return differ != 0 || span.top > kLargestExponent;
  }
  Spans spans;
  float lo[kSize], hi[kSize];
};

// Replaces the `unknown` halves of y by exact transforms. again(i) reloads word i of x.
template <class Again>
__device__ __forceinline__ void ExactlyTwo(uint32_t unknown, const Again& again,
                                           uint32_t (&y)[kSize]) {
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    const uint32_t mask = 0xFFFFu << 16 * half;
    if ((unknown & mask) == 0) continue;
    Words<32> x;
    const uint32_t which = half == 0 ? 0x5410 : 0x7632;
#pragma unroll
    for (int i = 0; i < kSize / 2; ++i) x.w[i] = __byte_perm(again(2 * i), again(2 * i + 1), which);
    x = Exactly(x);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const uint32_t own = (i % 2 == 0 ? x.w[i / 2] & 0xFFFFu : x.w[i / 2] >> 16) << 16 * half;
      y[i] = (y[i] & ~mask) | own;
    }
  }
}

// Transforms 16 rows of two columns. again(i) reloads word i.
template <class Again>
__device__ __forceinline__ void TransformTwo(uint32_t (&w)[kSize], const Again& again) {
  TwoBlocks v(w);
  Butterflies(v.lo, AddFloats{});
  Butterflies(v.hi, AddFloats{});
#pragma unroll
  for (int i = 0; i < kSize; ++i) w[i] = TwoBfloat16(v.lo[i], v.hi[i]);
  if (v.AreExact()) return;
  const uint32_t unknown = v.Unknown(v.lo, v.hi);
  if (unknown != 0) ExactlyTwo(unknown, again, w);
}

// Returns the largest magnitudes of the same transforms, two in a word. Uses max(|a + b|, |a - b|)
// = |a| + |b|.
template <class Again>
__device__ __forceinline__ uint32_t LargestOfTwo(const uint32_t (&w)[kSize], const Again& again,
                                                 uint32_t* high) {
  TwoBlocks v(w);
  *high = v.spans.high;
  float m[1] = {}, n[1] = {};
  Butterflies<1, kSize / 2>(v.lo, AddFloats{});
  Butterflies<1, kSize / 2>(v.hi, AddFloats{});
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) {
    m[0] = fmaxf(m[0], __fadd_rn(fabsf(v.lo[i]), fabsf(v.lo[i + kSize / 2])));
    n[0] = fmaxf(n[0], __fadd_rn(fabsf(v.hi[i]), fabsf(v.hi[i + kSize / 2])));
  }
  uint32_t largest = TwoBfloat16(m[0], n[0]);
  if (!v.AreExact()) {
    const uint32_t unknown = v.Unknown(m, n);
    if (unknown != 0) {
      uint32_t y[kSize] = {};
      ExactlyTwo(unknown, again, y);
      uint32_t exact = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) exact = __vmaxu2(exact, y[i] & 0x7FFF7FFFu);
      largest = (largest & ~unknown) | exact;
    }
  }
  return largest;
}

// Transforms 16 numbers, packed in pairs.
__device__ __forceinline__ Words<32> Transform(const Words<32>& x) {
  Spans spans;
#pragma unroll
  for (int i = 0; i < kSize / 2; ++i) spans.Add(x.w[i]);
  spans.Fold();
  if (!spans.Of(0).Within(kExactSpan)) return Exactly(x);
  float v[kSize];
  WidenWords<bfloat16>(x, v);
#pragma unroll
  for (int i = 0; i < kSize; ++i) v[i] = Signed(v[i], i);
  Butterflies(v, AddFloats{});
  return NarrowWords<bfloat16>(v);
}

}  // namespace hadamard

// Rounds to bfloat16. NaN payloads may differ, which the transform does not use.
template <class In, int kCount>
__device__ __forceinline__ Words<kCount * 2> ToBfloat16(const Words<kCount * sizeof(In)>& x) {
  if constexpr (std::is_same_v<In, bfloat16>) {
    return x;
  } else {
    float v[kCount];
    WidenWords<In>(x, v);
    return NarrowWords<bfloat16>(v);
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_HADAMARD_HADAMARD_CUH_
