// adam: one step of any number of tensors, from one read of each.
//
// Reads and writes every buffer once: for float32 throughout 28 bytes an element, for a bfloat16
// with a remainder, bfloat16 gradients and FP8 states 14. A warp takes the blocks of kAdamBlock
// elements, four of each to a lane, and finds the amax of a block within itself; so blocks with
// scales cost no second pass. Where a block is whole and its memory aligned, a lane has
// neighbouring elements and moves them at once; elsewhere a lane has every 32nd and moves them one
// by one.
//
// Types are told at run time, alike for all threads: a handful of uniform branches a block, against
// some hundred and fifty kernels; the usual combinations have kernels of their own. Pointers travel
// as kernel parameters, kTensors tensors a launch, which a captured graph keeps. Equals core/adam.h
// bit for bit.
#include "core/adam.h"
#include "kernels/adam.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kBlocks = 8 * kWarps;  // of elements that a block of threads takes
constexpr int kTensors = 240;
constexpr int kFour = kAdamBlock / kWarp;

struct Table {
  AdamTensor tensors[kTensors];
  unsigned first[kTensors + 1];  // of the blocks of threads of a tensor
  bool four[kTensors];           // whether lanes can move four neighbours at once
  int count;
  AdamKinds kinds;
  const float* constants;
};
static_assert(sizeof(Table) <= 32764, "more than a launch may have in parameters");

// --- four elements of a lane: their bits, side by side from w[0] on ---

struct Four {
  uint32_t w[4];
};

// Where a block is: of its `length` elements a lane has 4 * lane .. + 3 if kWhole, else lane, lane
// + 32, ...
struct Place {
  int64_t begin;  // elements before it in the tensor
  int64_t block;  // and scales
  int length;
};

__device__ __forceinline__ int Lane() { return threadIdx.x % kWarp; }

template <class Word>
__device__ __forceinline__ const Word* WordsAt(const void* data, int64_t begin, int64_t i) {
  return reinterpret_cast<const Word*>(static_cast<const char*>(data) + begin) + i;
}

// Streaming: nothing here is read twice.
template <bool kWhole>
__device__ __forceinline__ Four LoadFour(const void* data, AdamType type, const Place& at) {
  Four x = {};
  const int lane = Lane(), size = SizeOf(type);
  const int64_t begin = at.begin * size;
  if constexpr (kWhole) {
    if (size == 4) {
      const uint4 u = __ldcs(WordsAt<uint4>(data, begin, lane));
      x.w[0] = u.x, x.w[1] = u.y, x.w[2] = u.z, x.w[3] = u.w;
    } else if (size == 2) {
      const uint2 u = __ldcs(WordsAt<uint2>(data, begin, lane));
      x.w[0] = u.x, x.w[1] = u.y;
    } else {
      x.w[0] = __ldcs(WordsAt<uint32_t>(data, begin, lane));
    }
  } else {
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const int i = lane + kWarp * j;
      if (i >= at.length) continue;
      if (size == 4)
        x.w[j] = *WordsAt<uint32_t>(data, begin, i);
      else if (size == 2)
        x.w[j / 2] |= uint32_t{*WordsAt<uint16_t>(data, begin, i)} << 16 * (j % 2);
      else
        x.w[0] |= uint32_t{*WordsAt<uint8_t>(data, begin, i)} << 8 * j;
    }
  }
  return x;
}

template <bool kWhole>
__device__ __forceinline__ void StoreFour(void* data, AdamType type, const Place& at,
                                          const Four& x) {
  const int lane = Lane(), size = SizeOf(type);
  char* to = static_cast<char*>(data) + at.begin * size;
  if constexpr (kWhole) {
    if (size == 4)
      reinterpret_cast<uint4*>(to)[lane] = {x.w[0], x.w[1], x.w[2], x.w[3]};
    else if (size == 2)
      reinterpret_cast<uint2*>(to)[lane] = {x.w[0], x.w[1]};
    else
      reinterpret_cast<uint32_t*>(to)[lane] = x.w[0];
  } else {
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const int i = lane + kWarp * j;
      if (i >= at.length) continue;
      if (size == 4)
        reinterpret_cast<uint32_t*>(to)[i] = x.w[j];
      else if (size == 2)
        reinterpret_cast<uint16_t*>(to)[i] = static_cast<uint16_t>(x.w[j / 2] >> 16 * (j % 2));
      else
        reinterpret_cast<uint8_t*>(to)[i] = static_cast<uint8_t>(x.w[0] >> 8 * j);
    }
  }
}

