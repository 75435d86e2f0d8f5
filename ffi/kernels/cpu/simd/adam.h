// Loops of Adam. Blocks of up to kAdamBlock elements go through buffers of floats.
#ifndef QSHARD_KERNELS_CPU_SIMD_ADAM_H_
#define QSHARD_KERNELS_CPU_SIMD_ADAM_H_

#include <type_traits>

#include "core/adam.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

// --- plain values ---

template <class T>
void NarrowAll(const float* __restrict x, int64_t n, void* to) {
  T* __restrict out = static_cast<T*>(to);
  for (int64_t i = 0; i < n; ++i) out[i] = Narrow<T>(x[i]);
}

void Join(const void* upper, const void* lower, int64_t n, float* __restrict x) {
  const bfloat16* __restrict high = static_cast<const bfloat16*>(upper);
  const uint16_t* __restrict low = static_cast<const uint16_t*>(lower);
  for (int64_t i = 0; i < n; ++i) x[i] = JoinHalves(high[i], low[i]);
}

void Halve(const float* __restrict x, int64_t n, void* upper, void* lower) {
  bfloat16* __restrict high = static_cast<bfloat16*>(upper);
  uint16_t* __restrict low = static_cast<uint16_t*>(lower);
  for (int64_t i = 0; i < n; ++i) {
    const float v = CanonicalNan(x[i]);
    high[i] = UpperHalf(v);
    low[i] = LowerHalf(v);
  }
}

// --- codes with a scale ---

template <class F>
struct Codes {  // an FP8 format
  using Type = uint8_t;
  static QSHARD_INLINE float Value(uint8_t code) { return Decode<F>(code); }
  static QSHARD_INLINE int32_t Code(float v) { return Encode<F>(v); }
};
template <>
struct Codes<float16> {
  using Type = uint16_t;
  static QSHARD_INLINE float Value(uint16_t bits) { return Widen(float16{bits}); }
  static QSHARD_INLINE int32_t Code(float v) { return Narrow<float16>(v).bits; }
};

template <class T>
void DecodeAll(const void* from, int64_t n, float scale_inv, float* __restrict x) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, bfloat16>) {
    const T* __restrict in = static_cast<const T*>(from);
    for (int64_t i = 0; i < n; ++i) x[i] = Widen(in[i]);
  } else {
    const auto* __restrict codes = static_cast<const typename Codes<T>::Type*>(from);
    for (int64_t i = 0; i < n; ++i) x[i] = Codes<T>::Value(codes[i]) * scale_inv;
  }
}

template <class T>
void EncodeAll(const float* __restrict x, int64_t n, bool positive, void* to, float* scale_inv) {
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, bfloat16>) {
    NarrowAll<T>(x, n, to);
  } else {
    using Code = typename Codes<T>::Type;
    int32_t amax = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int32_t bits = FloatBits(x[i]) & kFloatMagnitudeMask;
      amax = amax > bits ? amax : bits;
    }
    const float scale = AdamScale(FloatFromBits(amax), T::kMax);
    *scale_inv = AdamScaleInverse(scale);
    Code* __restrict codes = static_cast<Code*>(to);
    if (positive) {
      for (int64_t i = 0; i < n; ++i)
        codes[i] = static_cast<Code>(KeepPositive(Codes<T>::Code(x[i] * scale), x[i]));
    } else {
      for (int64_t i = 0; i < n; ++i) codes[i] = static_cast<Code>(Codes<T>::Code(x[i] * scale));
    }
  }
}

// --- the step ---

template <Decay kDecay>
void Step(const AdamConstants& constants, const float* __restrict g, int64_t n, float* __restrict p,
          float* __restrict m, float* __restrict v, float* __restrict update) {
  const AdamConstants c = constants;
  for (int64_t i = 0; i < n; ++i) {
    float new_m = m[i], new_v = v[i];
    update[i] = AdamUpdate<kDecay>(c, p[i], g[i], new_m, new_v);
    m[i] = new_m;
    v[i] = new_v;
    p[i] = p[i] - update[i];
  }
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_ADAM_H_
