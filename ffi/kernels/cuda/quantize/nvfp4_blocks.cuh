// NVFP4 quantization with options in blocks of any alignment: one thread per block, correct but
// slow.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_BLOCKS_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_BLOCKS_CUH_

#include <cstdint>

#include "core/hadamard.h"
#include "kernels/cuda/cast/stochastic.cuh"
#include "kernels/cuda/e2m1.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/quantize_block.h"

namespace qshard::kernels {

struct Nvfp4BlockArguments {
  Nvfp4Scales scales;
  Blocks blocks;
  bool hadamard, random;
  Regions regions;
  Blocks cells;  // grid that regions refer to
  BlockPlane<uint8_t> out;
};

template <class In>
Status LaunchNvfp4Blocks(const Exec<Cuda>& exec, const In* x, const Nvfp4BlockArguments& a) {
  const int64_t grid_rows = a.blocks.GridRows(), grid_cols = a.blocks.GridCols();
  return ForEach(exec, a.blocks.GridSize(), [=] __device__(int64_t block) {
    const Blocks& b = a.blocks;
    const int height = static_cast<int>(b.block_rows), width = static_cast<int>(b.block_cols);
    const int64_t strip = block / grid_cols, matrix = strip / grid_rows;
    const int64_t i = strip - matrix * grid_rows, j = block - strip * grid_cols;
    const int64_t row0 = i * height, col0 = j * width;
    const In* from = x + (matrix * b.rows + row0) * b.cols + col0;
    bfloat16 rotated[kHadamardSize];
    if (a.hadamard) {
      bfloat16 in[kHadamardSize];
      for (int r = 0; r < kHadamardSize; ++r) in[r] = Narrow<bfloat16>(Widen(from[r * b.cols]));
      HadamardTransform(in, rotated);
    }
    const auto element = [&](int r, int c) {
      return a.hadamard ? Widen(rotated[r]) : Widen(from[r * b.cols + c]);
    };
    int32_t bits = 0;
    for (int r = 0; r < height; ++r)
      for (int c = 0; c < width; ++c)
        bits = max(bits, FloatBits(element(r, c)) & kFloatMagnitudeMask);
    const auto s = a.scales.Of(FloatFromBits(bits), a.scales.template Shared<E2M1>(block));
    const auto code = [&](int r, int c) {
      const float v = __fmul_rn(element(r, c), s.scale);
      if (!a.random) return EncodeE2M1(v);
      const int64_t row = row0 + r, col = col0 + c;
      const int64_t cell =
          (matrix * a.cells.GridRows() + row / a.cells.block_rows) * a.cells.GridCols() +
          col / a.cells.block_cols;
      const Regions::Draw draw = a.regions.template Of<false>({cell, matrix * b.rows + row, col});
      return EncodeStochasticE2M1(v,
                                  RandomByte(Philox4x32(draw.index >> 4, draw.seed), draw.index));
    };
    if (a.out.data != nullptr) {
      a.out.scale_inv[block] = s.scale_inv;
      for (int r = 0; r < height; ++r)
        for (int c = 0; c < width; c += 2)
          a.out.data[((matrix * b.rows + row0 + r) * b.cols + col0 + c) / 2] =
              static_cast<uint8_t>(code(r, c) | code(r, c + 1) << 4);
    } else {
      a.out.scale_inv_t[(matrix * grid_cols + j) * grid_rows + i] = s.scale_inv;
      for (int c = 0; c < width; ++c)
        for (int r = 0; r < height; r += 2)
          a.out.data_t[((matrix * b.cols + col0 + c) * b.rows + row0 + r) / 2] =
              static_cast<uint8_t>(code(r, c) | code(r + 1, c) << 4);
    }
  });
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_NVFP4_BLOCKS_CUH_
