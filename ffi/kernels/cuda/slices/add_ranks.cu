// Sums the ranks' parts of a slice, in rank order, in one pass.
#include "kernels/add_ranks.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kInFlight = 4;  // ranks that are loaded together

// Adds kCount elements from `at` on.
template <class In, int kCount>
__device__ __forceinline__ void AddAt(const In* parts, int64_t ranks, int64_t length, float divisor,
                                      const float* before, float* total, int64_t at) {
  float sums[kCount] = {}, v[kCount];
  Words<kCount * sizeof(float)> added = {};
  if (before != nullptr) added = Load<kCount * sizeof(float), Read::kStream>(before + at);
  for (int64_t rank = 0; rank < ranks; rank += kInFlight) {
    Words<kCount * sizeof(In)> x[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (rank + j < ranks)
        x[j] = Load<kCount * sizeof(In), Read::kStream>(parts + (rank + j) * length + at);
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (rank + j >= ranks) break;
      WidenWords<In>(x[j], v);
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = rank + j == 0 ? v[i] : sums[i] + v[i];
    }
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = __fdiv_rn(sums[i], divisor);
  if (before != nullptr) {
    WidenWords<float>(added, v);
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = v[i] + sums[i];
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = CanonicalNan(sums[i]);
  Store<Write::kCached>(total + at, NarrowWords<float>(sums));
}

template <class In, int kCount>
__global__ void __launch_bounds__(kThreads)
    AddRanksKernel(const In* parts, int64_t ranks, int64_t length, float divisor,
                   const float* before, float* total) {
  const int64_t at = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kCount;
  if (at < length) AddAt<In, kCount>(parts, ranks, length, divisor, before, total, at);
}

}  // namespace

template <class In>
Status AddRanks(const Exec<Cuda>& exec, const In* parts, int64_t ranks, int64_t length, bool mean,
                const float* before, float* total) {
  const float divisor = mean && ranks > 0 ? static_cast<float>(ranks) : 1.0f;
  constexpr int kVector = 16 / sizeof(In);
  // Only then is the part of every rank aligned to vectors.
  if (length % kVector == 0 && IsAligned(parts, 16) && IsAligned(total, 16))
    return Launch(exec, AddRanksKernel<In, kVector>, CeilDiv(length, kThreads * kVector), kThreads,
                  parts, ranks, length, divisor, before, total);
  return Launch(exec, AddRanksKernel<In, 1>, CeilDiv(length, kThreads), kThreads, parts, ranks,
                length, divisor, before, total);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, AddRanks)

}  // namespace qshard::kernels
