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
// the other half stays. Code is any element. With `seeds`, of E2M1 alone, it is EncodeStochastic:
// element i of weight w draws with seeds[w] and index i.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastSlices, const Slice* slices, int64_t n,
                         const uint32_t* starts, const uint32_t* seeds, const SliceRule& rule,
                         const float* scale);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_SLICES_H_
