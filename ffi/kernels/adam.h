#ifndef QSHARD_KERNELS_ADAM_H_
#define QSHARD_KERNELS_ADAM_H_

#include "core/adam.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// The first three are the types of parameters and gradients; states may be any. States in fewer
// bits than a bfloat16's range needs (float16 and FP8) are codes with a scale for each block.
enum AdamType { kAdamFloat32, kAdamBFloat16, kAdamFloat16, kAdamE4M3, kAdamE5M2, kNumAdamTypes };
constexpr int kNumAdamFloats = kAdamE4M3;

constexpr int SizeOf(AdamType type) {
  return type == kAdamFloat32 ? 4 : type == kAdamBFloat16 || type == kAdamFloat16 ? 2 : 1;
}
constexpr bool IsScaled(AdamType type) { return type >= kAdamFloat16; }

// What a parameter lacks of its fp32 value: nothing kept; the lower half of it, beside a bfloat16;
// or all of it.
enum class AdamLow { kNone, kRemainder, kMaster };

struct AdamKinds {
  AdamType param, grad, exp_avg, exp_avg_sq;
  AdamLow low;
  Decay decay;
  // In place of the new parameter, as float32 what is to be added to it: -lr * u; with a master,
  // the new parameter less the old one.
  bool update;

  bool scaled() const { return IsScaled(exp_avg) || IsScaled(exp_avg_sq); }
  // Whether `param` itself is read. The row of adam says whether a call has one.
  QSHARD_INLINE bool reads_param() const {
    return low == AdamLow::kMaster ? update : !update || decay != Decay::kNone;
  }
};

// One tensor of rows x cols elements. Each kAdamBlock elements of a row, and the rest of it, are a
// block, and have one of the scales. An output is the input of its name or overlaps no input; what
// the kinds leave out is not looked at.
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

// constants[i] = those of a tensor whose step, counted from 1, is step[i], with settings
// hyper[i / run].
QSHARD_LAUNCHER(AdamConstantsOf, const float* step, int64_t n, const float* hyper, int64_t run,
                float* constants);

// A step of `count` tensors, tensor i by row i of `constants`. `tensors` is in host memory.
QSHARD_LAUNCHER(Adam, const AdamTensor* tensors, int64_t count, const AdamKinds& kinds,
                const float* constants);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_ADAM_H_
