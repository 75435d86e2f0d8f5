#ifndef QSHARD_KERNELS_HADAMARD_H_
#define QSHARD_KERNELS_HADAMARD_H_

#include "core/block.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// y = HadamardTransform (core/hadamard.h) of each block of x, rounded to bfloat16 first. `blocks`
// must be whole, 1 x 16 or 16 x 1.
QSHARD_LAUNCHER_TEMPLATE((class In), Hadamard, const In* x, const Blocks& blocks, bfloat16* y);

// amax[block] = max |x|, and amax_t[block] = max |y| with y = Hadamard of x in blocks 16 x 1. Both
// are maxima over bit patterns, and any NaN gives the canonical NaN. `blocks` must be whole, with a
// multiple of 16 rows.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxHadamard, const In* x, const Blocks& blocks, float* amax,
                         float* amax_t);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_HADAMARD_H_
