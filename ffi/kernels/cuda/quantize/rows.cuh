// Quantization of 1-D blocks that fill whole rows, in the order of x: a stream of blocks.
//
// A thread takes 8 elements at a time, and kLanes threads take a block. A warp takes 4 consecutive
// runs of 256 elements. It computes the scale of each block once, in one of its lanes, which sends
// it to the others. Reads x once, writes codes and scales once, nothing else.
#ifndef QSHARD_KERNELS_CUDA_QUANTIZE_ROWS_CUH_
#define QSHARD_KERNELS_CUDA_QUANTIZE_ROWS_CUH_

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/quantize/codes.cuh"
#include "kernels/cuda/quantize/scales.cuh"

namespace qshard::kernels {

constexpr int kRuns = 4;  // per warp; all loads are in flight together

template <class In, class Scales>
struct QuantizeRowsTuning {
  static constexpr bool kSmall = sizeof(In) == 2 && Fast<Scales>::kGlobal;
  static constexpr int kThreads = kSmall ? 128 : 256;
  static constexpr int kBlocksPerSm = sizeof(In) == 4 ? 4 : kSmall ? 8 : 5;
  // NVFP4 follows an amax kernel that read x forwards and left its end in L2.
  static constexpr bool kBackward = Fast<Scales>::kGlobal;
};

// The global scale, if all blocks of a thread block share one.
template <class Global>
struct SharedGlobal {
  Global value;
  bool one;
};

// `vectors`: number of vectors of 8 elements. x must be aligned to 16 bytes, data to kStoredBits.
template <class In, class Code, class Scales>
__global__ void __launch_bounds__(QuantizeRowsTuning<In, Scales>::kThreads,
                                  QuantizeRowsTuning<In, Scales>::kBlocksPerSm)
    QuantizeRows(const In* x, const Scales scales, int64_t vectors, uint8_t* data,
                 typename Scales::Stored* scale_inv) {
  using Tuning = QuantizeRowsTuning<In, Scales>;
  constexpr int kLanes = kFastBlock<Scales> / kEight;
  constexpr int kWarpVectors = kWarp * kRuns, kBlockVectors = Tuning::kThreads * kRuns;
  constexpr bool kGlobal = Fast<Scales>::kGlobal;
  using Global = typename Fast<Scales>::Global;
  using Abs = Magnitudes<In>;

  const int64_t index = Tuning::kBackward ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int lane = threadIdx.x % kWarp;
  const int64_t begin = index * kBlockVectors;
  const int64_t first = begin + threadIdx.x / kWarp * kWarpVectors;  // of the warp
  const int left = static_cast<int>(min(vectors - first, int64_t{kWarpVectors})) - lane;

  EightOf<In> v[kRuns];
  const In* from = x + (first + lane) * kEight;
  constexpr int kBytes = kEight * sizeof(In);
  if (vectors - begin >= kBlockVectors) {
#pragma unroll
    for (int u = 0; u < kRuns; ++u) v[u] = Load<kBytes, Read::kCached>(from + u * kWarp * kEight);
  } else {
#pragma unroll
    for (int u = 0; u < kRuns; ++u) {
      v[u] = {};
      if (u * kWarp < left) v[u] = Load<kBytes, Read::kCached>(from + u * kWarp * kEight);
    }
  }

  __shared__ SharedGlobal<Global> shared;
  if constexpr (kGlobal) {
    if (threadIdx.x < kWarp) {
      const int64_t last = min(begin + kBlockVectors, vectors) / kLanes - 1;
      const int64_t place = begin / kLanes / scales.run;
      const SharedGlobal<Global> s{GlobalAt(scales, place), last / scales.run == place};
      if (lane == 0) shared = s;
    }
    __syncthreads();
  }

  // Amaxes of the block of each run.
  uint32_t m[kRuns];
#pragma unroll
  for (int u = 0; u < kRuns; ++u) {
    m[u] = v[u].w[0];
#pragma unroll
    for (int i = 1; i < EightOf<In>::kCount; ++i) m[u] = Abs::MaxAbs(m[u], v[u].w[i]);
    m[u] = Abs::Abs(m[u]);
  }
  constexpr int kWords = kRuns / Abs::kPerWord;
  uint32_t folded[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i)
    folded[i] =
        Abs::kPerWord == 2 ? Abs::Fold(m[2 * i], m[2 * i + 1 < kRuns ? 2 * i + 1 : 0]) : m[i];
  ReduceScatter<In, kLanes / 2, 1, kWords>(folded, lane);

  // Lanes of a block: 2 lanes have two runs each, 2 * bit and the next. More lanes have one run
  // each.
  constexpr int kOwn = kLanes == 2 ? 2 : 1, kHigh = kLanes / 2, kLow = kLanes / 4;
  const int own = (lane & kHigh) != 0 ? 2 : 0;
  const bool odd = kLow > 0 && (lane & kLow) != 0;
  const int64_t run_block = first / kLanes + lane / kLanes;
  float scale[kOwn];
#pragma unroll
  for (int k = 0; k < kOwn; ++k) {
    uint32_t bits = folded[Abs::kPerWord == 2 ? 0 : k];
    if (Abs::kPerWord == 2) bits = (kOwn == 2 ? k == 1 : odd) ? bits >> 16 : bits & 0xFFFFu;
    const int u = own + (kOwn == 2 ? k : odd);
    const int64_t block = run_block + u * (kWarp / kLanes);
    const bool exists = u * kWarp < left;
    Global global{};
    if constexpr (kGlobal) {
      global = shared.value;
      if (!shared.one && exists) global = GlobalAt(scales, block / scales.run);
    }
    const auto s = ScaleOf<Code>(scales, global, Abs::Value(bits));
    scale[k] = s.scale;
    const bool writes = kLow < 2 || lane % (kLow > 0 ? kLow : 1) == 0;
    if (exists && writes && scale_inv != nullptr) scale_inv[block] = s.scale_inv;
  }
#pragma unroll
  for (int u = 0; u < kRuns; ++u) {
    const int from_lane = (lane & ~(kLanes - 1)) + u / 2 * kHigh + u % 2 * kLow;
    const float s = __shfl_sync(0xFFFFFFFFu, scale[kOwn == 2 ? u % 2 : 0], from_lane);
    if (u * kWarp < left)
      Store<Write::kStream>(data + (first + u * kWarp + lane) * kStoredBits<Code>,
                            EncodeRow<In, Code>(v[u], s));
  }
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_QUANTIZE_ROWS_CUH_
