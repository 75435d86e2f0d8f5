// Cross entropy of rows of logits, from one read of them forward, and one read and write backward.
//
// Forward, a block takes a row and a warp a part of it at a time, of which a lane holds four
// vectors of eight logits. Teams of core/cross_entropy.h are warps, so they merge what they find
// without a word to each other until the row ends. Backward, a thread takes vectors. Logits go one
// by one where rows are not aligned vectors. Equals core/cross_entropy.h bit for bit.
#include "core/norm.h"
#include "kernels/cross_entropy.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

constexpr int kEach = 8, kVectors = kSoftmaxPart / (kWarp * kEach);
static_assert(kPartLanes == kWarp * kEach && kEach == kLanesOfThread);
constexpr int kThreads = kTeams * kWarp;

// Eight logits from `at` on; what is beyond the row is -inf.
template <class In, bool kAligned>
__device__ __forceinline__ void LoadEight(const In* row, int64_t at, int64_t cols,
                                          float (&v)[kEach]) {
  if (kAligned && at < cols) {
    WidenWords<In>(Load<kEach * sizeof(In), Read::kStream>(row + at), v);
  } else {
#pragma unroll
    for (int e = 0; e < kEach; ++e) v[e] = at + e < cols ? Widen(row[at + e]) : NoLogits().max;
  }
}

__device__ __forceinline__ float WarpSum(float (&lanes)[kEach]) {
  float sum = SumHalves<kEach>(lanes);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum = sum + __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// Of a part that begins at `at`, in all lanes of the warp.
template <class In, bool kAligned>
__device__ __forceinline__ RowStats PartStats(const In* row, int64_t at, int64_t cols, bool total) {
  const int64_t first = at + threadIdx.x % kWarp * kEach;
  float x[kVectors][kEach], max = NoLogits().max;
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    LoadEight<In, kAligned>(row, first + j * kPartLanes, cols, x[j]);
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
#pragma unroll
    for (int e = 0; e < kEach; ++e) max = fmaxf(max, x[j][e]);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, offset));
  max = max + 0.0f;  // No -0.
  const float shift = Shift(max);
  float sums[kEach] = {}, totals[kEach] = {};
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
#pragma unroll
    for (int e = 0; e < kEach; ++e) sums[e] = sums[e] + ExpOfNegative(x[j][e] - shift);
  if (total)
#pragma unroll
    for (int j = 0; j < kVectors; ++j)
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        totals[e] = totals[e] + (first + j * kPartLanes + e < cols ? x[j][e] : 0.0f);
  return {max, WarpSum(sums), total ? WarpSum(totals) : 0.0f};
}

template <class In, bool kAligned>
__global__ void __launch_bounds__(kThreads, 3)
    StatsKernel(const In* logits, const int32_t* labels, int64_t cols, int64_t first, bool total,
                float* stats) {
  const int64_t row = blockIdx.x;
  const In* x = logits + row * cols;
  const int team = threadIdx.x / kWarp;
  RowStats found = NoLogits();
  for (int64_t at = int64_t{team} * kSoftmaxPart; at < cols; at += int64_t{kTeams} * kSoftmaxPart)
    found = Merge(found, PartStats<In, kAligned>(x, at, cols, total));
  __shared__ RowStats teams[kTeams];
  if (threadIdx.x % kWarp == 0) teams[team] = found;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kTeams; ++i) found = Merge(found, teams[i]);
  const int64_t column = labels[row] - first;
  float* to = stats + 4 * row;
  to[0] = found.max, to[1] = CanonicalNan(found.sum), to[3] = CanonicalNan(found.total);
  to[2] = column >= 0 && column < cols ? CanonicalNan(Widen(x[column])) : 0.0f;
}

constexpr int kGradVectors = 4;  // of a thread
template <class In>
constexpr int kGradEach = 16 / sizeof(In);

