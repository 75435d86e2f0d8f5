// silu(gate) * up and its derivatives, the same on host and device: fp32, one rounding an
// operation, fused where it says so.
#ifndef QSHARD_CORE_SWIGLU_H_
#define QSHARD_CORE_SWIGLU_H_

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// 1 / (1 + e^-x), to 3 units in the last place; 0 below kLeast, and 1 from some 17 up. Of NaN
// anything: what it is for multiplies it by x.
//
// e^-x is 2^n * 2^f, with n the integer nearest to -x * log2(e), which an addition rounds to, and a
// polynomial for 2^f. The library functions of host and device do not agree to the bit.
QSHARD_INLINE float Sigmoid(float x) {
  constexpr float kLeast = -87.0f, kMost = 80.0f;  // Beyond, 2^n, or its inverse, is not normal.
  constexpr float kMinusLog2E = -0x1.715476p+0f, kInteger = 12582912.0f;  // 3 * 2^22
  // 2^f - 1 over f, of the least relative error in 2^f for |f| up to 1/2.
  constexpr float k1 = 0x1.62e42ap-1f, k2 = 0x1.ebf9bcp-3f, k3 = 0x1.c6b752p-5f,
                  k4 = 0x1.3cea88p-7f, k5 = 0x1.5bba14p-10f;
#if defined(__CUDA_ARCH__)
  const float y = fminf(fmaxf(x, kLeast), kMost);
#else
  const int32_t least = FloatBits(kLeast), most = FloatBits(kMost);
  const float y = FloatFromBits(Select(x < kLeast, least, Select(x > kMost, most, FloatBits(x))));
#endif
  const float shifted = FusedMultiplyAdd(y, kMinusLog2E, kInteger);
  const float f = FusedMultiplyAdd(y, kMinusLog2E, -(shifted - kInteger));
  float p = FusedMultiplyAdd(k5, f, k4);
  p = FusedMultiplyAdd(p, f, k3);
  p = FusedMultiplyAdd(p, f, k2);
  p = FusedMultiplyAdd(p, f, k1);
  p = FusedMultiplyAdd(p, f, 1.0f);
  const uint32_t power = static_cast<uint32_t>(FloatBits(shifted)) << 23;
  const float e = FloatFromBits(static_cast<int32_t>(static_cast<uint32_t>(FloatBits(p)) + power));
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
