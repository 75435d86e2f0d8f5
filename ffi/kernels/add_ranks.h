#ifndef QSHARD_KERNELS_ADD_RANKS_H_
#define QSHARD_KERNELS_ADD_RANKS_H_

#include "kernels/launcher.h"

namespace qshard::kernels {

// total[i] = before[i] + (parts[0, i] + parts[1, i] + ...), added in this order, for parts [ranks,
// length]. With `mean` the sum in parentheses is divided by `ranks`. `before` may be `total`, or
// null for 0. Any NaN gives the canonical NaN.
QSHARD_LAUNCHER_TEMPLATE((class In), AddRanks, const In* parts, int64_t ranks, int64_t length,
                         bool mean, const float* before, float* total);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_ADD_RANKS_H_
