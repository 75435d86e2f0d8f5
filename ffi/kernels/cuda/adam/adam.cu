// Adam: one step of any number of tensors, in one read of each.
//
// Reads and writes every buffer once: 28 bytes per element for float32 throughout, 14 for a
// bfloat16 with a remainder, bfloat16 gradients and FP8 states. A warp takes blocks of kAdamBlock
// elements, four per lane, and finds the amax of a block within itself, so states with scales need
// no second pass. In aligned rows a lane has four neighbouring elements and moves them together.
// Otherwise a lane has every 32nd element and moves them one by one.
//
// Types are runtime values, the same for all threads: a few uniform branches per block instead of
// about 150 kernels. The most common combinations have their own kernels. Equals core/adam.h bit
// for bit.
#include <type_traits>

#include "core/adam.h"
#include "kernels/adam.h"
#include "kernels/adam_step.h"
#include "kernels/cuda/adam/four.cuh"
#include "kernels/cuda/tensor_table.cuh"

namespace qshard::kernels {
namespace {

constexpr int kWarps = 8;
constexpr int kPerWarp = 8;  // blocks of elements per warp
constexpr int kBlocks = kPerWarp * kWarps;

struct Entry {
  AdamTensor tensor;
  unsigned first;
  bool four;  // whether lanes can move four neighbours together
};

// Parts are thread blocks.
struct Table : TensorTable<Entry, 240> {
  AdamKinds kinds;
  const float* constants;
};

// --- one block ---

using Loaded = AdamStored<Four>;

__host__ __device__ __forceinline__ AdamType LowType(const AdamKinds& kinds) {
  return kinds.low == AdamLow::kMaster ? kAdamFloat32 : kAdamBFloat16;
}

template <bool kNeighbours>
__device__ __forceinline__ Loaded LoadBlock(const AdamTensor& t, const AdamKinds& kinds,
                                            const AdamBlock& at) {
  Loaded x = {};
  if (kinds.reads_param()) x.param = LoadFour<kNeighbours>(t.param, kinds.param, at);
  if (kinds.low != AdamLow::kNone) x.low = LoadFour<kNeighbours>(t.low, LowType(kinds), at);
  x.grad = LoadFour<kNeighbours>(t.grad, kinds.grad, at);
  x.exp_avg = LoadFour<kNeighbours>(t.exp_avg.data, kinds.exp_avg, at);
  x.exp_avg_sq = LoadFour<kNeighbours>(t.exp_avg_sq.data, kinds.exp_avg_sq, at);
  return x;
}

// The elements of a lane.
template <bool kNeighbours>
struct LaneElements {
  static constexpr int kCount = kFour;
  using Values = float (&)[kFour];
  static constexpr __device__ int Count() { return kFour; }

  __device__ __forceinline__ void Widen(const Four& x, AdamType type, Values v) const {
    WidenFour(x, type, v);
  }
  __device__ __forceinline__ void Decode(const Four& x, AdamType type, float scale_inv,
                                         Values v) const {
    WidenFour(x, type, v);
#pragma unroll
    for (int j = 0; j < kFour; ++j)
      if (IsScaled(type)) v[j] = v[j] * scale_inv;
  }
  __device__ __forceinline__ void Join(const Four& upper, const Four& lower, Values v) const {
    JoinFour(upper, lower, v);
  }
  __device__ __forceinline__ void Step(Decay decay, const AdamConstants& c, Values g, Values p,
                                       Values m, Values v, Values u) const {
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      if (decay == Decay::kDecoupled)
        u[j] = AdamUpdate<Decay::kDecoupled>(c, p[j], g[j], m[j], v[j]);
      else if (decay == Decay::kCoupled)
        u[j] = AdamUpdate<Decay::kCoupled>(c, p[j], g[j], m[j], v[j]);
      else
        u[j] = AdamUpdate<Decay::kNone>(c, p[j], g[j], m[j], v[j]);
      p[j] = p[j] - u[j];
      // Elements past the end of a partial block must not count for its amax.
      if (!IsThere<kNeighbours>(at, j)) m[j] = v[j] = 0.0f;
    }
  }
  __device__ __forceinline__ void Encode(Values v, AdamType type, bool positive, void* to,
                                         float& scale_inv) const {
    StoreFour<kNeighbours>(to, type, at, EncodeState(v, type, positive, scale_inv));
  }
  __device__ __forceinline__ void Store(Values v, AdamType type, void* to) const {
    StoreFour<kNeighbours>(to, type, at, NarrowFour(v, type));
  }
  __device__ __forceinline__ void StoreHalves(Values v, void* upper, void* lower) const {
    Four high, low;
    SplitFour(v, high, low);
    StoreFour<kNeighbours>(upper, kAdamBFloat16, at, high);
    StoreFour<kNeighbours>(lower, kAdamBFloat16, at, low);
  }
  __device__ __forceinline__ void Narrow(Values v, AdamType type, Values narrow) const {
    WidenFour(NarrowFour(v, type), type, narrow);
  }