// --- values of four elements ---

__device__ __forceinline__ void WidenFour(const Four& x, AdamType type, float (&v)[kFour]) {
  if (type == kAdamFloat32) {
    WidenWords<float>(Words<16>{{x.w[0], x.w[1], x.w[2], x.w[3]}}, v);
  } else if (type == kAdamBFloat16) {
    WidenWords<bfloat16>(Words<8>{{x.w[0], x.w[1]}}, v);
  } else if (type == kAdamFloat16) {
    WidenWords<float16>(Words<8>{{x.w[0], x.w[1]}}, v);
  } else if (type == kAdamE4M3) {
    DecodeWords<E4M3>(Words<4>{{x.w[0]}}, v);
  } else {
    DecodeWords<E5M2>(Words<4>{{x.w[0]}}, v);
  }
}

__device__ __forceinline__ bool AnyNan(const float (&v)[kFour]) {
  return isnan(v[0]) || isnan(v[1]) || isnan(v[2]) || isnan(v[3]);
}

template <class Out>
__device__ __forceinline__ Four Narrow16(const float (&v)[kFour]) {
  Words<8> w = NarrowWords<Out>(v);
  if (AnyNan(v)) {  // whose bits NarrowWords leaves open
    w.w[0] = Narrow<Out>(v[0]).bits | uint32_t{Narrow<Out>(v[1]).bits} << 16;
    w.w[1] = Narrow<Out>(v[2]).bits | uint32_t{Narrow<Out>(v[3]).bits} << 16;
  }
  return {{w.w[0], w.w[1]}};
}

__device__ __forceinline__ Four NarrowFour(const float (&v)[kFour], AdamType type) {
  if (type == kAdamBFloat16) return Narrow16<bfloat16>(v);
  if (type == kAdamFloat16) return Narrow16<float16>(v);
  Four x;
#pragma unroll
  for (int j = 0; j < kFour; ++j) x.w[j] = static_cast<uint32_t>(FloatBits(Narrow<float>(v[j])));
  if (type == kAdamE4M3) return {{EncodeWords<E4M3>(v).w[0]}};
  if (type == kAdamE5M2) return {{EncodeWords<E5M2>(v).w[0]}};
  return x;
}

// Adds to the codes of second moments what KeepPositive does.
__device__ __forceinline__ void KeepPositiveFour(const float (&v)[kFour], AdamType type, Four& x) {
  const int bits = 8 * SizeOf(type);
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    uint32_t& w = bits == 16 ? x.w[j / 2] : x.w[0];
    const int shift = bits == 16 ? 16 * (j % 2) : 8 * j;
    if (v[j] > 0.0f && (w >> shift & ((1u << bits) - 1)) == 0) w |= 1u << shift;
  }
}

__device__ __forceinline__ float MaxOf(AdamType type) {
  return type == kAdamE4M3 ? E4M3::kMax : type == kAdamE5M2 ? E5M2::kMax : 65504.0f;
}

// v as the codes of a state, and the scale of the block. Every lane of the warp calls this.
__device__ __forceinline__ Four EncodeState(float (&v)[kFour], AdamType type, bool positive,
                                            const Place& at, float* scale_inv) {
  if (!IsScaled(type)) return NarrowFour(v, type);
  unsigned amax = 0;
#pragma unroll
  for (int j = 0; j < kFour; ++j)
    amax = max(amax, static_cast<unsigned>(FloatBits(v[j]) & kFloatMagnitudeMask));
  amax = __reduce_max_sync(0xFFFFFFFFu, amax);
  const float scale = AdamScale(FloatFromBits(static_cast<int32_t>(amax)), MaxOf(type));
  if (Lane() == 0) scale_inv[at.block] = AdamScaleInverse(scale);
  float scaled[kFour];
#pragma unroll
  for (int j = 0; j < kFour; ++j) scaled[j] = v[j] * scale;
  Four x = NarrowFour(scaled, type);
  if (positive) KeepPositiveFour(v, type, x);
  return x;
}

