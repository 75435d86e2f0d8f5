// Launchers of fused block quantization: amax, scale and codes of blocks in one read of x, with the
// bits of the separate steps (block_cast.h, block_scale.h).
#ifndef QSHARD_KERNELS_QUANTIZE_BLOCK_H_
#define QSHARD_KERNELS_QUANTIZE_BLOCK_H_

#include "kernels/block_cast.h"
#include "kernels/block_scale.h"

namespace qshard::kernels {

// --- one set of blocks ---

// Output pointers, null for outputs that are not requested. `_t` outputs are stored transposed,
// matrix by matrix: data_t [batch, cols, rows], scale_inv_t [batch, GridCols, GridRows].
template <class StoredType>
struct BlockPlane {
  uint8_t* data = nullptr;
  StoredType* scale_inv = nullptr;
  uint8_t* data_t = nullptr;
  StoredType* scale_inv_t = nullptr;
};

// Quantizes x, laid out as `blocks`: scale_inv[block] from the block's amax, and data[i] =
// Encode<Code>(x[i] * scale of the block of i).
//
// Code is an 8-bit element with FloatScales, any element with E8M0Scales, and E2M1 with
// Nvfp4Scales. Blocks may have any size and may be partial at the edges. 4-bit codes are packed two
// to a byte along the rows of data and data_t, the even one in the low nibble. Then cols must be
// even for data and rows for data_t, and a side of a block must be 1, or even and at most
// kMaxPackedSide. Pointers need no more alignment than their type.
constexpr int64_t kMaxPackedSide = 256;
QSHARD_LAUNCHER_TEMPLATE((class In, class Code, class Scales), QuantizeBlock, const In* x,
                         const Scales& scales, const Blocks& blocks,
                         const BlockPlane<typename Scales::Stored>& out);

// --- two sets of blocks, along rows and along columns ---

// Output pointers of two planes, none null.
template <class StoredType>
struct BothPlanes {
  uint8_t* data;  // of blocks 1 x block_cols
  StoredType* scale_inv;
  uint8_t* second_data;  // of blocks block_rows x 1
  StoredType* second_scale_inv;
  bool second_transposed;  // whether the second plane is stored transposed
};

// Runs QuantizeBlock on x in blocks 1 x blocks.block_cols and in blocks blocks.block_rows x 1.
//
// For Nvfp4Scales, `run` must cover whole matrices of blocks, equally many of either set. E2M1 is
// packed along the rows of each plane as stored.
QSHARD_LAUNCHER_TEMPLATE((class In, class Code, class Scales), QuantizeBlockBoth, const In* x,
                         const Scales& scales, const Blocks& blocks,
                         const BothPlanes<typename Scales::Stored>& out);

// --- NVFP4 with Hadamard transform or stochastic rounding ---

struct Nvfp4Options {
  bool hadamard = false;           // transform blocks along columns first (hadamard.h)
  const Philox* philox = nullptr;  // if set, round as in CastBlockStochastic
};

// QuantizeBlock to E2M1, in whole blocks of 1 x 16, 16 x 1 or 16 x 16. With `hadamard` they must be
// 16 x 1, and with either option `out` must have one plane.
QSHARD_LAUNCHER_TEMPLATE((class In), QuantizeNvfp4, const In* x, const Nvfp4Scales& scales,
                         const Nvfp4Options& options, const Blocks& blocks,
                         const BlockPlane<uint8_t>& out);

// QuantizeBlockBoth to E2M1, in whole blocks of 16 x 16, which `philox` also refers to. The
// transposed plane has its own scales.
QSHARD_LAUNCHER_TEMPLATE((class In), QuantizeNvfp4Both, const In* x, const Nvfp4Scales& scales,
                         const Nvfp4Scales& second_scales, const Nvfp4Options& options,
                         const Blocks& blocks, const BothPlanes<uint8_t>& out);

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_QUANTIZE_BLOCK_H_