  const AdamBlock& at;
};

// --- all tensors ---

// Returns whether four neighbours, from a multiple of four on, can be moved together in every
// buffer.
bool MovesFour(const AdamTensor& t, const AdamKinds& kinds) {
  const auto aligned = [](const void* from, const void* to, AdamType type) {
    return IsAligned(from, kFour * SizeOf(type)) && IsAligned(to, kFour * SizeOf(type));
  };
  const bool low = kinds.low == AdamLow::kNone || aligned(t.low, t.new_low, LowType(kinds));
  return low && (t.rows == 1 || t.cols % kFour == 0) &&
         (!kinds.reads_param() || aligned(t.param, t.param, kinds.param)) &&
         IsAligned(t.new_param, kFour * (kinds.update ? 4 : SizeOf(kinds.param))) &&
         aligned(t.grad, t.grad, kinds.grad) &&
         aligned(t.exp_avg.data, t.new_exp_avg.data, kinds.exp_avg) &&
         aligned(t.exp_avg_sq.data, t.new_exp_avg_sq.data, kinds.exp_avg_sq);
}

// Kinds passed at run time (AnyKinds), or fixed at compile time (Only). kAtOnce: blocks of elements
// that a warp loads together.
struct AnyKinds {
  static constexpr int kAtOnce = 1;
  static __device__ __forceinline__ AdamKinds Of(const AdamKinds& kinds) { return kinds; }
};
template <AdamType kParam, AdamLow kLow, AdamType kGrad, AdamType kExpAvg, AdamType kExpAvgSq>
struct Only {
  static constexpr int kAtOnce = 2;
  static __device__ __forceinline__ AdamKinds Of(const AdamKinds&) {
    return {kParam, kGrad, kExpAvg, kExpAvgSq, kLow, Decay::kDecoupled, /*update=*/false};
  }
  static bool Fit(const AdamKinds& kinds) {
    return kinds.param == kParam && kinds.low == kLow && kinds.grad == kGrad &&
           kinds.exp_avg == kExpAvg && kinds.exp_avg_sq == kExpAvgSq &&
           kinds.decay == Decay::kDecoupled && !kinds.update;
  }
};

template <class Kinds>
__global__ void __launch_bounds__(kWarps* kWarp, 4)
    AdamKernel(const __grid_constant__ Table table) {
  const int tensor = table.Find(blockIdx.x);
  const AdamTensor& t = table.entries[tensor].tensor;
  const AdamKinds kinds = Kinds::Of(table.kinds);

  static_assert(kAdamConstants == 10 && sizeof(AdamConstants) == 40);
  const float* from = table.constants + tensor * kAdamConstants;
  const AdamConstants c = {from[0], from[1], from[2], from[3], from[4],
                           from[5], from[6], from[7], from[8], from[9]};

  const bool four = table.entries[tensor].four;
  const int64_t in_row = CeilDiv(t.cols, kAdamBlock), blocks = t.rows * in_row;
  const int64_t begin = int64_t{blockIdx.x - table.entries[tensor].first} * kBlocks;
  const int64_t end = min(blocks, begin + kBlocks);
  const int64_t first = begin + threadIdx.x / kWarp * kPerWarp;
  const int count = static_cast<int>(min(int64_t{kPerWarp}, end - first)), lane = Lane();
  // A lane loads and stores the scales of one block, so that scales are accessed together. One by
  // one, between other warps' loads of the same line, they took a third of the time of a step.
  AdamScales old, made;
  if (lane < count) old = LoadScales(t, kinds, first + lane);
  const auto step = [&](auto whole, int i, const AdamBlock& at, const Loaded& x) {
    AdamScales s;
    if (IsScaled(kinds.exp_avg)) s.exp_avg = __shfl_sync(kAllLanes, old.exp_avg, i);
    if (IsScaled(kinds.exp_avg_sq)) s.exp_avg_sq = __shfl_sync(kAllLanes, old.exp_avg_sq, i);
    StepElements(LaneElements<decltype(whole)::value>{at}, kinds, c, t, x, s);
    if (lane == i) made = s;
  };
  if (Kinds::kAtOnce > 1 && four && t.rows == 1 && (first + kPerWarp) * kAdamBlock <= t.cols) {
    constexpr int kAtOnce = Kinds::kAtOnce;
#pragma unroll 1
    for (int i = 0; i < kPerWarp; i += kAtOnce) {
      AdamBlock at[kAtOnce];
      Loaded x[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        at[k] = {(first + i + k) * kAdamBlock, kAdamBlock};
        x[k] = LoadBlock<true>(t, kinds, at[k]);
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) step(std::true_type(), i + k, at[k], x[k]);
    }
  } else {
    int64_t row = t.rows == 1 ? 0 : first / in_row, block = first - row * in_row;
    const auto next = [&](int i) -> AdamBlock {
      if (i >= count) return {0, 0};
      const int64_t col = block * kAdamBlock, begin = row * t.cols + col;
      if (++block == in_row) block = 0, ++row;
      return {begin, static_cast<int>(min(int64_t{kAdamBlock}, t.cols - col))};
    };
    constexpr int kAtOnce = Kinds::kAtOnce;
#pragma unroll 1
    for (int i = 0; i < count; i += kAtOnce) {
      AdamBlock at[kAtOnce];
      Loaded x[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) at[k] = next(i + k);
      int odd = 0;  // only the last block of a tensor may have an odd length
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) odd |= at[k].length % kFour;
      if (four && odd == 0) {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) x[k] = LoadBlock<true>(t, kinds, at[k]);
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) step(std::true_type(), i + k, at[k], x[k]);
      } else {
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k)
          step(std::false_type(), i + k, at[k], LoadBlock<false>(t, kinds, at[k]));
      }
    }
  }
  if (lane < count) StoreScales(t, kinds, first + lane, made);
}