// --- a block ---

struct Loaded {
  Four param, low, grad, exp_avg, exp_avg_sq;
  float exp_avg_scale_inv, exp_avg_sq_scale_inv;
};

__host__ __device__ __forceinline__ AdamType LowType(const AdamKinds& kinds) {
  return kinds.low == AdamLow::kMaster ? kAdamFloat32 : kAdamBFloat16;
}

__host__ __device__ __forceinline__ bool ReadsParam(const AdamKinds& kinds) {
  if (kinds.low == AdamLow::kMaster) return kinds.update;
  return !kinds.update || kinds.decay != Decay::kNone;
}

template <bool kWhole>
__device__ __forceinline__ Loaded LoadBlock(const AdamTensor& t, const AdamKinds& kinds,
                                            const Place& at) {
  Loaded x = {};
  if (ReadsParam(kinds)) x.param = LoadFour<kWhole>(t.param, kinds.param, at);
  if (kinds.low != AdamLow::kNone) x.low = LoadFour<kWhole>(t.low, LowType(kinds), at);
  x.grad = LoadFour<kWhole>(t.grad, kinds.grad, at);
  x.exp_avg = LoadFour<kWhole>(t.exp_avg.data, kinds.exp_avg, at);
  x.exp_avg_sq = LoadFour<kWhole>(t.exp_avg_sq.data, kinds.exp_avg_sq, at);
  if (IsScaled(kinds.exp_avg)) x.exp_avg_scale_inv = t.exp_avg.scale_inv[at.block];
  if (IsScaled(kinds.exp_avg_sq)) x.exp_avg_sq_scale_inv = t.exp_avg_sq.scale_inv[at.block];
  return x;
}

template <bool kWhole>
__device__ __forceinline__ void StepBlock(const AdamTensor& t, const AdamKinds& kinds,
                                          const AdamConstants& c, const Place& at,
                                          const Loaded& x) {
  float p[kFour], g[kFour], m[kFour], v[kFour], u[kFour];
  if (kinds.low == AdamLow::kMaster) {
    WidenFour(x.low, kAdamFloat32, p);
  } else {
    WidenFour(x.param, kinds.param, p);
    if (kinds.low == AdamLow::kRemainder) {
#pragma unroll
      for (int j = 0; j < kFour; ++j) {
        const auto half = [&](const Four& f) {
          return static_cast<uint16_t>(f.w[j / 2] >> 16 * (j % 2));
        };
        p[j] = JoinHalves({half(x.param)}, half(x.low));
      }
    }
  }
  WidenFour(x.grad, kinds.grad, g);
  WidenFour(x.exp_avg, kinds.exp_avg, m);
  WidenFour(x.exp_avg_sq, kinds.exp_avg_sq, v);
#pragma unroll
  for (int j = 0; j < kFour; ++j) {
    if (IsScaled(kinds.exp_avg)) m[j] = m[j] * x.exp_avg_scale_inv;
    if (IsScaled(kinds.exp_avg_sq)) v[j] = v[j] * x.exp_avg_sq_scale_inv;
    if (kinds.decay == Decay::kDecoupled)
      u[j] = AdamUpdate<Decay::kDecoupled>(c, p[j], g[j], m[j], v[j]);
    else if (kinds.decay == Decay::kCoupled)
      u[j] = AdamUpdate<Decay::kCoupled>(c, p[j], g[j], m[j], v[j]);
    else
      u[j] = AdamUpdate<Decay::kNone>(c, p[j], g[j], m[j], v[j]);
    p[j] = p[j] - u[j];
    u[j] = -u[j];
  }
  // What lies past the end of a block that is cut must not count for its amax.
  if constexpr (!kWhole) {
#pragma unroll
    for (int j = 0; j < kFour; ++j)
      if (Lane() + kWarp * j >= at.length) m[j] = v[j] = 0.0f;
  }
  StoreFour<kWhole>(t.new_exp_avg.data, kinds.exp_avg, at,
                    EncodeState(m, kinds.exp_avg, /*positive=*/false, at, t.new_exp_avg.scale_inv));
  StoreFour<kWhole>(
      t.new_exp_avg_sq.data, kinds.exp_avg_sq, at,
      EncodeState(v, kinds.exp_avg_sq, /*positive=*/true, at, t.new_exp_avg_sq.scale_inv));
  if (kinds.low == AdamLow::kRemainder) {
    Four upper = {}, lower = {};
#pragma unroll
    for (int j = 0; j < kFour; ++j) {
      const float whole = CanonicalNan(p[j]);
      upper.w[j / 2] |= uint32_t{UpperHalf(whole).bits} << 16 * (j % 2);
      lower.w[j / 2] |= uint32_t{LowerHalf(whole)} << 16 * (j % 2);
    }
    StoreFour<kWhole>(t.new_param, kAdamBFloat16, at, upper);
    StoreFour<kWhole>(t.new_low, kAdamBFloat16, at, lower);
    return;
  }
  if (kinds.low == AdamLow::kMaster)
    StoreFour<kWhole>(t.new_low, kAdamFloat32, at, NarrowFour(p, kAdamFloat32));
  if (!kinds.update) {
    StoreFour<kWhole>(t.new_param, kinds.param, at, NarrowFour(p, kinds.param));
    return;
  }
  if (kinds.low == AdamLow::kMaster) {
    float old[kFour];
    WidenFour(x.param, kinds.param, old);
    WidenFour(NarrowFour(p, kinds.param), kinds.param, u);
#pragma unroll
    for (int j = 0; j < kFour; ++j) u[j] = u[j] - old[j];
  }
  StoreFour<kWhole>(t.new_param, kAdamFloat32, at, NarrowFour(u, kAdamFloat32));
}

