#ifndef QSHARD_KERNELS_DELAYED_H_
#define QSHARD_KERNELS_DELAYED_H_

#include "core/scale.h"
#include "kernels/launcher.h"

// Delayed scaling: the cast uses a scale that exists, and records the amax for the next.
namespace qshard::kernels {

// data[i] = Encode<Code>(x[i] * scale[i / scale_length]), of ShownProduct if infinities are to
// show, and amax[r] = max |x| over elements [r * amax_length, (r + 1) * amax_length), of n
// elements, from one read of x. The amax is of x itself, a maximum over bit patterns with NaN
// canonical; 0 for an empty run. `runs` amaxes.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastAmax, const In* x, const float* scale,
                         int64_t scale_length, Nonfinite nonfinite, int64_t n, int64_t runs,
                         int64_t amax_length, uint8_t* data, float* amax);

// The same, and data_t[b, j, i] = data[b, i, j], for `batch` matrices of [rows, cols].
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastTransposeAmax, const In* x, const float* scale,
                         int64_t scale_length, Nonfinite nonfinite, int64_t batch, int64_t rows,
                         int64_t cols, int64_t runs, int64_t amax_length, uint8_t* data,
                         uint8_t* data_t, float* amax);

struct DelayedRule {
  float target;      // fl(max * 2^-margin)
  bool most_recent;  // the scale follows from the last amax alone
};

// One step for each of n tensors, whose windows are history [n, length], the oldest amax first. An
// amax of 0 leaves the window and the scale as they are. Another enters the window and the oldest
// leaves; a = max(window), or the amax itself; new_scale = DelayedScale(scale, a, target).
// scale_inv = the inverse of new_scale. Outputs may be inputs.
QSHARD_LAUNCHER(UpdateDelayedScale, const float* amax, const float* history, const float* scale,
                int64_t n, int64_t length, DelayedRule rule, float* new_history, float* new_scale,
                float* scale_inv);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_DELAYED_H_
