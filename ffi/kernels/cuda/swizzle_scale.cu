// swizzle_scale: scales in the tiles that block-scaled GEMMs read.
//
// A thread writes a word of a tile, four scales of a row; a warp writes 128 bytes and reads from 32
// rows. The scales are a sixteenth of a matrix or less. Any alignment; bytes go one by one where
// words cannot.
#include "kernels/block_layout.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kTileRows = 128, kTileCols = 4;

template <bool kWords>
__global__ void __launch_bounds__(kThreads)
    SwizzleKernel(const uint8_t* scale_inv, int64_t words, int64_t rows, int64_t cols,
                  int repeat_log2, int64_t down, int64_t across, uint8_t* tiles) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= words) return;
  const int64_t tile = t / kTileRows, strip = tile / across, matrix = strip / down;
  const int word = static_cast<int>(t % kTileRows);
  const int64_t row =
      ((strip - matrix * down) * kTileRows + word % 4 * 32 + word / 4) >> repeat_log2;
  const int64_t col = (tile - strip * across) * kTileCols;
  uint32_t value = 0;
  if (row < rows) {
    const uint8_t* from = scale_inv + (matrix * rows + row) * cols + col;
    if constexpr (kWords) {
      value = Load<4, Read::kCached>(from).w[0];
    } else {
#pragma unroll
      for (int i = 0; i < kTileCols; ++i)
        if (col + i < cols) value |= static_cast<uint32_t>(__ldg(from + i)) << (8 * i);
    }
  }
  if constexpr (kWords) {
    Store<Write::kCached>(tiles + t * 4, Words<4>{{value}});
  } else {
#pragma unroll
    for (int i = 0; i < kTileCols; ++i) tiles[t * 4 + i] = static_cast<uint8_t>(value >> (8 * i));
  }
}

}  // namespace

Status SwizzleScale(const Exec<Cuda>& exec, const uint8_t* scale_inv, int64_t batch, int64_t rows,
                    int64_t cols, int64_t repeat, uint8_t* tiles) {
  const int64_t down = CeilDiv(rows * repeat, kTileRows), across = CeilDiv(cols, kTileCols);
  const int64_t words = batch * down * across * kTileRows;
  if (words == 0) return {};
  int repeat_log2 = 0;
  while ((int64_t{1} << repeat_log2) < repeat) ++repeat_log2;
  const unsigned blocks = GridSize(CeilDiv(words, kThreads));
  if (cols % kTileCols == 0 && IsAligned(scale_inv, 4) && IsAligned(tiles, 4))
    SwizzleKernel<true><<<blocks, kThreads, 0, exec.stream>>>(scale_inv, words, rows, cols,
                                                              repeat_log2, down, across, tiles);
  else
    SwizzleKernel<false><<<blocks, kThreads, 0, exec.stream>>>(scale_inv, words, rows, cols,
                                                               repeat_log2, down, across, tiles);
  return LaunchStatus();
}

}  // namespace qshard::kernels
