#ifndef QSHARD_KERNELS_TRANSPOSE_H_
#define QSHARD_KERNELS_TRANSPOSE_H_

#include <cstdint>

#include "kernels/launcher.h"

namespace qshard::kernels {

// Matrices [batch, rows, cols] of elements of `bits` bits, and their transposes. `bits` is 4,
// packed along rows of both, 8 or 32.
struct TransposePair {
  const uint8_t* data;
  uint8_t* data_t;
  int64_t batch, rows, cols, bits;
};

// data_t[b, j, i] = data[b, i, j] for n pairs, which are in host memory.
QSHARD_LAUNCHER(TransposeEach, const TransposePair* pairs, int64_t n);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_TRANSPOSE_H_
