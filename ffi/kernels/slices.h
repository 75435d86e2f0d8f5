#ifndef QSHARD_KERNELS_SLICES_H_
#define QSHARD_KERNELS_SLICES_H_

#include "core/slices.h"
#include "kernels/launcher.h"

// Quantization of flat slices of n weights in one call. `slices` is in host memory for the duration
// of the call. starts [n, 2], seeds [n, 2] and everything that `slices` points to are where `exec`
// runs.
namespace qshard::kernels {

// Raises amax, which has the grids of all weights back to back, then amaxes per weight or per row.
// Each becomes the maximum of itself and the slice's elements, as bit patterns. Any NaN gives the
// canonical NaN.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxSlices, const Slice* slices, int64_t n,
                         const uint32_t* starts, const SliceRule& rule, float* amax);

// data[i] = Encode<Code>(x[i - start] * scale[block of i]), or of ScaledOrNan with
// Nonfinite::kNan, for the elements i of each slice. Nothing more is written: if the slice has half
// of a byte, the other half stays. Code is any element. With `seeds`, for E2M1 only, it is
// EncodeStochastic with key seeds[w] and Philox index i in weight w.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastSlices, const Slice* slices, int64_t n,
                         const uint32_t* starts, const uint32_t* seeds, const SliceRule& rule,
                         const float* scale);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_SLICES_H_
