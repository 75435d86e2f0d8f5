// silu(gate) * up and its derivatives, the same on host and device: fp32, one rounding per
// operation, fused where written.
#ifndef QSHARD_CORE_SWIGLU_H_
#define QSHARD_CORE_SWIGLU_H_

#include "core/exp_log.h"
#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// Returns 1 / (1 + e^-x) within 3.31 ulp: 0 below kLeast, and 1 from about 17 up. Undefined for
// NaN, because callers multiply the result by x.
QSHARD_INLINE float Sigmoid(float x) {
  constexpr float kLeast = -87.0f, kMost = 80.0f;  // beyond, 2^n or its inverse is not normal
#if defined(__CUDA_ARCH__)
  const float y = fminf(fmaxf(x, kLeast), kMost);
#else
  const int32_t least = FloatBits(kLeast), most = FloatBits(kMost);
  const float y = FloatFromBits(Select(x < kLeast, least, Select(x > kMost, most, FloatBits(x))));
#endif
  const ExpParts parts = ExpInParts<true>(-y);
  const uint32_t bits = static_cast<uint32_t>(FloatBits(parts.fraction)) + parts.power;
  const float e = FloatFromBits(static_cast<int32_t>(bits));
  const float sigmoid = ReciprocalOfNormal(1.0f + e);
  return FloatFromBits(Select(x < kLeast, 0, FloatBits(sigmoid)));
}

QSHARD_INLINE float SwiGlu(float gate, float up) { return gate * Sigmoid(gate) * up; }

// Gradients of gate and up for gradient `grad` of SwiGlu.
struct SwiGluGradients {
  float gate, up;
};
QSHARD_INLINE SwiGluGradients SwiGluGrad(float gate, float up, float grad) {
  const float s = Sigmoid(gate), silu = gate * s;
  const float slope = s * FusedMultiplyAdd(gate, 1.0f - s, 1.0f);
  return {grad * up * slope, grad * silu};
}

}  // namespace qshard

#endif  // QSHARD_CORE_SWIGLU_H_
