// Hadamard transforms and their amaxes on the CPU.
#include "kernels/hadamard.h"

#include <algorithm>
#include <cstring>

#include "core/hadamard.h"
#include "kernels/cpu/block_spans.h"
#include "kernels/cpu/raise_amax.h"
#include "kernels/cpu/simd.h"
#include "kernels/grouped.h"

namespace qshard::kernels {

template <class In>
Status Hadamard(const Exec<Cpu>& exec, const In* x, const Blocks& blocks, bfloat16* y) {
  const auto hadamard = Simd().hadamard[kInputIndex<In>];
  const int64_t element_step = blocks.block_cols == 1 ? blocks.cols : 1;
  ParallelSpans(exec, blocks, [&](const BlockSpan& span) {
    hadamard(x + span.start, span.num_blocks, element_step, blocks.block_cols, y + span.start);
  });
  return {};
}

namespace {

// Rows that the transform of a column mixes, and columns at a time, so that copies fit on a stack.
constexpr int64_t kRows = kHadamardSize, kCols = 256;

// Raises two amaxes to the amaxes of `cols` columns of a strip and of its transform. row_at(r)
// returns row r of the strip, or null for zeros.
template <class In, class RowAt>
void RaiseAmaxesOfStrip(int64_t cols, const RowAt& row_at, float* amax, float* amax_t) {
  In copy[kRows][kCols];
  bfloat16 rotated[kRows][kCols];
  for (int64_t col = 0; col < cols; col += kCols) {
    const int64_t width = std::min(kCols, cols - col);
    for (int64_t r = 0; r < kRows; ++r) {
      if (const In* from = row_at(r))
        std::memcpy(copy[r], from + col, width * sizeof(In));
      else
        std::fill_n(copy[r], width, In{});
    }
    Simd().hadamard[kInputIndex<In>](copy, width, kCols, 1, rotated[0]);
    float found, found_t;
    Simd().amax[kInputIndex<In>](copy, kCols, kRows, width, width, &found);
    Simd().amax[kInputIndex<bfloat16>](rotated, kCols, kRows, width, width, &found_t);
    RaiseAmax(amax, found);
    RaiseAmax(amax_t, found_t);
  }
}

}  // namespace

// A task takes a strip of 16 rows.
template <class In>
Status AmaxHadamard(const Exec<Cpu>& exec, const In* x, const Blocks& blocks, float* amax,
                    float* amax_t) {
  const int64_t down = blocks.GridRows(), across = blocks.GridCols();
  std::memset(amax, 0, blocks.GridSize() * sizeof(float));
  std::memset(amax_t, 0, blocks.GridSize() * sizeof(float));
  const int64_t strips = blocks.GridSize() == 0 ? 0 : blocks.batch * blocks.rows / kRows;
  ParallelFor(exec, strips, [&](int64_t strip) {
    const int64_t batch = strip * kRows / blocks.rows, row = strip * kRows % blocks.rows;
    for (int64_t block = 0; block < across; ++block) {
      const int64_t col = block * blocks.block_cols;
      const In* from = x + strip * kRows * blocks.cols + col;
      const int64_t grid = (batch * down + row / blocks.block_rows) * across + block;
      RaiseAmaxesOfStrip<In>(
          std::min(blocks.block_cols, blocks.cols - col),
          [&](int64_t r) { return from + r * blocks.cols; }, amax + grid, amax_t + grid);
    }
  });
  return {};
}

template <class In>
Status AmaxHadamardGrouped(const Exec<Cpu>& exec, const In* x, int64_t cols, const RowMap& map,
                           const ExpertStops& experts, float* amax, float* amax_t) {
  std::fill_n(amax, experts.count, 0.0f);
  std::fill_n(amax_t, experts.count, 0.0f);
  ParallelFor(exec, map.count / kRows, [&](int64_t strip) {
    const int64_t row = strip * kRows, expert = experts.ExpertOf(row);
    if (expert == experts.count) return;
    const auto row_at = [&](int64_t r) -> const In* {
      const int64_t own = map.Of(row + r);
      return own < 0 ? nullptr : x + own * cols;
    };
    RaiseAmaxesOfStrip<In>(cols, row_at, amax + expert, amax_t + expert);
  });
  return {};
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, Hadamard)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, AmaxHadamard)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cpu, AmaxHadamardGrouped)

}  // namespace qshard::kernels
