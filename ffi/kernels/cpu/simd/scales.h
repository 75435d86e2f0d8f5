// Scales of blocks, and single codes: loops simple enough for the vectorizer, no branches, no
// calls.
#ifndef QSHARD_KERNELS_CPU_SIMD_SCALES_H_
#define QSHARD_KERNELS_CPU_SIMD_SCALES_H_

#include "core/block_scale.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {
namespace {

template <class In>
void EncodeAllE8M0(const void* data, int64_t n, uint8_t* __restrict codes) {
  const In* __restrict x = static_cast<const In*>(data);
  for (int64_t i = 0; i < n; ++i) codes[i] = EncodeE8M0<PowerRounding::kUp>(Widen(x[i]));
}

void DecodeAllE8M0(const uint8_t* __restrict codes, int64_t n, float* __restrict x) {
  for (int64_t i = 0; i < n; ++i) x[i] = DecodeE8M0(codes[i]);
}

void FloatScalesOf(const float* __restrict amax, int64_t n, ScaleRule rule, float* __restrict scale,
                   float* __restrict scale_inv) {
  for (int64_t i = 0; i < n; ++i) {
    const float s = qshard::ScaleFromAmax(amax[i], rule.max, rule.eps, rule.pow2, rule.nonfinite);
    scale[i] = s;
    scale_inv[i] = ScaleInverse(s);
  }
}

template <PowerRounding kRounding>
QSHARD_INLINE void E8M0ScalesRounded(const float* __restrict amax, int64_t n, PowerRule rule,
                                     float* __restrict scale, uint8_t* __restrict scale_inv) {
  for (int64_t i = 0; i < n; ++i) {
    const uint8_t code = E8M0FromAmax(ShownAmax(amax[i], rule.nonfinite), rule.max, kRounding);
    scale[i] = MultiplierE8M0(code);
    scale_inv[i] = code;
  }
}

void E8M0ScalesOf(const float* amax, int64_t n, PowerRule rule, float* scale, uint8_t* scale_inv) {
  if (rule.rounding == PowerRounding::kUp)
    E8M0ScalesRounded<PowerRounding::kUp>(amax, n, rule, scale, scale_inv);
  else
    E8M0ScalesRounded<PowerRounding::kFloor>(amax, n, rule, scale, scale_inv);
}

void Nvfp4ScalesOf(const float* __restrict amax, int64_t n, float global_scale, Nonfinite nonfinite,
                   float* __restrict scale, uint8_t* __restrict scale_inv) {
  for (int64_t i = 0; i < n; ++i) {
    const BlockScaleNvfp4 s = qshard::ScaleNvfp4(ShownAmax(amax[i], nonfinite), global_scale);
    scale[i] = s.scale;
    scale_inv[i] = s.scale_inv;
  }
}

// The error of a candidate: sums of a row in the order of elements, rows as a binary tree.
template <class In>
float CandidateError(const In* x, const FourOverSixBlock& block, BlockScaleNvfp4 candidate) {
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