// A block takes a piece of a row. What is one for the row, with its division in fp64, is made by
// one thread, while logits come.
template <class In, int kCount>
__global__ void __launch_bounds__(kThreads)
    GradKernel(const In* logits, const int32_t* labels, const float* lse, const float* grad,
               int64_t cols, uint32_t pieces, int64_t first, const CrossEntropyRule rule, In* d) {
  const uint32_t row = blockIdx.x / pieces, piece = blockIdx.x - row * pieces;
  const int64_t begin = (int64_t{piece} * kThreads * kGradVectors + threadIdx.x) * kCount;
  constexpr int kStep = kThreads * kCount;
  logits += row * cols;
  d += row * cols;
  const int32_t label = labels[row];
  if (rule.IsIgnored(label)) {
#pragma unroll
    for (int j = 0; j < kGradVectors; ++j)
      if (const int64_t at = begin + j * kStep; at < cols)
        Store<Write::kCached>(d + at, Words<kCount * sizeof(In)>{});
    return;
  }
  Words<kCount * sizeof(In)> words[kGradVectors];
#pragma unroll
  for (int j = 0; j < kGradVectors; ++j)
    if (const int64_t at = begin + j * kStep; at < cols)
      words[j] = Load<kCount * sizeof(In), Read::kStream>(logits + at);
  __shared__ CrossEntropyGrad shared;
  if (threadIdx.x == 0) shared = CrossEntropyGradOf(rule, label, lse[row], grad[row]);
  __syncthreads();
  const CrossEntropyGrad of = shared;
#pragma unroll
  for (int j = 0; j < kGradVectors; ++j) {
    const int64_t at = begin + j * kStep, column = label - first - at;
    if (at >= cols) return;
    const int own = column >= 0 && column < kCount ? static_cast<int>(column) : -1;
    float v[kCount];
    WidenWords<In>(words[j], v);
    bool nan = false;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      v[e] = of.Of(v[e]);
      if (e == own) v[e] = v[e] - of.own;
      nan |= isnan(v[e]);
    }
    Store<Write::kCached>(d + at, NarrowExactly<In>(v, nan));
  }
}

}  // namespace

template <class In>
Status CrossEntropyStats(const Exec<Cuda>& exec, const In* logits, const int32_t* labels,
                         int64_t rows, int64_t cols, int64_t first, bool total, float* stats) {
  const auto kernel =
      cols % kEach == 0 && IsAligned(logits, 16) ? StatsKernel<In, true> : StatsKernel<In, false>;
  return Launch(exec, kernel, rows, kThreads, logits, labels, cols, first, total, stats);
}

Status CrossEntropy(const Exec<Cuda>& exec, const float* stats, const int32_t* labels, int64_t rows,
                    int64_t parts, const CrossEntropyRule& rule, float* loss, float* lse) {
  return ForEach(exec, rows, [=] __device__(int64_t row) {
    CrossEntropyOfParts(rule, stats + 4 * row * parts, parts, labels[row], loss[row], lse[row]);
  });
}

template <class In>
Status CrossEntropyBackward(const Exec<Cuda>& exec, const In* logits, const int32_t* labels,
                            const float* lse, const float* grad, int64_t rows, int64_t cols,
                            int64_t first, const CrossEntropyRule& rule, In* d) {
  const bool vectors = cols % kGradEach<In> == 0 && IsAligned(logits, 16) && IsAligned(d, 16);
  const auto pieces = static_cast<uint32_t>(
      CeilDiv(cols, int64_t{kThreads} * kGradVectors * (vectors ? kGradEach<In> : 1)));
  const auto kernel = vectors ? GradKernel<In, kGradEach<In>> : GradKernel<In, 1>;
  return Launch(exec, kernel, rows * pieces, kThreads, logits, labels, lse, grad, cols, pieces,
                first, rule, d);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CrossEntropyStats)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CrossEntropyBackward)

}  // namespace qshard::kernels
