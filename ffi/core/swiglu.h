// silu(gate) * up and its derivatives, the same on host and device: fp32, one rounding an
// operation, fused where it says so.
#ifndef QSHARD_CORE_SWIGLU_H_
#define QSHARD_CORE_SWIGLU_H_

#include "core/exp_log.h"
#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// 1 / (1 + e^-x), to 3.31 units in the last place; 0 below kLeast, and 1 from some 17 up. Of NaN
// anything: what it is for multiplies it by x.
QSHARD_INLINE float Sigmoid(float x) {
  constexpr float kLeast = -87.0f, kMost = 80.0f;  // Beyond, 2^n, or its inverse, is not normal.
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

// The gradients of gate and up, of that of SwiGlu.
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
