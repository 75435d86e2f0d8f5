// Cross entropy of rows of logits. Forward reads them once. Backward reads and writes them once.
// Both together read them from memory once, and again from a cache.
//
// Forward, a thread block takes a row, and each warp a part at a time: a lane has four vectors of
// eight logits, and loads the vectors of its next part. The teams of core/cross_entropy.h are
// warps, so they need no communication until the end of the row. Backward, a thread takes vectors.
// Rows that are not aligned vectors are read one logit at a time. Equals core/cross_entropy.h, as
// it is compiled for a device, bit for bit.
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

template <class In>
using Eight = Words<kEach * sizeof(In)>;

// Loads eight logits from `at` on, with -inf past the end of the row.
template <class In, bool kAligned, Read kRead>
__device__ __forceinline__ Eight<In> LoadEight(const In* row, int64_t at, int64_t cols) {
  if (kAligned && at < cols) return Load<kEach * sizeof(In), kRead>(row + at);
  In logits[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    logits[e] = at + e < cols ? row[at + e] : Narrow<In>(NoLogits().max);
  Eight<In> words;
  memcpy(&words, logits, sizeof(words));
  return words;
}

// Returns the maximum of each lane of 32 bits, ignoring NaN: of one fp32 logit, or of two 16-bit
// ones.
template <class In>
__device__ __forceinline__ uint32_t MaxOfWords(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<In, float>)
    return __float_as_uint(fmaxf(__uint_as_float(a), __uint_as_float(b)));
  else if constexpr (std::is_same_v<In, bfloat16>)
    asm("max.bf16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  else
    asm("max.f16x2 %0, %0, %1;" : "+r"(a) : "r"(b));
  return a;
}

__device__ __forceinline__ float WarpSum(float (&lanes)[kEach]) {
  float sum = SumHalves<kEach>(lanes);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    sum = sum + __shfl_xor_sync(kAllLanes, sum, offset);
  return sum;
}

// The logits of a part that a lane has.
template <class In>
struct Part {
  Eight<In> words[kVectors];
};

template <class In, bool kAligned, Read kRead>
__device__ __forceinline__ Part<In> LoadPart(const In* row, int64_t at, int64_t cols) {
  Part<In> part;
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
    part.words[j] = LoadEight<In, kAligned, kRead>(
        row, at + threadIdx.x % kWarp * kEach + j * kPartLanes, cols);
  return part;
}

// Returns the stats of a part that starts at `at`, in all lanes of the warp.
template <class In>
__device__ __forceinline__ RowStats PartStats(const Part<In>& part, int64_t at, int64_t cols,
                                              bool total) {
  uint32_t largest = part.words[0].w[0];
#pragma unroll
  for (int j = 0; j < kVectors; ++j)
#pragma unroll
    for (const uint32_t word : part.words[j].w) largest = MaxOfWords<In>(largest, word);
  float pair[4 / sizeof(In)], max;
  WidenWords<In>(Words<4>{{largest}}, pair);
  max = fmaxf(pair[0], pair[4 / sizeof(In) - 1]);
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, offset));
  max = max + 0.0f;  // no -0
  const float shift = Shift(max);
  float lanes[kEach] = {}, x[kEach];
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    WidenWords<In>(part.words[j], x);
#pragma unroll
    for (int e = 0; e < kEach; ++e) lanes[e] = lanes[e] + ExpOfNegative(x[e] - shift);
  }
  const float sum = WarpSum(lanes);
  if (!total) return {max, sum, 0.0f};
#pragma unroll
  for (int e = 0; e < kEach; ++e) lanes[e] = 0.0f;
#pragma unroll
  for (int j = 0; j < kVectors; ++j) {
    WidenWords<In>(part.words[j], x);
    const int64_t first = at + threadIdx.x % kWarp * kEach + j * kPartLanes;
#pragma unroll
    for (int e = 0; e < kEach; ++e) lanes[e] = lanes[e] + (first + e < cols ? x[e] : 0.0f);
  }
  return {max, sum, WarpSum(lanes)};
}

// Resident blocks per multiprocessor: as many as registers allow for this part and the next.
template <class In>
constexpr int kStatsBlocks = sizeof(In) == 2 ? 3 : 2;

// Computes the stats of a row, four numbers, in the first thread of a block. All threads of it
// call.
template <class In, bool kAligned, Read kRead>
__device__ __forceinline__ void StatsOfRow(const In* x, int32_t label, int64_t cols, int64_t first,
                                           bool total, float (&stats)[4]) {
  const int team = threadIdx.x / kWarp;
  constexpr int64_t kStep = int64_t{kTeams} * kSoftmaxPart;
  RowStats found = NoLogits();
  int64_t at = int64_t{team} * kSoftmaxPart;
  Part<In> next = LoadPart<In, kAligned, kRead>(x, at, cols);
  for (; at < cols; at += kStep) {
    const Part<In> part = next;
    next = LoadPart<In, kAligned, kRead>(x, at + kStep, cols);
    found = Merge(found, PartStats<In>(part, at, cols, total));
  }
  __shared__ RowStats teams[kTeams];
  if (threadIdx.x % kWarp == 0) teams[team] = found;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kTeams; ++i) found = Merge(found, teams[i]);
  const int64_t column = label - first;
  stats[0] = found.max, stats[1] = CanonicalNan(found.sum), stats[3] = CanonicalNan(found.total);
  stats[2] = column >= 0 && column < cols ? CanonicalNan(Widen(x[column])) : 0.0f;
}

