// Sums of the rows of experts by token, and their gradients, each in one read of its operands.
//
// A thread of the sum takes a vector of one token, and several rows are in flight. A thread block
// of the gradient takes a row of y. Equals kernels/combine_rows.h bit for bit.
#include "kernels/combine_rows.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/nn/row_sum.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

constexpr int kSumThreads = 128;
constexpr int kInFlight = 4;  // rows that are loaded together

template <class In, int kCount>
__global__ void __launch_bounds__(kSumThreads)
    CombineRowsKernel(const In* y, const RowSums sums, int64_t cols, int64_t pieces, In* x) {
  const int64_t token = blockIdx.x / pieces;
  const int64_t i = ((blockIdx.x - token * pieces) * kSumThreads + threadIdx.x) * kCount;
  if (i >= cols) return;
  const int32_t* positions = sums.positions + token * sums.choices;
  const float* weights = sums.weights + token * sums.choices;
  float total[kCount] = {}, v[kCount];
  for (int64_t c = 0; c < sums.choices; c += kInFlight) {
    Words<kCount * sizeof(In)> rows[kInFlight];
    bool there[kInFlight];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      const int64_t row = c + j < sums.choices ? __ldg(positions + c + j) : -1;
      there[j] = row >= 0 && row < sums.rows;
      if (there[j]) rows[j] = Load<kCount * sizeof(In)>(y + row * cols + i);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; ++j) {
      if (!there[j]) continue;
      const float weight = __ldg(weights + c + j);
      WidenWords<In>(rows[j], v);
#pragma unroll
      for (int k = 0; k < kCount; ++k) total[k] = FusedMultiplyAdd(weight, v[k], total[k]);
    }
  }
  bool nan = false;
#pragma unroll
  for (int k = 0; k < kCount; ++k) nan |= isnan(total[k]);
  Store<Write::kCached>(x + token * cols + i, NarrowExactly<In>(total, nan));
}

template <class In, bool kVectors>
__global__ void __launch_bounds__(kThreads)
    CombineRowsGradKernel(const In* y, const RowTokens of, const In* grad, int64_t cols, In* dy,
                          float* dweights, float* amax) {
  const int64_t row = blockIdx.x, token = __ldg(of.tokens + row);
  const bool there = token >= 0 && token < of.count;
  const float weight = there ? __ldg(of.weights + row) : 0.0f;
  const In *own = y + row * cols, *from = grad + token * cols;
  float lanes[kEach] = {};
  Magnitude<In> m;
  for (int64_t i = threadIdx.x * kEach; i < cols; i += kSumLanes) {
    float g[kEach] = {}, v[kEach];
    if (there) {
      EightFloats<In, kVectors>(from + i, cols - i, g);
      EightFloats<In, kVectors>(own + i, cols - i, v);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (kVectors || i + e < cols) lanes[e] = FusedMultiplyAdd(v[e], g[e], lanes[e]);
        g[e] = weight * g[e];
      }
    }
    StoreEight<In, kVectors>(dy + row * cols + i, cols - i, g, &m);
  }
  const float sum = CanonicalNan(TeamSum<kThreads>(lanes));
  const int32_t bits = TeamMax<kThreads>(m.AsFloatBits());
  if (threadIdx.x != 0) return;
  dweights[row] = sum;
  amax[row] = FloatFromBits(bits);
}

}  // namespace

template <class In>
Status CombineRows(const Exec<Cuda>& exec, const In* y, const RowSums& sums, int64_t cols, In* x) {
  if (cols == 0) return {};
  constexpr int kVector = 16 / sizeof(In);
  const bool vectors = cols % kVector == 0 && IsAligned(y, 16) && IsAligned(x, 16);
  const int64_t pieces = CeilDiv(cols, kSumThreads * (vectors ? kVector : 1));
  const auto kernel = vectors ? CombineRowsKernel<In, kVector> : CombineRowsKernel<In, 1>;
  return Launch(exec, kernel, sums.tokens * pieces, kSumThreads, y, sums, cols, pieces, x);
}

template <class In>
Status CombineRowsGrad(const Exec<Cuda>& exec, const In* y, const RowTokens& of, const In* grad,
                       int64_t cols, In* dy, float* dweights, float* amax) {
  const bool vectors = AreVectors(cols, {y, grad, dy});
  const auto kernel = vectors ? CombineRowsGradKernel<In, true> : CombineRowsGradKernel<In, false>;
  return Launch(exec, kernel, of.rows, kThreads, y, of, grad, cols, dy, dweights, amax);
}

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CombineRows)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, CombineRowsGrad)

}  // namespace qshard::kernels