// --- all tensors ---

// Whether four neighbours that begin at a multiple of four can be moved at once, in every buffer.
bool MovesFour(const AdamTensor& t, const AdamKinds& kinds) {
  const auto aligned = [](const void* from, const void* to, AdamType type) {
    return IsAligned(from, kFour * SizeOf(type)) && IsAligned(to, kFour * SizeOf(type));
  };
  const bool low = kinds.low == AdamLow::kNone || aligned(t.low, t.new_low, LowType(kinds));
  return low && (t.rows == 1 || t.cols % kFour == 0) &&
         (!ReadsParam(kinds) || aligned(t.param, t.param, kinds.param)) &&
         IsAligned(t.new_param, kFour * (kinds.update ? 4 : SizeOf(kinds.param))) &&
         aligned(t.grad, t.grad, kinds.grad) &&
         aligned(t.exp_avg.data, t.new_exp_avg.data, kinds.exp_avg) &&
         aligned(t.exp_avg_sq.data, t.new_exp_avg_sq.data, kinds.exp_avg_sq);
}

// Kinds that a kernel is told, and those that one is made for.
struct AnyKinds {
  static __device__ __forceinline__ AdamKinds Of(const AdamKinds& kinds) { return kinds; }
};
template <AdamType kParam, AdamLow kLow, AdamType kGrad, AdamType kExpAvg, AdamType kExpAvgSq>
struct Only {
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
  int tensor = 0;  // the last whose first block of threads is not after this one
  for (int step = 128; step > 0; step /= 2)
    if (tensor + step < table.count && table.first[tensor + step] <= blockIdx.x) tensor += step;
  const AdamTensor& t = table.tensors[tensor];
  const AdamKinds kinds = Kinds::Of(table.kinds);

  static_assert(kAdamConstants == 10 && sizeof(AdamConstants) == 40);
  const auto* from = reinterpret_cast<const float2*>(table.constants) + tensor * 5;
  const float2 a = from[0], b = from[1], d = from[2], e = from[3], f = from[4];
  const AdamConstants c = {a.x, a.y, b.x, b.y, d.x, d.y, e.x, e.y, f.x, f.y};

