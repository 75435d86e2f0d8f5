#ifndef QSHARD_KERNELS_ADAM_H_
#define QSHARD_KERNELS_ADAM_H_

#include "core/adam.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// Dtypes of the Adam kernel. Parameters and gradients have one of the first three, states any.
// States with less range than bfloat16 (float16 and FP8) are codes with a scale per block.
enum AdamType { kAdamFloat32, kAdamBFloat16, kAdamFloat16, kAdamE4M3, kAdamE5M2, kNumAdamTypes };
constexpr int kNumAdamFloats = kAdamE4M3;

constexpr int SizeOf(AdamType type) {
  return type == kAdamFloat32 ? 4 : type == kAdamBFloat16 || type == kAdamFloat16 ? 2 : 1;
}
constexpr bool IsScaled(AdamType type) { return type >= kAdamFloat16; }

// Bits of the fp32 parameter that are stored beside `param`: none, the lower half beside a
// bfloat16, or the whole fp32 master.
enum class AdamLow { kNone, kRemainder, kMaster };

struct AdamKinds {
  AdamType param, grad, exp_avg, exp_avg_sq;
  AdamLow low;
  Decay decay;
  // If true, the first output is the float32 change to add to the parameter: -lr * u, or with a
  // master the new rounded parameter minus the old one.
  bool update;

  bool scaled() const { return IsScaled(exp_avg) || IsScaled(exp_avg_sq); }
  // Whether the step reads `param`. The op's row decides whether a call passes one.
  QSHARD_INLINE bool reads_param() const {
    return low == AdamLow::kMaster ? update : !update || decay != Decay::kNone;
  }
};

// One tensor of rows x cols elements. Each kAdamBlock elements of a row, or the rest of it, form a
// block with one scale per state. An output either is the input of its name or overlaps no input.
// Pointers that the kinds do not use are ignored.
struct AdamTensor {
  struct State {
    const void* data;
    const float* scale_inv;
  };
  struct NewState {
    void* data;
    float* scale_inv;
  };
  const void *param, *low, *grad;
  State exp_avg, exp_avg_sq;
  void *new_param, *new_low;
  NewState new_exp_avg, new_exp_avg_sq;
  int64_t rows, cols;
};

// Computes constants[i] for a tensor at step step[i], counted from 1, with settings hyper[i / run].
QSHARD_LAUNCHER(AdamConstantsOf, const float* step, int64_t n, const float* hyper, int64_t run,
                float* constants);

// Runs one step of `count` tensors, tensor i with row i of `constants`. `tensors` is in host
// memory.
QSHARD_LAUNCHER(Adam, const AdamTensor* tensors, int64_t count, const AdamKinds& kinds,
                const float* constants);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_ADAM_H_
