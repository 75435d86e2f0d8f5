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

// data[p, j] = Encode<Code>(x[row of p, j] * scale of the expert of p), or of ScaledOrNan with
// Nonfinite::kNan. Code 0 in rows of no expert. data_t, unless null, is the transpose.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastGrouped, const In* x, int64_t cols,
                         const RowMap& map, const ExpertScales& scales, uint8_t* data,
                         uint8_t* data_t);

// QuantizeBlock and QuantizeBlockBoth of the gathered rows, which `blocks` describe.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code, class Scales), QuantizeBlockRows, const In* x,
                         const RowMap& map, const Scales& scales, const Blocks& blocks,
                         const BlockPlane<typename Scales::Stored>& out);
QSHARD_LAUNCHER_TEMPLATE((class In, class Code, class Scales), QuantizeBlockBothRows, const In* x,
                         const RowMap& map, const Scales& scales, const Blocks& blocks,
                         const BothPlanes<typename Scales::Stored>& out);

// --- NVFP4: experts own strips of kNvfp4Block padded rows ---
//
// The expert of its first row owns a strip. Rows of no expert are zeros.

// AmaxGrouped, and in amax_t the amax of the Hadamard transform of each strip along columns.
// map.count must be a multiple of kNvfp4Block.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxHadamardGrouped, const In* x, int64_t cols,
                         const RowMap& map, const ExpertStops& experts, float* amax, float* amax_t);

// Scales and random numbers of each expert.
struct Nvfp4Experts {
  ExpertStops stops;
  const float* global_amax;    // of blocks in the order of rows
  const float* global_amax_t;  // of blocks along columns
  float scale_max;
  Nonfinite nonfinite;
  // If set, round as in CastBlockStochastic with these keys, uint64 as two uint32, low first. The
  // Philox index is the index of an element in the padded rows of its expert.
  const uint32_t* seeds = nullptr;
};

// Output pointers. A plane has both pointers. The transposed plane is optional.
struct Nvfp4RowPlanes {
  uint8_t* data;  // of blocks 1 x 16, or 16 x 16 if `square`
  uint8_t* scale_inv;
  uint8_t* data_t = nullptr;  // of blocks 16 x 1, of the Hadamard transform if `hadamard`
  uint8_t* scale_inv_t = nullptr;
  bool square = false, hadamard = false;
};

// QuantizeNvfp4 or QuantizeNvfp4Both of the gathered rows of each expert. cols must be a multiple
// of kNvfp4Block, and with `square` or a transposed plane map.count too.
QSHARD_LAUNCHER_TEMPLATE((class In), QuantizeNvfp4Rows, const In* x, int64_t cols,
                         const RowMap& map, const Nvfp4Experts& experts, const Nvfp4RowPlanes& out);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_GROUPED_H_
