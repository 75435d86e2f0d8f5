// Hadamard and AmaxHadamard.
//
// Hadamard applies HadamardTransform (core/hadamard.h) to 16 consecutive elements of a row or of a
// column. Reads x and writes y once: 4 bytes per element for a 16-bit x. A thread takes two blocks:
// 32 bytes each of a row, or two neighbouring columns, so that a warp moves whole lines. Needs rows
// aligned to 16 bytes, or columns aligned to pairs of elements. Otherwise elements move one by one.
//
// AmaxHadamard finds the largest magnitude of x and of its transform, per block. Reads x once, 2
// bytes per element for a 16-bit x, and writes 8 bytes per block. A thread takes 16 rows of two
// neighbouring columns, or of one if columns are not aligned to pairs. A warp takes a small block.
// As many thread blocks as fit share a large one (amax/amax.cu explains how they combine).
//
// AmaxHadamardGrouped does so for the padded rows of experts. A warp takes a strip of 16 rows, or a
// part of its columns, and raises the amaxes of its expert. Strips of padding are not read.
#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/experts.cuh"
#include "kernels/cuda/hadamard/hadamard.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/raise_amax.cuh"
#include "kernels/grouped.h"
#include "kernels/hadamard.h"

namespace qshard::kernels {
namespace {

using hadamard::Transform;
constexpr int kSize = kHadamardSize;
constexpr int kThreads = 256;

// Blocks of a row: n of them, back to back.
template <class In>
__global__ void __launch_bounds__(kThreads, 3) HadamardRows(const In* x, int64_t n, bfloat16* y) {
  constexpr int kUnroll = sizeof(In) == 4 ? 1 : 2;
  const int64_t first = int64_t{blockIdx.x} * (kThreads * kUnroll) + threadIdx.x;
  Words<kSize * sizeof(In)> in[kUnroll];
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t block = first + k * kThreads;
    in[k] = {};
    if (block < n) in[k] = Load<kSize * sizeof(In)>(x + block * kSize);
  }
#pragma unroll
  for (int k = 0; k < kUnroll; ++k) {
    const int64_t block = first + k * kThreads;
    const Words<32> out = Transform(ToBfloat16<In, kSize>(in[k]));
    if (block < n) Store<Write::kStream>(y + block * kSize, out);
  }
}

// Blocks of columns: n pairs of neighbours, in rows of `pairs` pairs.
template <class In>
__global__ void __launch_bounds__(kThreads, 3)
    HadamardColumns(const In* x, int64_t n, int64_t pairs, bfloat16* y) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (t >= n) return;
  const int64_t strip = t / pairs;
  const int64_t start = (strip * kSize * pairs + (t - strip * pairs)) * 2;
  const auto word = [=](int i) {
    return ToBfloat16<In, 2>(Load<2 * sizeof(In), Read::kCached>(x + start + i * pairs * 2)).w[0];
  };
  uint32_t w[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) w[i] = word(i);
  hadamard::TransformTwo(w, word);
#pragma unroll
  for (int i = 0; i < kSize; ++i)
    Store<Write::kStream>(y + start + i * pairs * 2, Words<4>{{w[i]}});
}

// --- AmaxHadamard ---

// Blocks of a grid, in units of 16 rows of two columns (kPairs) or one.
struct AmaxGrid {
  AmaxGrid(const Blocks& b, bool pairs)
      : blocks(b),
        across(b.block_cols / (pairs ? 2 : 1)),
        units(b.block_rows / kSize * across),
        divider(std::min(across, kMaxDivided - 1)) {}
  Blocks blocks;
  int64_t across, units;  // units in a row of units, and in a block
  Divider divider;
};

// Largest magnitudes of 16 rows of two columns, and of their transforms.
template <class In>
struct UnitAmaxes {
  // load(i) returns row i.
  template <class LoadRow>
  __device__ __forceinline__ void Add(const LoadRow& load) {
    Words<2 * sizeof(In)> raw[kSize];
    uint32_t w[kSize], high;
#pragma unroll
    for (int i = 0; i < kSize; ++i) raw[i] = load(i);
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      w[i] = ToBfloat16<In, 2>(raw[i]).w[0];
      if constexpr (!std::is_same_v<In, bfloat16>) m.Add(raw[i]);
    }
    const auto again = [=](int i) { return ToBfloat16<In, 2>(load(i)).w[0]; };
    rotated = __vmaxu2(rotated, hadamard::LargestOfTwo(w, again, &high));
    if constexpr (std::is_same_v<In, bfloat16>) m.AddBits(high);
  }
  __device__ __forceinline__ int32_t Bits() const { return m.AsFloatBits(); }
  __device__ __forceinline__ int32_t RotatedBits() const {
    Magnitude<bfloat16> m_t;
    m_t.AddBits(rotated);
    return m_t.AsFloatBits();
  }

  Magnitude<In> m;
  uint32_t rotated = 0;
};

