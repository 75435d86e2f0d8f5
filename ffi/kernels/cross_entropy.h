// Launchers of cross entropy over rows of logits (core/cross_entropy.h).
#ifndef QSHARD_KERNELS_CROSS_ENTROPY_H_
#define QSHARD_KERNELS_CROSS_ENTROPY_H_

#include "core/cross_entropy.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// Computes stats [rows, 4] of logits [rows, cols], which have the classes [first, first + cols).
QSHARD_LAUNCHER_TEMPLATE((class In), CrossEntropyStats, const In* logits, const int32_t* labels,
                         int64_t rows, int64_t cols, int64_t first, bool total, float* stats);

// Computes loss and lse of each row from stats [rows, parts, 4].
QSHARD_LAUNCHER(CrossEntropy, const float* stats, const int32_t* labels, int64_t rows,
                int64_t parts, const CrossEntropyRule& rule, float* loss, float* lse);

// Computes the gradient d of the logits for the gradient `grad` of each row's loss. `d` may alias
// `logits`.
QSHARD_LAUNCHER_TEMPLATE((class In), CrossEntropyBackward, const In* logits, const int32_t* labels,
                         const float* lse, const float* grad, int64_t rows, int64_t cols,
                         int64_t first, const CrossEntropyRule& rule, In* d);

// Computes the loss of each row and the gradient d of its logits, which are all classes, for the
// gradient `grad` of each row's loss. `d` may alias `logits`. Equals the three launchers above, bit
// for bit.
QSHARD_LAUNCHER_TEMPLATE((class In), CrossEntropyWithGrad, const In* logits, const int32_t* labels,
                         const float* grad, int64_t rows, int64_t cols,
                         const CrossEntropyRule& rule, float* loss, In* d);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CROSS_ENTROPY_H_
