// Launchers that quantize the rows of all experts at once. They gather rows of x into padded rows
// (core/padded_rows.h), with the bits of the other launchers on the gathered rows. Padding is a row
// of zeros.
#ifndef QSHARD_KERNELS_GROUPED_H_
#define QSHARD_KERNELS_GROUPED_H_

#include "core/padded_rows.h"
#include "kernels/quantize_block.h"

namespace qshard::kernels {

// amax[e] = max |x| over the rows of expert e, as a maximum over bit patterns. NaN propagates as
// kNanBits. An expert without rows has amax 0.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxGrouped, const In* x, int64_t cols, const RowMap& map,
                         const ExpertStops& experts, float* amax);

// One scale for each expert.
struct ExpertScales {
  using Stored = float;
  const float* scale;
  ExpertStops experts;
  Nonfinite nonfinite;
};

// data[p, j] = Encode<Code>(x[row of p, j] * scale of the expert of p), or of ShownProduct with
// Nonfinite::kNan. Code 0 in rows of no expert. data_t, unless null, is the transpose.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastGrouped, const In* x, int64_t cols,
                         const RowMap& map, const ExpertScales& scales, uint8_t* data,
                         uint8_t* data_t);

// QuantizeBlock of the gathered rows in blocks of 1 x block_cols, and unless the second plane is
// null in blocks of block_cols x 1, stored transposed.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code, class Scales), QuantizeBlockRows, const In* x,
                         int64_t cols, const RowMap& map, int64_t block_cols, const Scales& scales,
                         const BothPlanes<typename Scales::Stored>& out);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GROUPED_H_