// Loads two neighbours, or one and a zero.
template <class In, bool kPairs>
__device__ __forceinline__ Words<2 * sizeof(In)> LoadPair(const In* at) {
  if constexpr (kPairs) {
    return Load<2 * sizeof(In), Read::kCached>(at);
  } else {
    const In one[2] = {at[0], In{}};
    Words<2 * sizeof(In)> two;
    memcpy(&two, one, sizeof(two));
    return two;
  }
}

template <class In, int kTeam, bool kPairs>
__global__ void __launch_bounds__(kThreads, 3)
    AmaxHadamardBlocks(const In* x, const AmaxGrid g, float* amax, float* amax_t) {
  constexpr int kTeams = kThreads / kTeam, kWidth = kPairs ? 2 : 1;
  const int thread = threadIdx.x % kTeam;
  const int64_t block = int64_t{blockIdx.x} * kTeams + threadIdx.x / kTeam;
  const Blocks& b = g.blocks;
  const int64_t grid_cols = b.GridCols(), grid_rows = b.GridRows();
  if (block >= b.GridSize()) return;  // the whole team
  const int64_t strip = block / grid_cols, matrix = strip / grid_rows;
  const In* from = x + (matrix * b.rows + (strip - matrix * grid_rows) * b.block_rows) * b.cols +
                   (block - strip * grid_cols) * b.block_cols;
  const int64_t step = int64_t{gridDim.y} * kTeam;
  UnitAmaxes<In> found;
  for (int64_t unit = int64_t{blockIdx.y} * kTeam + thread; unit < g.units; unit += step) {
    const int64_t down =
        g.units < kMaxDivided ? g.divider.Divide(static_cast<uint32_t>(unit)) : unit / g.across;
    const In* at = from + down * kSize * b.cols + (unit - down * g.across) * kWidth;
    found.Add([=](int i) { return LoadPair<In, kPairs>(at + i * b.cols); });
  }
  const int32_t bits = TeamMax<kTeam>(found.Bits());
  if constexpr (kTeam > kWarp) __syncthreads();
  const int32_t bits_t = TeamMax<kTeam>(found.RotatedBits());
  if (thread != 0) return;
  AwaitZeros();
  StoreOrRaise(amax + block, bits);
  StoreOrRaise(amax_t + block, bits_t);
}

template <class In, bool kPairs>
__global__ void __launch_bounds__(kThreads, 3)
    AmaxHadamardOfExperts(const In* x, int64_t cols, const RowMap map, const ExpertStops experts,
                          float* amax, float* amax_t) {
  constexpr int kWidth = kPairs ? 2 : 1;
  const int lane = threadIdx.x % kWarp;
  const int64_t strip = int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
  const int64_t first = strip * kSize;
  if (first >= map.count) return;  // the whole warp, as below
  const int64_t expert = ExpertOfWarp(experts, first);
  const int32_t own = lane < kSize ? static_cast<int32_t>(map.Of(first + lane)) : -1;
  if (expert == experts.count || !__any_sync(kAllLanes, own >= 0)) return;
  int32_t rows[kSize];
#pragma unroll
  for (int i = 0; i < kSize; ++i) rows[i] = __shfl_sync(kAllLanes, own, i);
  UnitAmaxes<In> found;
  const int64_t step = int64_t{gridDim.y} * (kWarp * kWidth);
  for (int64_t col = (int64_t{blockIdx.y} * kWarp + lane) * kWidth; col < cols; col += step)
    found.Add([&](int i) {
      return rows[i] < 0 ? Words<2 * sizeof(In)>{} : LoadPair<In, kPairs>(x + rows[i] * cols + col);
    });
  const int32_t bits = TeamMax<kWarp>(found.Bits());
  const int32_t bits_t = TeamMax<kWarp>(found.RotatedBits());
  if (lane != 0) return;
  AwaitZeroing();
  RaiseAmax(amax + expert, bits);
  RaiseAmax(amax_t + expert, bits_t);
}

