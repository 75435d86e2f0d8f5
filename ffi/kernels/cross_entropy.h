// Cross entropy of rows of logits: core/cross_entropy.h for many.
#ifndef QSHARD_KERNELS_CROSS_ENTROPY_H_
#define QSHARD_KERNELS_CROSS_ENTROPY_H_

#include "core/cross_entropy.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// Logits [rows, cols], those of classes [first, first + cols). stats [rows, 4].
QSHARD_LAUNCHER_TEMPLATE((class In), CrossEntropyStats, const In* logits, const int32_t* labels,
                         int64_t rows, int64_t cols, int64_t first, bool total, float* stats);

// stats [rows, parts, 4].
QSHARD_LAUNCHER(CrossEntropy, const float* stats, const int32_t* labels, int64_t rows,
                int64_t parts, const CrossEntropyRule& rule, float* loss, float* lse);

// `grad` is that of the loss; `d` may be `logits`.
QSHARD_LAUNCHER_TEMPLATE((class In), CrossEntropyBackward, const In* logits, const int32_t* labels,
                         const float* lse, const float* grad, int64_t rows, int64_t cols,
                         int64_t first, const CrossEntropyRule& rule, In* d);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CROSS_ENTROPY_H_
