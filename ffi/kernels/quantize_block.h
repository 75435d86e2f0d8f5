// Quantizing in blocks with one read of x: amax of a block, scale, codes. The bits are those of the
// steps one by one (block_cast.h, block_scale.h).
#ifndef QSHARD_KERNELS_QUANTIZE_BLOCK_H_
#define QSHARD_KERNELS_QUANTIZE_BLOCK_H_

#include "kernels/block_cast.h"
#include "kernels/block_scale.h"

namespace qshard::kernels {

// --- one set of blocks ---

// Where the codes and scales go, null for what is not wanted. `_t`: stored transposed, each matrix
// for itself: data_t [batch, cols, rows], scale_inv_t [batch, GridCols, GridRows].
template <class StoredType>
struct BlockPlane {
  uint8_t* data = nullptr;
  StoredType* scale_inv = nullptr;
  uint8_t* data_t = nullptr;
  StoredType* scale_inv_t = nullptr;
};

// Of x, which is `blocks`: scale_inv[block] is that of the amax of the block, and data[i] =
// Encode<Code>(x[i] * scale of the block of i).
//
// Code is of 8 bits with FloatScales, any element with E8M0Scales, and E2M1 with Nvfp4Scales.
// Blocks of any size, cut at the edges. 4-bit codes are packed two a byte along the rows of data
// and of data_t, the even one in the low nibble; then cols is even if there is data, rows if there
// is data_t, and a side of a block is 1, or even and at most kMaxPackedSide. No pointer need be
// aligned beyond its own type.
constexpr int64_t kMaxPackedSide = 256;
QSHARD_LAUNCHER_TEMPLATE((class In, class Code, class Scales), QuantizeBlock, const In* x,
                         const Scales& scales, const Blocks& blocks,
                         const BlockPlane<typename Scales::Stored>& out);

// --- two sets of blocks, along rows and along columns ---

// Neither plane is null.
template <class StoredType>
struct BothPlanes {
  uint8_t* data;  // of blocks 1 x block_cols
  StoredType* scale_inv;
  uint8_t* second_data;  // of blocks block_rows x 1
  StoredType* second_scale_inv;
  bool second_transposed;  // how both of second are stored, as in BlockPlane
};

// QuantizeBlock of x in blocks 1 x blocks.block_cols and in blocks blocks.block_rows x 1.
//
// Nvfp4Scales: `run` is some whole matrices of blocks, as many of either set; E2M1 is packed along
// the rows of each plane as it is stored.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code, class Scales), QuantizeBlockBoth, const In* x,
                         const Scales& scales, const Blocks& blocks,
                         const BothPlanes<typename Scales::Stored>& out);

// --- NVFP4, rotated or rounded at random ---

struct Nvfp4Options {
  bool hadamard = false;           // blocks along columns are of Hadamard(x) (hadamard.h)
  const Places* places = nullptr;  // with it, codes are those of CastBlockStochastic
};

// QuantizeBlock to E2M1. Blocks are 1 x 16, 16 x 1 or 16 x 16, and whole; with `hadamard` they are
// 16 x 1, and with either option `out` has one plane.
QSHARD_LAUNCHER_TEMPLATE((class In), QuantizeNvfp4, const In* x, const Nvfp4Scales& scales,
                         const Nvfp4Options& options, const Blocks& blocks,
                         const BlockPlane<uint8_t>& out);

// QuantizeBlockBoth to E2M1, of whole blocks 16 x 16, which are those of `places`. The transposed
// plane has scales of its own.
QSHARD_LAUNCHER_TEMPLATE((class In), QuantizeNvfp4Both, const In* x, const Nvfp4Scales& scales,
                         const Nvfp4Scales& second_scales, const Nvfp4Options& options,
                         const Blocks& blocks, const BothPlanes<uint8_t>& out);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_QUANTIZE_BLOCK_H_