template <class In, bool kPairs>
Status LaunchAmaxHadamard(const Exec<Cuda>& exec, const In* x, const Blocks& blocks, float* amax,
                          float* amax_t) {
  const AmaxGrid g(blocks, kPairs);
  const int64_t count = blocks.GridSize(), room = int64_t{Multiprocessors()} * 3;
  if (g.units <= 8 * kWarp && count >= room)
    return Launch(exec, AmaxHadamardBlocks<In, kWarp, kPairs>, CeilDiv(count, kThreads / kWarp),
                  kThreads, x, g, amax, amax_t);
  const int64_t splits =
      std::max<int64_t>(1, std::min(CeilDiv(g.units, int64_t{kThreads}), room / count));
  return LaunchRaising(exec, AmaxHadamardBlocks<In, kThreads, kPairs>, count, splits, kThreads,
                       amax, amax_t, x, g, amax, amax_t);
}

}  // namespace

template <class In>
Status AmaxHadamard(const Exec<Cuda>& exec, const In* x, const Blocks& blocks, float* amax,
                    float* amax_t) {
  if (blocks.GridSize() == 0) return {};
  const bool pairs =
      blocks.cols % 2 == 0 && blocks.block_cols % 2 == 0 && IsAligned(x, 2 * sizeof(In));
  return pairs ? LaunchAmaxHadamard<In, true>(exec, x, blocks, amax, amax_t)
               : LaunchAmaxHadamard<In, false>(exec, x, blocks, amax, amax_t);
}

template <class In>
Status AmaxHadamardGrouped(const Exec<Cuda>& exec, const In* x, int64_t cols, const RowMap& map,
                           const ExpertStops& experts, float* amax, float* amax_t) {
  if (experts.count == 0) return {};
  const bool pairs = cols % 2 == 0 && IsAligned(x, 2 * sizeof(In));
  const int64_t blocks = std::max<int64_t>(1, CeilDiv(map.count / kSize, kThreads / kWarp));
  if (!FitsGrid(blocks)) return kTooManyBlocks;
  const int64_t splits =
      std::clamp<int64_t>(int64_t{Multiprocessors()} * 3 / blocks, 1,
                          std::max<int64_t>(1, CeilDiv(cols, (pairs ? 2 : 1) * kWarp)));
  const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(splits));
  return LaunchAfterZeros(
      exec, pairs ? AmaxHadamardOfExperts<In, true> : AmaxHadamardOfExperts<In, false>, grid,
      kThreads, amax, amax_t, experts.count, x, cols, map, experts, amax, amax_t);
}

template <class In>
Status Hadamard(const Exec<Cuda>& exec, const In* x, const Blocks& blocks, bfloat16* y) {
  const int64_t n = blocks.GridSize();
  const int64_t cols = blocks.cols;
  const bool rows = blocks.block_rows == 1;
  if (rows && IsAligned(x, 16) && IsAligned(y, 16))
    return Launch(exec, HadamardRows<In>, CeilDiv(n, sizeof(In) == 4 ? kThreads : 2 * kThreads),
                  kThreads, x, n, y);
  if (!rows && cols % 2 == 0 && IsAligned(x, 2 * sizeof(In)) && IsAligned(y, 4))
    return Launch(exec, HadamardColumns<In>, CeilDiv(n / 2, kThreads), kThreads, x, n / 2, cols / 2,
                  y);
  // Any alignment: the 16 elements of block t are `step` apart, from `start` on.
  return ForEach(exec, n, [=] __device__(int64_t t) {
    const int64_t start = rows ? t * kSize : t / cols * kSize * cols + t % cols;
    const int64_t step = rows ? 1 : cols;
    Words<32> w = {};
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      w.w[i / 2] |= uint32_t{Narrow<bfloat16>(Widen(x[start + i * step])).bits} << i % 2 * 16;
    w = Transform(w);
#pragma unroll
    for (int i = 0; i < kSize; ++i)
      y[start + i * step] = {static_cast<uint16_t>(w.w[i / 2] >> (i % 2 * 16))};
  });
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, Hadamard)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, AmaxHadamard)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, AmaxHadamardGrouped)

}  // namespace qshard::kernels
