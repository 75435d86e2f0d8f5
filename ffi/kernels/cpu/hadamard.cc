// Hadamard and AmaxHadamard on the CPU.
#include "kernels/hadamard.h"

#include <cstring>

#include "core/hadamard.h"
#include "kernels/cpu/block_pieces.h"
#include "kernels/cpu/raise_amax.h"
#include "kernels/cpu/simd.h"

namespace qshard::kernels {

template <class In>
Status Hadamard(const Exec<Cpu>& exec, const In* x, const Blocks& blocks, bfloat16* y) {
  const auto hadamard = Simd().hadamard[kInputIndex<In>];
  const int64_t element_step = blocks.block_cols == 1 ? blocks.cols : 1;
  ParallelPieces(exec, blocks, [&](const Piece& piece) {
    hadamard(x + piece.start, piece.num_blocks, element_step, blocks.block_cols, y + piece.start);
  });
  return {};
}

// A task takes 16 rows, and as many columns of a block at a time as fit on a stack.
template <class In>
Status AmaxHadamard(const Exec<Cpu>& exec, const In* x, const Blocks& blocks, float* amax,
                    float* amax_t) {
  constexpr int64_t kRows = kHadamardSize, kCols = 256;
  const int64_t down = blocks.GridRows(), across = blocks.GridCols();
  std::memset(amax, 0, blocks.GridSize() * sizeof(float));
  std::memset(amax_t, 0, blocks.GridSize() * sizeof(float));
  ParallelFor(
      exec, blocks.GridSize() == 0 ? 0 : blocks.batch * blocks.rows / kRows, [&](int64_t strip) {
        const int64_t batch = strip * kRows / blocks.rows, row = strip * kRows % blocks.rows;
        const In* from = x + strip * kRows * blocks.cols;
        In copy[kRows][kCols];
        bfloat16 rotated[kRows][kCols];
        for (int64_t col = 0, cols; col < blocks.cols; col += cols) {
          const int64_t block = col / blocks.block_cols;
          cols = std::min(kCols, (block + 1) * blocks.block_cols - col);
          for (int64_t r = 0; r < kRows; ++r)
            std::memcpy(copy[r], from + r * blocks.cols + col, cols * sizeof(In));
          Simd().hadamard[kInputIndex<In>](copy, cols, kCols, 1, rotated[0]);
          float found, found_t;
          Simd().amax[kInputIndex<In>](copy, kCols, kRows, cols, cols, &found);
          Simd().amax[kInputIndex<bfloat16>](rotated, kCols, kRows, cols, cols, &found_t);
          const int64_t grid = (batch * down + row / blocks.block_rows) * across + block;
          RaiseAmax(amax + grid, found);
          RaiseAmax(amax_t + grid, found_t);
        }
      });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, Hadamard)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, AmaxHadamard)

}  // namespace qshard::kernels
