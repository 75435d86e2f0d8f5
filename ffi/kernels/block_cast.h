#ifndef QSHARD_KERNELS_BLOCK_CAST_H_
#define QSHARD_KERNELS_BLOCK_CAST_H_

#include "core/block.h"
#include "core/block_scale.h"
#include "core/stochastic.h"
#include "kernels/launcher.h"

// The steps of quantizing in blocks. x is `blocks`; values of blocks are its grid. 4-bit codes are
// packed two a byte, the even element in the low nibble, and then cols is even. Blocks of any size,
// cut at the edges; no part of x or data need be aligned beyond its own type.
namespace qshard::kernels {

// amax[block] = max |x| as a maximum over bit patterns; any NaN gives the canonical one.
QSHARD_LAUNCHER_TEMPLATE((class In), AmaxBlock, const In* x, const Blocks& blocks, float* amax);

// data[i] = Encode<Code>(x[i] * scale[block of i]). Code is any element.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code), CastBlock, const In* x, const float* scale,
                         const Blocks& blocks, uint8_t* data);

// Where the elements of a region are in the whole tensor. The grid, row-major, is cut into regions
// of `run` blocks: one block, one row of blocks, one matrix, or several matrices. Element (row,
// col) of region r, counted from its first block over all its matrices, has the index
//   first[r] + row * steps.row + col * steps.col
// and draws with seed[r]. Both are pairs of words, the low one first. `in_step`: a region is part
// of a row of blocks, of one row of elements, and the one below it has the same seed and begins
// steps.row later.
struct Places {
  const uint32_t* seed;
  const uint32_t* first;
  int64_t run;
  IndexSteps steps;
  bool in_step = false;
};

constexpr int64_t kMaxStochasticBlockCols = 2048;  // so that random bytes fit on a stack

// data[i] = EncodeStochastic(x[i] * scale[block of i], the random byte of i), E2M1, packed.
QSHARD_LAUNCHER_TEMPLATE((class In), CastBlockStochastic, const In* x, const float* scale,
                         const Places& places, const Blocks& blocks, uint8_t* data);

// x[i] = Narrow<Out>(Decode<Code>(data[i]) * value of scale_inv[block of i]). Code is E4M3 or E5M2,
// or with Scale E8M0 in place of float any element. NaN is canonical.
QSHARD_LAUNCHER_TEMPLATE((class Code, class Scale, class Out), DequantizeBlock, const uint8_t* data,
                         const typename StoredScale<Scale>::Type* scale_inv, const Blocks& blocks,
                         Out* x);

// x[i] = Narrow<Out>(Decode<E2M1>(data[i]) * fl(d * g)), with d the E4M3 scale_inv of the block of
// i and g = global_scale_inv[block / run]. NaN is canonical.
QSHARD_LAUNCHER_TEMPLATE((class Out), DequantizeNvfp4, const uint8_t* data,
                         const uint8_t* scale_inv, const float* global_scale_inv, int64_t run,
                         const Blocks& blocks, Out* x);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_BLOCK_CAST_H_
