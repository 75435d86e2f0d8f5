// Block scales and single codes: loops without branches or calls, for the compiler to vectorize.
#ifndef QSHARD_KERNELS_CPU_SIMD_SCALES_H_
#define QSHARD_KERNELS_CPU_SIMD_SCALES_H_

#include "core/block_scale.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

template <class In>
void EncodeAllE8M0(const void* data, int64_t n, uint8_t* __restrict codes) {
  const In* __restrict x = static_cast<const In*>(data);
  for (int64_t i = 0; i < n; ++i) codes[i] = Encode<E8M0>(Widen(x[i]));
}

void DecodeAllE8M0(const uint8_t* __restrict codes, int64_t n, float* __restrict x) {
  for (int64_t i = 0; i < n; ++i) x[i] = Decode<E8M0>(codes[i]);
}

// `scales` is passed by value: the compiler then knows that stores do not change it, and
// vectorizes.
template <class Scales>
QSHARD_INLINE void EachScale(const float* __restrict amax, int64_t n, const Scales scales,
                             float shared, float* __restrict scale,
                             typename Scales::Stored* __restrict scale_inv) {
  for (int64_t i = 0; i < n; ++i) {
    const auto s = scales.Of(amax[i], shared);
    scale[i] = s.scale;
    scale_inv[i] = s.scale_inv;
  }
}

template <class Scales>
void ScalesFrom(const float* amax, int64_t n, const Scales& scales, float shared, float* scale,
                typename Scales::Stored* scale_inv) {
  EachScale(amax, n, scales, shared, scale, scale_inv);
}

template <>
void ScalesFrom(const float* amax, int64_t n, const E8M0Scales& scales, float max, float* scale,
                uint8_t* scale_inv) {
  const E8M0Scales up{PowerRounding::kUp, scales.nonfinite};
  const E8M0Scales floor{PowerRounding::kFloor, scales.nonfinite};
  if (scales.rounding == PowerRounding::kUp)
    EachScale(amax, n, up, max, scale, scale_inv);
  else
    EachScale(amax, n, floor, max, scale, scale_inv);
}

// Error of a candidate: elements of a row summed in order, rows as a binary tree.
template <class In>
float CandidateError(const In* x, const FourOverSixBlock& block, BlockScale<uint8_t> candidate) {
  float sums[kNvfp4Block];
  for (int64_t r = 0; r < block.rows; ++r) {
    float terms[kNvfp4Block];
    for (int i = 0; i < kNvfp4Block; ++i)
      terms[i] = FourOverSixDifference(Widen(x[r * block.stride + i]), candidate, block.global_amax,
                                       block.max);
    for (int i = 0; i < kNvfp4Block; ++i)
      terms[i] = block.squared ? terms[i] * terms[i]
                               : FloatFromBits(FloatBits(terms[i]) & kFloatMagnitudeMask);
    sums[r] = terms[0];
    for (int i = 1; i < kNvfp4Block; ++i) sums[r] += terms[i];
  }
  for (int64_t half = block.rows / 2; half > 0; half /= 2)
    for (int64_t r = 0; r < half; ++r) sums[r] += sums[r + half];
  return sums[0];
}

template <class In>
bool TakesFour(const void* data, const FourOverSixBlock& block) {
  const In* x = static_cast<const In*>(data);
  const FourAndSix candidates = FourOverSixCandidates(block.amax, block.global_scale);
  return CandidateError(x, block, candidates.four) < CandidateError(x, block, candidates.six);
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_SIMD_SCALES_H_
