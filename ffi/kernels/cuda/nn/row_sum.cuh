// Rows of elements, eight neighbours a thread, and their sums in the order of core/norm.h.
#ifndef QSHARD_KERNELS_CUDA_NN_ROW_SUM_CUH_
#define QSHARD_KERNELS_CUDA_NN_ROW_SUM_CUH_

#include <algorithm>
#include <initializer_list>

#include "core/norm.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = kSumLanes / kLanesOfThread, kWarps = kThreads / kWarp;
static_assert(kLanesOfWarp == kWarp * kLanesOfThread && kWarps == 4);
constexpr int kEach = kLanesOfThread;

template <class In>
using Eight = Words<kEach * sizeof(In)>;

template <class T, bool kVectors>
__device__ __forceinline__ void EightFloats(const T* from, int64_t left, float (&v)[kEach]) {
  if constexpr (kVectors) {
    WidenWords<T>(Load<kEach * sizeof(T), Read::kCached>(from), v);
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e) v[e] = e < left ? Widen(from[e]) : 0.0f;
  }
}

template <class In>
__device__ __forceinline__ Eight<In> NarrowEight(const float (&v)[kEach]) {
  bool nan = false;
#pragma unroll
  for (int e = 0; e < kEach; ++e) nan |= isnan(v[e]);
  return NarrowExactly<In>(v, nan);
}

// Stores the first `left` of eight elements, and adds them to a magnitude.
template <class In, bool kVectors>
__device__ __forceinline__ void StoreEight(In* to, int64_t left, const float (&v)[kEach],
                                           Magnitude<In>* m) {
  if constexpr (kVectors) {
    const Eight<In> x = NarrowEight<In>(v);
    if (m != nullptr) m->Add(x);
    Store<Write::kCached>(to, x);
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (e >= left) continue;
      const float one[1] = {v[e]};
      const auto x = NarrowExactly<In>(one, isnan(v[e]));
      if (m != nullptr) m->Add(x);
      Store<Write::kCached>(to + e, x);
    }
  }
}

// Sums the lanes of all threads over a row. Returns the sum in all threads of the team.
template <int kTeam>
__device__ __forceinline__ float TeamSum(float (&lanes)[kEach]) {
  float sum = SumHalves<kEach>(lanes);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum = sum + __shfl_xor_sync(kAllLanes, sum, offset);
  if constexpr (kTeam == kWarp) {
    return sum + 0.0f;  // the other warps add 0
  } else {
    __shared__ float warps[kWarps];
    __syncthreads();
    if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = sum;
    __syncthreads();
    float four[kWarps] = {warps[0], warps[1], warps[2], warps[3]};
    return SumHalves<kWarps>(four);
  }
}

inline bool AreVectors(int64_t cols, std::initializer_list<const void*> buffers) {
  return cols % kEach == 0 && std::all_of(buffers.begin(), buffers.end(),
                                          [](const void* p) { return IsAligned(p, 16); });
}

}  // namespace
}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_NN_ROW_SUM_CUH_
