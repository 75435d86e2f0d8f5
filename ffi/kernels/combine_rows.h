#ifndef QSHARD_KERNELS_COMBINE_ROWS_H_
#define QSHARD_KERNELS_COMBINE_ROWS_H_

#include "core/norm.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// The rows of y [rows, cols] that each of `tokens` tokens sums, and their weights: [tokens,
// choices].
struct RowSums {
  const int32_t* positions;
  const float* weights;
  int64_t rows, tokens, choices;
};

// x[t, i] = Narrow<In>(sum of weights[t, c] * y[positions[t, c], i] over c, in order), with one
// rounding for each term. Positions outside of y have no term.
QSHARD_LAUNCHER_TEMPLATE((class In), CombineRows, const In* y, const RowSums& sums, int64_t cols,
                         In* x);

// The token of each row of y, and its weight.
struct RowTokens {
  const int32_t* tokens;
  const float* weights;
  int64_t rows, count;  // of y, and of tokens
};

// dy[p, i] = Narrow<In>(weights[p] * grad[tokens[p], i]), dweights[p] = sum of y[p, i] *
// grad[tokens[p], i] over i, in the order of core/norm.h, and amax[p] = max |dy[p, i]|. Rows
// without a token give zeros.
QSHARD_LAUNCHER_TEMPLATE((class In), CombineRowsGrad, const In* y, const RowTokens& of,
                         const In* grad, int64_t cols, In* dy, float* dweights, float* amax);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_COMBINE_ROWS_H_
