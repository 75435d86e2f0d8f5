// One Adam step for one element, the same on host and device. All arithmetic is fp32 with one
// rounding per operation, in the order written here.
#ifndef QSHARD_CORE_ADAM_H_
#define QSHARD_CORE_ADAM_H_

#include "core/round.h"
#include "core/scale.h"

namespace qshard {

// Layout of the operand `hyper` of op adam_constants. Each beta is a sum of two floats: the nearest
// float and the remainder. With one float, 1 - beta would have a relative error of 1e-5 for beta =
// 0.999.
enum AdamHyper {
  kHyperLr,
  kHyperBeta1,
  kHyperBeta1Rest,
  kHyperBeta2,
  kHyperBeta2Rest,
  kHyperEps,
  kHyperDecay,
  kHyperGradScale,  // multiplies the gradients
  kHyperSize,
};

// Constants of a step for one tensor, in the order of a row of `constants`.
struct AdamConstants {
  float lr, eps, decay, grad_scale;
  float beta1, rest1, unbias1;  // beta1, 1 - beta1 and 1 / (1 - beta1^t), each rounded once
  float beta2, rest2, unbias2;
};
constexpr int kAdamConstants = sizeof(AdamConstants) / sizeof(float);

// Weight decay: none, added to the gradient (Adam with L2), or added to the update (AdamW).
enum class Decay { kNone, kCoupled, kDecoupled };

// b^t by squaring, in fp64. It only multiplies, so host and device agree bit for bit, unlike their
// pow().
QSHARD_INLINE double Power(double b, int64_t t) {
  double power = 1.0;
  for (; t > 0; t >>= 1) {
    if (t & 1) power *= b;
    b *= b;
  }
  return power;
}

QSHARD_INLINE AdamConstants MakeAdamConstants(const float* hyper, float step) {
  const double beta1 = static_cast<double>(hyper[kHyperBeta1]) + hyper[kHyperBeta1Rest];
  const double beta2 = static_cast<double>(hyper[kHyperBeta2]) + hyper[kHyperBeta2Rest];
  const int64_t t = step > 0.0f && step < 9e18f ? static_cast<int64_t>(step) : 0;
  AdamConstants c;
  c.lr = hyper[kHyperLr];
  c.eps = hyper[kHyperEps];
  c.decay = hyper[kHyperDecay];
  c.grad_scale = hyper[kHyperGradScale];
  c.beta1 = static_cast<float>(beta1);
  c.rest1 = static_cast<float>(1.0 - beta1);
  c.unbias1 = static_cast<float>(1.0 / (1.0 - Power(beta1, t)));
  c.beta2 = static_cast<float>(beta2);
  c.rest2 = static_cast<float>(1.0 - beta2);
  c.unbias2 = static_cast<float>(1.0 / (1.0 - Power(beta2, t)));
  return c;
}

// Updates m and v in place. Returns the value to subtract from p.
template <Decay kDecay>
QSHARD_INLINE float AdamUpdate(const AdamConstants& c, float p, float g, float& m, float& v) {
  g = g * c.grad_scale;
  if (kDecay == Decay::kCoupled) g = g + c.decay * p;
  m = c.beta1 * m + c.rest1 * g;
  v = c.beta2 * v + c.rest2 * g * g;
  float u = Divide(m * c.unbias1, SquareRoot(v * c.unbias2) + c.eps);
  if (kDecay == Decay::kDecoupled) u = u + c.decay * p;
  return c.lr * u;
}

// --- fp32 split into a bfloat16 and 16 more bits ---

// Upper half: the nearest bfloat16, with ties away from zero. Ties to even would need a 17th bit in
// the lower half.
QSHARD_INLINE bfloat16 UpperHalf(float v) {
  const uint32_t w = static_cast<uint32_t>(FloatBits(v));
  return {static_cast<uint16_t>((w + 0x8000u) >> 16)};
}
QSHARD_INLINE uint16_t LowerHalf(float v) { return static_cast<uint16_t>(FloatBits(v)); }
QSHARD_INLINE float JoinHalves(bfloat16 upper, uint16_t lower) {
  const uint32_t w = (static_cast<uint32_t>(upper.bits) << 16) - ((lower & 0x8000u) << 1);
  return FloatFromBits(static_cast<int32_t>(w | lower));
}

// --- optimizer state as codes with one scale per block of a row ---

constexpr int kAdamBlock = 128;

// Scale of a state block: the largest power of two with amax * scale <= max, or 1 for a block of
// zeros. `amax` must not be negative. A power of two makes decoding and encoding round only once.
//
// Equals ScaleFromAmax(amax, max, 0, true) without the division, because a quotient of two 24-bit
// significands never rounds up to a power of two.
QSHARD_INLINE float AdamScale(float amax, float max) {
  constexpr int32_t kOne = 127 << 23;
  const int32_t a = FloatBits(amax), m = FloatBits(max);
  const int32_t exponent =
      (m >> 23) - (a >> 23) + 127 -
      static_cast<int32_t>((a & kFloatMantissaMask) > (m & kFloatMantissaMask));
  const int32_t bits = Select(exponent < 254, exponent, 254) << 23;
  return FloatFromBits(Select(a == 0 || a >= kFloatInfinityBits, kOne, bits));
}

// Returns 1 / scale, exactly.
QSHARD_INLINE float AdamScaleInverse(float scale) {
  const int32_t bits = (254 << 23) - FloatBits(scale);
  return FloatFromBits(Select(bits == 0, kTwoToMinus127Bits, bits));
}

// Replaces code 0 by 1 for a second moment v > 0. With a code of 0 the next update would be as
// large as if there had been no gradients before.
QSHARD_INLINE int32_t KeepPositive(int32_t code, float v) {
  return code + Select(code == 0, v > 0.0f, 0);
}

}  // namespace qshard

#endif  // QSHARD_CORE_ADAM_H_
