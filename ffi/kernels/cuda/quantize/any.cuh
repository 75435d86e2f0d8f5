// Quantization in blocks of any size and alignment: correct, but slow.
//
// A team, a warp or a thread block, takes a unit: one block, or enough blocks that no byte of 4-bit
// codes belongs to two units. It reads x two or three times.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_ANY_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_ANY_CUH_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/padded_rows.h"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/quantize/scales.cuh"

namespace qshard::kernels {

constexpr int kUnitThreads = 256;

struct Units {
  // `packed`: two codes a byte.
  Units(const Blocks& b, bool packed)
      : rows(packed && b.block_rows % 2 == 1 ? 2 : 1),
        cols(packed && b.block_cols % 2 == 1 ? 2 : 1),
        down(CeilDiv(b.GridRows(), rows)),
        across(CeilDiv(b.GridCols(), cols)),
        count(b.batch * down * across) {}

  int rows, cols;  // blocks of a unit
  int64_t down, across, count;
};

// Floats with a runtime type, so that one kernel serves all.
struct AnyFloats {
  template <class In>
  explicit AnyFloats(const In* x)
      : data(x), wide(sizeof(In) == 4), brain(std::is_same_v<In, bfloat16>) {}
  __device__ __forceinline__ float At(int64_t i) const {
    if (wide) return static_cast<const float*>(data)[i];
    const uint16_t bits = static_cast<const uint16_t*>(data)[i];
    return brain ? Widen(bfloat16{bits}) : Widen(float16{bits});
  }

  const void* data;
  bool wide, brain;
};

// The elements of padded rows, which have `cols` columns.
struct GatheredFloats {
  __device__ __forceinline__ float At(int64_t i) const {
    const int64_t padded = i / cols, row = map.Of(padded);
    return row < 0 ? 0.0f : x.At(row * cols + (i - padded * cols));
  }

  AnyFloats x;
  RowMap map;
  int64_t cols;
};

// Calls body(row, col) for this thread's share of the elements of [rows, cols].
template <int kTeam, class Body>
__device__ __forceinline__ void ForElements(int thread, int64_t rows, int64_t cols,
                                            const Body& body) {
  if (rows <= 0 || cols <= 0) return;
  // One division, for the first element. Each step moves `down` rows and `right` columns.
  int64_t row = thread, col = 0, down = kTeam, right = 0;
  if (cols > kTeam) {
    row = 0, col = thread, down = 0, right = kTeam;
  } else if (cols > 1) {
    const int width = static_cast<int>(cols);
    row = thread / width, col = thread % width, down = kTeam / width, right = kTeam % width;
  }
#pragma unroll 4
  while (row < rows) {
    body(row, col);
    row += down, col += right;
    if (col >= cols) col -= cols, ++row;
  }
}

template <class Code, class Scales, int kTeam, class Floats>
__global__ void __launch_bounds__(kUnitThreads)
    QuantizeUnits(const Floats x, const Scales scales, const Blocks b, const Units units,
                  const BlockPlane<typename Scales::Stored> out) {
  constexpr int kTeams = kUnitThreads / kTeam;
  const int thread = threadIdx.x % kTeam;
  const int64_t grid_rows = b.GridRows(), grid_cols = b.GridCols();
  for (int64_t unit = int64_t{blockIdx.x} * kTeams + threadIdx.x / kTeam; unit < units.count;
       unit += int64_t{gridDim.x} * kTeams) {
    const int64_t strip = unit / units.across, matrix = strip / units.down;
    const int64_t i0 = (strip - matrix * units.down) * units.rows;
    const int64_t j0 = (unit - strip * units.across) * units.cols;
    const int64_t row0 = i0 * b.block_rows, col0 = j0 * b.block_cols;
    const int64_t height = min(b.rows - row0, units.rows * b.block_rows);
    const int64_t width = min(b.cols - col0, units.cols * b.block_cols);
    const int64_t from = (matrix * b.rows + row0) * b.cols + col0;

    float scale[2][2];
    for (int i = 0; i < units.rows && i0 + i < grid_rows; ++i) {
      for (int j = 0; j < units.cols && j0 + j < grid_cols; ++j) {
        const int64_t block = from + i * b.block_rows * b.cols + j * b.block_cols;
        int32_t bits = 0;
        ForElements<kTeam>(
            thread, min(height - i * b.block_rows, b.block_rows),
            min(width - j * b.block_cols, b.block_cols), [&](int64_t row, int64_t col) {
              bits = max(bits, FloatBits(x.At(block + row * b.cols + col)) & kFloatMagnitudeMask);
            });
        const float amax = FloatFromBits(TeamMax<kTeam>(bits));
        if constexpr (kTeam > kWarp) __syncthreads();
        const int64_t place = (matrix * grid_rows + i0 + i) * grid_cols + j0 + j;
        const auto s = scales.Of(amax, scales.template Shared<Code>(place));
        scale[i][j] = s.scale;
        if (thread == 0) {
          if (out.scale_inv != nullptr) out.scale_inv[place] = s.scale_inv;
          if (out.scale_inv_t != nullptr)
            out.scale_inv_t[(matrix * grid_cols + j0 + j) * grid_rows + i0 + i] = s.scale_inv;
        }
      }
    }

    const auto encode = [&](int64_t row, int64_t col) {
      const bool i = row >= b.block_rows, j = col >= b.block_cols;
      const float s = i ? (j ? scale[1][1] : scale[1][0]) : (j ? scale[0][1] : scale[0][0]);
      return EncodeOne<Code>(__fmul_rn(x.At(from + row * b.cols + col), s));
    };
    const auto write = [&](uint8_t* to, int64_t at, int64_t rows, int64_t cols, int64_t step,
                           const auto& code) {
      constexpr int kPerByte = 8 / kStoredBits<Code>;
      ForElements<kTeam>(thread, rows, cols / kPerByte, [&](int64_t row, int64_t c) {
        uint32_t byte = code(row, kPerByte * c);
        if constexpr (kPacked<Code>) byte |= code(row, 2 * c + 1) << 4;
        to[(at + row * step) / kPerByte + c] = static_cast<uint8_t>(byte);
      });
    };
    if (out.data != nullptr) write(out.data, from, height, width, b.cols, encode);
    if (out.data_t != nullptr)
      write(out.data_t, (matrix * b.cols + col0) * b.rows + row0, width, height, b.rows,
            [&](int64_t col, int64_t row) { return encode(row, col); });
  }
}

// `x`: AnyFloats or GatheredFloats.
template <class Code, class Floats, class Scales>
Status LaunchQuantizeUnits(const Exec<Cuda>& exec, const Floats& x, const Scales& scales,
                           Blocks blocks, const BlockPlane<typename Scales::Stored>& out) {
  blocks.block_rows = std::min(blocks.block_rows, blocks.rows);
  blocks.block_cols = std::min(blocks.block_cols, blocks.cols);
  const Units units(blocks, kPacked<Code>);
  const bool large = blocks.block_rows * blocks.block_cols > 1024;
  const int64_t wanted = CeilDiv(units.count, large ? 1 : kUnitThreads / kWarp);
  return Launch(exec,
                large ? QuantizeUnits<Code, Scales, kUnitThreads, Floats>
                      : QuantizeUnits<Code, Scales, kWarp, Floats>,
                std::min<int64_t>(wanted, std::numeric_limits<int32_t>::max()), kUnitThreads, x,
                scales, blocks, units, out);
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_ANY_CUH_
