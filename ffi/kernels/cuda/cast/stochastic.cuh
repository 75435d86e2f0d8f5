// Random bytes of elements, and the Philox key and index of an element.
#ifndef QSHARD_KERNELS_CUDA_CAST_STOCHASTIC_CUH_
#define QSHARD_KERNELS_CUDA_CAST_STOCHASTIC_CUH_

#include <algorithm>
#include <cstdint>

#include "core/slices.h"
#include "core/stochastic.h"
#include "kernels/block_cast.h"
#include "kernels/cuda/cast/block_map.cuh"

namespace qshard::kernels {

// Returns the random bytes of elements index to index + 15, the first in the lowest byte.
__device__ __forceinline__ Words<16> RandomBytes(uint64_t index, uint64_t seed) {
  const PhiloxWords call = Philox4x32(index >> 4, seed);
  Words<16> bytes{{call.word[0], call.word[1], call.word[2], call.word[3]}};
  const int skip = static_cast<int>(index & 15);
  if (skip != 0) {
    const PhiloxWords next = Philox4x32((index + 16) >> 4, seed);
    uint32_t w[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) w[i] = call.word[i], w[4 + i] = next.word[i];
    // Shift by 2 words, by 1 word, then by bytes.
#pragma unroll
    for (int i = 0; i < 6; ++i) w[i] = skip & 8 ? w[i + 2] : w[i];
#pragma unroll
    for (int i = 0; i < 5; ++i) w[i] = skip & 4 ? w[i + 1] : w[i];
#pragma unroll
    for (int i = 0; i < 4; ++i) bytes.w[i] = __funnelshift_r(w[i], w[i + 1], skip % 4 * 8);
  }
  return bytes;
}

__device__ __forceinline__ uint32_t ByteOf(const Words<16>& bytes, int i) {
  return bytes.w[i / 4] >> (i % 4 * 8) & 0xFF;
}

// The regions of Philox, with the grid that they refer to.
struct Regions {
  Philox philox;
  int64_t grid_rows, grid_cols;          // of a matrix
  int64_t rows, block_rows, block_cols;  // of a matrix, and of a block
  Divider run, blocks_across, blocks_down;

  struct Draw {
    uint64_t index, seed;
  };

  // Returns the index and key of an element. `kSmall`: HasSmallIndices holds for the grid.
  template <bool kSmall>
  __device__ __forceinline__ Draw Of(const BlockPlace& p) const {
    const auto divide = [](int64_t n, const Divider& by, int64_t number) {
      return kSmall ? by.Divide(static_cast<uint32_t>(n)) : n / number;
    };
    const int64_t region = divide(p.block, run, philox.run);
    const int64_t down = divide(region * philox.run, blocks_across, grid_cols);
    const int64_t matrix = divide(down, blocks_down, grid_rows);
    const int64_t first_row = matrix * rows + (down - matrix * grid_rows) * block_rows;
    const int64_t first_col = (region * philox.run - down * grid_cols) * block_cols;
    const uint64_t index = FromWords(philox.offset + 2 * region) +
                           static_cast<uint64_t>(p.row - first_row) * philox.steps.row +
                           static_cast<uint64_t>(p.col - first_col) * philox.steps.col;
    return {index, FromWords(philox.seed + 2 * region)};
  }
};

inline Regions RegionsOf(const Philox& philox, const Blocks& b) {
  const int64_t most = kMaxDivided - 1;
  return {philox,
          b.GridRows(),
          b.GridCols(),
          b.rows,
          b.block_rows,
          b.block_cols,
          Divider(std::min(philox.run, most)),
          Divider(std::min(b.GridCols(), most)),
          Divider(std::min(b.GridRows(), most))};
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_CAST_STOCHASTIC_CUH_