  const bool four = table.four[tensor];
  const int64_t in_row = CeilDiv(t.cols, kAdamBlock), blocks = t.rows * in_row;
  const int64_t begin = int64_t{blockIdx.x - table.first[tensor]} * kBlocks;
  const int64_t end = min(blocks, begin + kBlocks);
  for (int64_t block = begin + threadIdx.x / kWarp; block < end; block += kWarps) {
    const int64_t row = t.rows == 1 ? 0 : block / in_row;
    const int64_t col = (block - row * in_row) * kAdamBlock;
    const int length = static_cast<int>(min(int64_t{kAdamBlock}, t.cols - col));
    const Place at = {row * t.cols + col, block, length};
    if (four && length == kAdamBlock)
      StepBlock<true>(t, kinds, c, at, LoadBlock<true>(t, kinds, at));
    else
      StepBlock<false>(t, kinds, c, at, LoadBlock<false>(t, kinds, at));
  }
}

using Kernel = void (*)(Table);

template <class Kinds, class... Others>
Kernel KernelFor(const AdamKinds& kinds) {
  if constexpr (sizeof...(Others) > 0)
    if (!Kinds::Fit(kinds)) return KernelFor<Others...>(kinds);
  return AdamKernel<Kinds>;
}

Kernel ChooseKernel(const AdamKinds& kinds) {
  constexpr AdamType f32 = kAdamFloat32, bf16 = kAdamBFloat16, e4m3 = kAdamE4M3, e5m2 = kAdamE5M2;
  constexpr AdamLow none = AdamLow::kNone, remainder = AdamLow::kRemainder,
                    master = AdamLow::kMaster;
  return KernelFor<Only<f32, none, f32, f32, f32>, Only<f32, none, f32, bf16, bf16>,
                   Only<f32, none, f32, e4m3, e5m2>, Only<f32, none, f32, e4m3, e4m3>,
                   Only<bf16, master, bf16, f32, f32>, Only<bf16, remainder, bf16, f32, f32>,
                   Only<bf16, remainder, bf16, bf16, bf16>, Only<bf16, remainder, bf16, e4m3, e5m2>,
                   Only<bf16, remainder, bf16, e4m3, e4m3>, AnyKinds>(kinds);
}

__global__ void ConstantsKernel(const float* step, int64_t n, const float* hyper, int64_t run,
                                float* constants) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const AdamConstants c = MakeAdamConstants(hyper + i / run * kHyperSize, step[i]);
  memcpy(constants + i * kAdamConstants, &c, sizeof(c));
}

}  // namespace

Status AdamConstantsOf(const Exec<Cuda>& exec, const float* step, int64_t n, const float* hyper,
                       int64_t run, float* constants) {
  constexpr int kThreads = 64;
  if (n == 0) return {};
  ConstantsKernel<<<GridSize(CeilDiv(n, kThreads)), kThreads, 0, exec.stream>>>(step, n, hyper, run,
                                                                                constants);
  return LaunchStatus();
}

Status Adam(const Exec<Cuda>& exec, const AdamTensor* tensors, int64_t count,
            const AdamKinds& kinds, const float* constants) {
  const Kernel kernel = ChooseKernel(kinds);
  for (int64_t begin = 0; begin < count; begin += kTensors) {
    Table table;
    table.count = static_cast<int>(std::min<int64_t>(kTensors, count - begin));
    table.kinds = kinds;
    table.constants = constants + begin * kAdamConstants;
    table.first[0] = 0;
    for (int i = 0; i < table.count; ++i) {
      const AdamTensor& t = table.tensors[i] = tensors[begin + i];
      const int64_t blocks = t.rows * CeilDiv(t.cols, kAdamBlock);
      table.first[i + 1] = table.first[i] + GridSize(CeilDiv(blocks, kBlocks));
      table.four[i] = MovesFour(t, kinds);
    }
    const unsigned blocks = table.first[table.count];
    if (blocks == 0) continue;
    kernel<<<blocks, kWarps * kWarp, 0, exec.stream>>>(table);
    const Status status = LaunchStatus();
    if (status.error != nullptr) return status;
  }
  return {};
}

}  // namespace qshard::kernels
