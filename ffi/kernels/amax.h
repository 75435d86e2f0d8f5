#ifndef QSHARD_KERNELS_AMAX_H_
#define QSHARD_KERNELS_AMAX_H_

#include "kernels/launcher.h"

namespace qshard::kernels {

// amax[r] = max |x| over run r of x [runs, length], as a maximum over the bit patterns of |x|: NaN
// propagates, as kNanBits; the result does not depend on the order. An empty run has amax 0.
QSHARD_LAUNCHER_TEMPLATE((class In), Amax, const In* x, int64_t runs, int64_t length, float* amax);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_AMAX_H_
