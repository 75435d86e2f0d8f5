// AmaxBlock: amax[block] = max |x| over the block, as a maximum over bit patterns of |x|.
//
// Reads x once, forwards, so that its end is in L2 for a cast that walks backwards. Writes 4 bytes
// per block.
// - Blocks of one whole row each are runs: amax.cu.
// - Fast blocks: a warp takes 32 neighbouring loads of 16 bytes, in all rows of a block, or in some
//   of them if there are many. Up to 8 warps combine in shared memory. Lanes of one block exchange
//   their maxima. If blocks have one column, each lane keeps one maximum per column. Needs rows and
//   x aligned to 16 bytes, and blocks of one column, or of 2^i <= 32 loads.
// - Other blocks: quantize/any.cuh.
//
// Equals the maximum over FloatBits(Widen(x)): NaN propagates as kNanBits.
#include <limits>
#include <type_traits>

#include "kernels/block_cast.h"
#include "kernels/cast.h"
#include "kernels/cuda/cast/block_map.cuh"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/quantize/any.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / kWarp;

// --- fast blocks ---

struct WarpTiles {
  int64_t rows, cols, grid_rows, grid_cols;
  Divider down, across;             // rows of blocks in a matrix, chunks of kWarp loads in a row
  int block_rows, block_cols_log2;  // at most the rows of the matrix
  int splits;                       // warps that share the rows of a block, a power of two
};

template <class In, bool kColumns>
__global__ void __launch_bounds__(kThreads)
    AmaxBlocks(const In* x, const WarpTiles g, float* amax) {
  constexpr int kUnroll = 8, kWidth = 16 / sizeof(In);
  // Maxima of a thread: one over all its loads, or with kColumns one per 32-bit word, which has one
  // or two columns.
  constexpr int kMaxima = kColumns ? 4 : 1;
  Magnitude<In> m[kMaxima];
  const auto add = [&](const Words<16>& x) {
#pragma unroll
    for (int i = 0; i < 4; ++i) m[kColumns ? i : 0].Add(Words<4>{{x.w[i]}});
  };
  __shared__ uint32_t shared[kWarps][kMaxima][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int split = warp & (g.splits - 1);
  const int per_block = kWarps / g.splits;
  const uint32_t strip = g.across.Divide(blockIdx.x);  // row of blocks, over all matrices
  const uint32_t chunk = (blockIdx.x - strip * g.across.divisor()) * per_block + warp / g.splits;
  const uint32_t matrix = g.down.Divide(strip);
  const int64_t top = int64_t{strip - matrix * g.down.divisor()} * g.block_rows;
  const int64_t col = (int64_t{chunk} * kWarp + lane) * kWidth;
  const bool inside = col < g.cols;
  const int height = static_cast<int>(min(int64_t{g.block_rows}, g.rows - top));
  if (inside) {
    const In* from = x + (matrix * g.rows + top + split) * g.cols + col;
    const int64_t step = g.splits * g.cols;
    int row = split;
    for (; row + (kUnroll - 1) * g.splits < height; row += kUnroll * g.splits) {
      Words<16> w[kUnroll];
#pragma unroll
      for (int k = 0; k < kUnroll; ++k, from += step) w[k] = Load<16>(from);
#pragma unroll
      for (int k = 0; k < kUnroll; ++k) add(w[k]);
    }
    for (; row < height; row += g.splits, from += step) add(Load<16>(from));
  }
  if (g.splits > 1) {
#pragma unroll
    for (int i = 0; i < kMaxima; ++i) shared[warp][i][lane] = m[i].Bits();
    __syncthreads();
    if (split != 0) return;
    for (int other = 1; other < g.splits; ++other) {
#pragma unroll
      for (int i = 0; i < kMaxima; ++i) m[i].AddBits(shared[warp + other][i][lane]);
    }
  }
  float* to = amax + int64_t{strip} * g.grid_cols;
  if constexpr (kColumns) {
    if (!inside) return;
    constexpr int kPerWord = kWidth / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float v[kPerWord];
      WidenWords<In>(Words<4>{{m[i].Bits()}}, v);
#pragma unroll
      for (int k = 0; k < kPerWord; ++k) to[col + kPerWord * i + k] = CanonicalNan(v[k]);
    }
  } else {
    const int lanes = (1 << g.block_cols_log2) / kWidth;
    m[0].ReduceOver(lanes);
    if (inside && lane % lanes == 0)
      to[col >> g.block_cols_log2] = FloatFromBits(m[0].AsFloatBits());
  }
}

template <class In>
bool TakesWarps(const In* x, const Blocks& b) {
  constexpr int kWidth = 16 / sizeof(In);
  const int64_t loads = b.block_cols / kWidth;
  const bool power = b.block_cols % kWidth == 0 && loads <= kWarp && (loads & (loads - 1)) == 0;
  return (b.block_cols == 1 || power) && b.cols % kWidth == 0 && IsAligned(x, 16) &&
         HasSmallIndices(b);
}

template <class In>
Status LaunchWarps(const Exec<Cuda>& exec, const In* x, const Blocks& b, float* amax) {
  constexpr int kRowsOfWarp = 16;
  constexpr int64_t kCols = kWarp * (16 / sizeof(In));
  WarpTiles g{b.rows,
              b.cols,
              b.GridRows(),
              b.GridCols(),
              Divider(b.GridRows()),
              Divider(1),
              static_cast<int>(b.block_rows),
              0,
              1};
  while ((int64_t{1} << g.block_cols_log2) < b.block_cols) ++g.block_cols_log2;
  while (g.splits < kWarps && g.splits * kRowsOfWarp < b.block_rows) g.splits *= 2;
  g.across = Divider(CeilDiv(CeilDiv(b.cols, kCols), kWarps / g.splits));
  return Launch(exec, b.block_cols == 1 ? AmaxBlocks<In, true> : AmaxBlocks<In, false>,
                b.batch * b.GridRows() * g.across.divisor(), kThreads, x, g, amax);
}

// --- other blocks: the amax is stored as the scale, without codes ---

struct AmaxAsScale {
  using Stored = float;
  template <class Code>
  QSHARD_INLINE float Shared(int64_t) const {
    return 0.0f;
  }
  QSHARD_INLINE BlockScale<float> Of(float amax, float) const { return {0.0f, CanonicalNan(amax)}; }
};

}  // namespace

template <class In>
Status AmaxBlock(const Exec<Cuda>& exec, const In* x, const Blocks& blocks, float* amax) {
  if (blocks.GridSize() == 0) return {};
  const Blocks b = Simplify(blocks);
  // Runs: blocks of one row, or of whole rows.
  if (b.batch == 1 && b.cols % b.block_cols == 0 && b.rows % b.block_rows == 0 &&
      (b.block_rows == 1 || b.block_cols == b.cols))
    return Amax(exec, x, b.GridSize(), b.block_rows * b.block_cols, amax);
  if (TakesWarps(x, b)) return LaunchWarps(exec, x, b, amax);
  return LaunchQuantizeUnits<E4M3>(exec, AnyFloats(x), AmaxAsScale{}, b, {nullptr, amax});
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, AmaxBlock)

}  // namespace qshard::kernels
