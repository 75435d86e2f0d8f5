// Transposes codes through panels that stay in L2, in tiles of 64 x 64 bytes.
#ifndef QSHARD_KERNELS_CPU_PANEL_H_
#define QSHARD_KERNELS_CPU_PANEL_H_

#include <algorithm>

#include "kernels/cpu/simd.h"
#include "kernels/cpu/stream.h"

namespace qshard::kernels {

constexpr int64_t kPanelRows = 256, kPanelCols = 256;

struct Panel {
  // Writes the first `height` bytes of each of the first `cols` columns to out, out + stride, and
  // so on; around the caches if `stream`. Forced inline, because the copies of a call are slower by
  // a tenth in DRAM.
  QSHARD_INLINE void Transpose(int64_t height, int64_t cols, uint8_t* out, int64_t stride,
                               bool stream) {
    const auto transpose = Simd().transpose;
    for (int64_t j = 0; j < cols; j += kByteTile) {
      uint8_t* to = out + j * stride;
      const bool direct = !stream && j + kByteTile <= cols && height == kPanelRows;
      for (int64_t i = 0; i < height; i += kByteTile)
        transpose(codes[i] + j, sizeof(codes[0]), direct ? to + i : transposed[0] + i,
                  direct ? stride : kPanelRows);
      for (int64_t k = 0; k < std::min(kByteTile, cols - j) && !direct; ++k)
        CopyRow<kPanelRows>(to + k * stride, transposed[k], height, stream);
    }
  }

  alignas(kLineBytes) uint8_t transposed[kByteTile][kPanelRows];
  // The extra line spreads rows over the sets of a cache.
  alignas(kLineBytes) uint8_t codes[kPanelRows][kPanelCols + kLineBytes];
};

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CPU_PANEL_H_