using Kernel = void (*)(Table);

template <class Kinds, class... Others>
Kernel KernelFor(const AdamKinds& kinds) {
  if constexpr (sizeof...(Others) > 0)
    if (!Kinds::Fit(kinds)) return KernelFor<Others...>(kinds);
  return AdamKernel<Kinds>;
}

Kernel ChooseKernel(const AdamKinds& kinds) {
  constexpr AdamType f32 = kAdamFloat32, bf16 = kAdamBFloat16, f16 = kAdamFloat16, e4m3 = kAdamE4M3,
                     e5m2 = kAdamE5M2;
  constexpr AdamLow none = AdamLow::kNone, remainder = AdamLow::kRemainder,
                    master = AdamLow::kMaster;
  return KernelFor<Only<f32, none, f32, f32, f32>, Only<f32, none, f32, bf16, bf16>,
                   Only<f32, none, f32, f16, f16>, Only<f32, none, f32, e4m3, e5m2>,
                   Only<f32, none, f32, e4m3, e4m3>, Only<bf16, master, bf16, f32, f32>,
                   Only<bf16, remainder, bf16, f32, f32>, Only<bf16, remainder, bf16, bf16, bf16>,
                   Only<bf16, remainder, bf16, e4m3, e5m2>, Only<bf16, remainder, bf16, e4m3, e4m3>,
                   AnyKinds>(kinds);
}

}  // namespace

Status AdamConstantsOf(const Exec<Cuda>& exec, const float* step, int64_t n, const float* hyper,
                       int64_t run, float* constants) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    const AdamConstants c = MakeAdamConstants(hyper + i / run * kHyperSize, step[i]);
    memcpy(constants + i * kAdamConstants, &c, sizeof(c));
  });
}

Status Adam(const Exec<Cuda>& exec, const AdamTensor* tensors, int64_t count,
            const AdamKinds& kinds, const float* constants) {
  const Kernel kernel = ChooseKernel(kinds);
  Table table;
  table.kinds = kinds;
  const auto enter = [&](int64_t i, Entry& entry) {
    AdamTensor& t = entry.tensor = tensors[i];
    if (t.cols % kAdamBlock == 0) t.cols *= t.rows, t.rows = 1;  // the same blocks
    entry.four = MovesFour(t, kinds);
    return CeilDiv(t.rows * CeilDiv(t.cols, kAdamBlock), kBlocks);
  };
  return ForEachTable(table, count, enter, [&](int64_t begin) {
    table.constants = constants + begin * kAdamConstants;
    return Launch(exec, kernel, table.parts, kWarps * kWarp, table);
  });
}

}  // namespace qshard::kernels
