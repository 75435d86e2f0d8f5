#ifndef QSHARD_KERNELS_SLICES_H_
#define QSHARD_KERNELS_SLICES_H_

#include "core/slices.h"
#include "kernels/launcher.h"

// Quantizing flat slices of n weights at once. `slices` is on the host and lives as long as the
// call; starts [n, 2], seeds [n, 2] and everything that `slices` points to are where `exec` runs.
namespace qshard::kernels {

// amax: the grids of all weights, one after the other, then whole-weight or row amaxes of all. Each
// becomes the larger of itself and of what the slice has, as bit patterns; any NaN the canonical
// one.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxSlices, const Slice* slices, int64_t n,
                         const uint32_t* starts, const SliceRule& rule, float* amax);

// data[i] = Encode<Code>(x[i - start] * scale[block of i]), of ShownProduct if infinities are to
// show, for the elements i of each slice, and nothing else: of a byte that the slice has half of,
// the other half stays. Code is any element.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastSlices, const Slice* slices, int64_t n,
                         const uint32_t* starts, const SliceRule& rule, const float* scale);

// The same with EncodeStochastic: element i of weight w draws with seeds[w] and index i.
QSHARD_LAUNCHER_TEMPLATE((class In), CastSlicesStochastic, const Slice* slices, int64_t n,
                         const uint32_t* starts, const uint32_t* seeds, const SliceRule& rule,
                         const float* scale);

// Matrices [batch, rows, cols] of elements of `bits`, and their transposes. Bits are 4, two
// elements a byte along rows before and after; 8; or 32.
struct TransposePair {
  const uint8_t* data;
  uint8_t* data_t;
  int64_t batch, rows, cols, bits;
};

// data_t[b, j, i] = data[b, i, j] for n pairs.
QSHARD_LAUNCHER(TransposeEach, const TransposePair* pairs, int64_t n);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_SLICES_H_
