// SwizzleScale on the CPU. A task takes a row of tiles.
#include <algorithm>
#include <cstring>

#include "kernels/cpu/parallel_for.h"
#include "kernels/gemm_scales.h"

namespace qshard::kernels {

Status SwizzleScale(const Exec<Cpu>& exec, const uint8_t* scale_inv, int64_t batch, int64_t rows,
                    int64_t cols, int64_t repeat, uint8_t* tiles) {
  constexpr int64_t kRows = kScaleTileRows, kCols = kScaleTileCols, kBytes = kRows * kCols;
  const int64_t scales = kRows / repeat;  // rows of scales in a tile
  const int64_t down = CeilDiv(rows, scales), across = CeilDiv(cols, kCols);
  ParallelFor(exec, batch * down, [&](int64_t strip) {
    const int64_t row = strip % down * scales;
    const uint8_t* in = scale_inv + (strip / down * rows + row) * cols;
    const int64_t height = std::min(scales, rows - row) * repeat;
    for (int64_t t = 0; t < across; ++t) {
      uint8_t* tile = tiles + (strip * across + t) * kBytes;
      const int64_t width = std::min(kCols, cols - t * kCols);
      if (height < kRows || width < kCols) std::memset(tile, 0, kBytes);
      for (int64_t r = 0; r < height; ++r)
        std::memcpy(tile + r % 32 * 16 + r / 32 * 4, in + r / repeat * cols + t * kCols, width);
    }
  });
  return {};
}

}  // namespace qshard::kernels
