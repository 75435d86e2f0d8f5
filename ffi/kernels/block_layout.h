#ifndef QSHARD_KERNELS_BLOCK_LAYOUT_H_
#define QSHARD_KERNELS_BLOCK_LAYOUT_H_

#include "core/block.h"
#include "kernels/launcher.h"

namespace qshard::kernels {

// y = HadamardTransform (core/hadamard.h) of each block of x, rounded to bfloat16 first. `blocks`
// are whole, 1 x 16 or 16 x 1.
QSHARD_LAUNCHER_TEMPLATE((class In), Hadamard, const In* x, const Blocks& blocks, bfloat16* y);

// amax[block] = max |x|, amax_t[block] = max |y| with y = Hadamard of x in blocks 16 x 1, as maxima
// over bit patterns; any NaN gives the canonical one. `blocks` are whole, of a multiple of 16 rows.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxHadamard, const In* x, const Blocks& blocks, float* amax,
                         float* amax_t);

// Matrices [batch, rows, cols] of elements of `bits`, and their transposes. Bits are 4, two
// elements a byte along rows before and after; 8; or 32.
struct TransposePair {
  const uint8_t* data;
  uint8_t* data_t;
  int64_t batch, rows, cols, bits;
};

// data_t[b, j, i] = data[b, i, j] for n pairs, which are on the host.
QSHARD_LAUNCHER(TransposeEach, const TransposePair* pairs, int64_t n);

// Scales [batch, rows, cols] in the tiles that block-scaled GEMMs read, [batch, tile_rows,
// tile_cols, 32, 4, 4]: row r of the repeated scales is row r / repeat, and its column c goes to
//   ((r / 128) * tile_cols + c / 4) * 512 + (r % 32) * 16 + (r % 128) / 32 * 4 + c % 4
// tile_rows = ceil(rows * repeat / 128), tile_cols = ceil(cols / 4). What is left is zero. `repeat`
// divides 128.
QSHARD_LAUNCHER(SwizzleScale, const uint8_t* scale_inv, int64_t batch, int64_t rows, int64_t cols,
                int64_t repeat, uint8_t* tiles);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_BLOCK_LAYOUT_H_