template <class In, bool kAligned>
__global__ void __launch_bounds__(kThreads, kStatsBlocks<In>)
    StatsKernel(const In* logits, const int32_t* labels, int64_t cols, int64_t first, bool total,
                float* stats) {
  const int64_t row = blockIdx.x;
  float found[4];
  StatsOfRow<In, kAligned, Read::kStream>(logits + row * cols, labels[row], cols, first, total,
                                          found);
  if (threadIdx.x != 0) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) stats[4 * row + i] = found[i];
}

constexpr int kGradVectors = 4;  // per thread
template <class In>
constexpr int kGradEach = 16 / sizeof(In);

// Stores the gradients of kCount logits. `column` is the place of the label after the first.
template <class In, int kCount>
__device__ __forceinline__ void StoreGrad(const Words<kCount * sizeof(In)>& words, int64_t column,
                                          const CrossEntropyGrad& of, In* d) {
  float v[kCount];
  WidenWords<In>(words, v);
#pragma unroll
  for (int e = 0; e < kCount; ++e) v[e] = of.Of(v[e]);
  if (column >= 0 && column < kCount) {
#pragma unroll
    for (int e = 0; e < kCount; ++e)
      if (e == column) v[e] = v[e] - of.own;
  }
  bool nan = false;
#pragma unroll
  for (int e = 0; e < kCount; ++e) nan |= isnan(v[e]);
  Store<Write::kCached>(d, NarrowExactly<In>(v, nan));
}

// A thread block takes a chunk of a row. One thread computes the row's values, with a division in
// fp64, while logits are loaded.
template <class In, int kCount>
__global__ void __launch_bounds__(kThreads)
    GradKernel(const In* logits, const int32_t* labels, const float* lse, const float* grad,
               int64_t cols, uint32_t chunks, int64_t first, const CrossEntropyRule rule, In* d) {
  const uint32_t row = blockIdx.x / chunks, chunk = blockIdx.x - row * chunks;
  const int64_t begin = (int64_t{chunk} * kThreads * kGradVectors + threadIdx.x) * kCount;
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
    const int64_t at = begin + j * kStep;
    if (at >= cols) return;
    StoreGrad<In, kCount>(words[j], label - first - at, of, d + at);
  }
}

// A thread block takes a row. Its logits are read again from a cache, and then overwritten.
template <class In, bool kAligned>
__global__ void __launch_bounds__(kThreads, kStatsBlocks<In>)
    WithGradKernel(const In* logits, const int32_t* labels, const float* grad, int64_t cols,
                   const CrossEntropyRule rule, float* loss, In* d) {
  const int64_t row = blockIdx.x;
  const int32_t label = labels[row];
  logits += row * cols;
  d += row * cols;
  constexpr int kCount = kAligned ? kGradEach<In> : 1, kStep = kThreads * kCount;
  if (rule.IsIgnored(label)) {
    for (int64_t at = threadIdx.x * kCount; at < cols; at += kStep)
      Store<Write::kCached>(d + at, Words<kCount * sizeof(In)>{});
    if (threadIdx.x == 0) loss[row] = 0.0f;
    return;
  }
  float stats[4];
  StatsOfRow<In, kAligned, Read::kWritten>(logits, label, cols, 0, rule.smoothing > 0, stats);
  __shared__ CrossEntropyGrad shared;
  if (threadIdx.x == 0) {
    float lse;
    CrossEntropyOfParts(rule, stats, 1, label, loss[row], lse);
    shared = CrossEntropyGradOf(rule, label, lse, grad[row]);
  }
  __syncthreads();
  const CrossEntropyGrad of = shared;
  for (int64_t begin = threadIdx.x * kCount; begin < cols; begin += kGradVectors * kStep) {
    Words<kCount * sizeof(In)> words[kGradVectors];
#pragma unroll
    for (int j = 0; j < kGradVectors; ++j)
      if (const int64_t at = begin + j * kStep; at < cols)
        words[j] = Load<kCount * sizeof(In), Read::kWritten>(logits + at);
#pragma unroll
    for (int j = 0; j < kGradVectors; ++j) {
      const int64_t at = begin + j * kStep;
      if (at >= cols) return;
      StoreGrad<In, kCount>(words[j], label - at, of, d + at);
    }
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
  const auto chunks = static_cast<uint32_t>(
      CeilDiv(cols, int64_t{kThreads} * kGradVectors * (vectors ? kGradEach<In> : 1)));
  const auto kernel = vectors ? GradKernel<In, kGradEach<In>> : GradKernel<In, 1>;
  return Launch(exec, kernel, rows * chunks, kThreads, logits, labels, lse, grad, cols, chunks,
                first, rule, d);
}

template <class In>
Status CrossEntropyWithGrad(const Exec<Cuda>& exec, const In* logits, const int32_t* labels,
                            const float* grad, int64_t rows, int64_t cols,
                            const CrossEntropyRule& rule, float* loss, In* d) {
  const auto kernel = cols % kEach == 0 && IsAligned(logits, 16) && IsAligned(d, 16)
                          ? WithGradKernel<In, true>
                          : WithGradKernel<In, false>;
  return Launch(exec, kernel, rows, kThreads, logits, labels, grad, cols, rule, loss, d);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CrossEntropyStats)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CrossEntropyBackward)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CrossEntropyWithGrad)

}  // namespace qshard::kernels
