#ifndef QSHARD_KERNELS_BLOCK_CAST_H_
#define QSHARD_KERNELS_BLOCK_CAST_H_

#include "core/block.h"
#include "core/block_scale.h"
#include "core/stochastic.h"
#include "kernels/launcher.h"

// The separate steps of block quantization. x has the layout `blocks`, and per-block values have
// its grid. 4-bit codes are packed two to a byte, the even element in the low nibble, which needs
// even cols. Blocks may have any size and may be partial at the edges. x and data need no more
// alignment than their type.
namespace qshard::kernels {

// amax[block] = max |x| as a maximum over bit patterns. Any NaN gives the canonical NaN.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxBlock, const In* x, const Blocks& blocks, float* amax);

// data[i] = Encode<Code>(x[i] * scale[block of i]), for any element format.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastBlock, const In* x, const float* scale,
                         const Blocks& blocks, uint8_t* data);

// Philox keys and offsets for regions of x. A region has `run` consecutive blocks of the row-major
// grid: one block, one row of blocks, one matrix, or several matrices. Element (row, col) of region
// r, counted from its first block over all its matrices, has key seed[r] and the index
//   offset[r] + row * steps.row + col * steps.col
// `seed` and `offset` are uint64 as two uint32, low first. `in_step`: regions are parts of a row of
// blocks with one row of elements, and the region below has the same seed and starts steps.row
// later.
struct Philox {
  const uint32_t* seed;
  const uint32_t* offset;
  int64_t run;
  IndexSteps steps;
  bool in_step = false;
};

constexpr int64_t kMaxStochasticBlockCols = 2048;  // so that random bytes fit on a stack

// data[i] = EncodeStochastic(x[i] * scale[block of i], random byte of i), as packed E2M1.
QSHARD_LAUNCHER_TEMPLATE((class In), CastBlockStochastic, const In* x, const float* scale,
                         const Philox& philox, const Blocks& blocks, uint8_t* data);

// x[i] = Narrow<Out>(Decode<Code>(data[i]) * value of scale_inv[block of i]). Code is E4M3 or E5M2
// with float scales, or any element with E8M0 scales. NaN is canonical.
QSHARD_LAUNCHER_TEMPLATE((class Code, class Scale, class Out), DequantizeBlock, const uint8_t* data,
                         const typename StoredScale<Scale>::Type* scale_inv, const Blocks& blocks,
                         Out* x);

// x[i] = Narrow<Out>(Decode<E2M1>(data[i]) * fl(d * g)), where d is the E4M3 scale_inv of the block
// of i and g = global_scale_inv[block / run]. NaN is canonical.
QSHARD_LAUNCHER_TEMPLATE((class Out), DequantizeNvfp4, const uint8_t* data,
                         const uint8_t* scale_inv, const float* global_scale_inv, int64_t run,
                         const Blocks& blocks, Out* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_BLOCK_CAST_H_
