// SwizzleScale: rearranges scales into the tiles that block-scaled GEMMs read.
//
// A thread writes a word of a tile, four scales of a row. A warp writes 128 bytes and reads from 32
// rows. Scales are at most a sixteenth of a matrix. Any alignment works, with single bytes if words
// are not aligned.
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"
#include "kernels/gemm_scales.h"

namespace qshard::kernels {
Status SwizzleScale(const Exec<Cuda>& exec, const uint8_t* scale_inv, int64_t batch, int64_t rows,
                    int64_t cols, int64_t repeat, uint8_t* tiles) {
  constexpr int kTileRows = kScaleTileRows, kTileCols = kScaleTileCols;
  const int64_t down = CeilDiv(rows * repeat, kTileRows), across = CeilDiv(cols, kTileCols);
  int repeat_log2 = 0;
  while ((int64_t{1} << repeat_log2) < repeat) ++repeat_log2;
  const bool words = cols % kTileCols == 0 && IsAligned(scale_inv, 4) && IsAligned(tiles, 4);
  return ForEach(exec, batch * down * across * kTileRows, [=] __device__(int64_t t) {
    const int64_t tile = t / kTileRows, strip = tile / across, matrix = strip / down;
    const int word = static_cast<int>(t % kTileRows);
    const int64_t row =
        ((strip - matrix * down) * kTileRows + word % 4 * 32 + word / 4) >> repeat_log2;
    const int64_t col = (tile - strip * across) * kTileCols;
    const uint8_t* from = scale_inv + (matrix * rows + row) * cols + col;
    uint8_t* to = tiles + t * kTileCols;
    if (words) {
      Words<4> value = {};
      if (row < rows) value = Load<4, Read::kCached>(from);
      Store<Write::kCached>(to, value);
    } else {
#pragma unroll
      for (int i = 0; i < kTileCols; ++i)
        to[i] = row < rows && col + i < cols ? __ldg(from + i) : 0;
    }
  });
}

}  // namespace qshard::kernels
