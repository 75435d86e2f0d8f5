// RMSNorm and its gradients, each in one read of its operands.
//
// A team of threads, a warp or a thread block of four warps, takes a row at a time and keeps it in
// registers. In every kSumLanes elements a thread has eight neighbours, which core/norm.h sums as
// one thread's lanes. Rows that are too long are read again, from L2. The gradient of the weight
// stays in registers over the kSumRows rows of a part, and long rows stay in shared memory beside
// it. Rows that are not aligned vectors are read one element at a time. Equals core/norm.h bit for
// bit.
#include <type_traits>

#include "kernels/activation.h"
#include "kernels/cuda/async_copy.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/nn/row_sum.cuh"
#include "kernels/cuda/raise_amax.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {
namespace {

// How a team takes a row. kHeld: vectors that a thread keeps in registers, or 0 to read them again.
// kVectors: rows are aligned vectors.
template <int kThreadsOfTeam, int kVectorsHeld, bool kAligned>
struct RowShape {
  static constexpr int kTeam = kThreadsOfTeam, kHeld = kVectorsHeld;
  static constexpr bool kVectors = kAligned;
  static constexpr int kTeams = kThreads / kTeam, kStep = kTeam * kEach;
};

// A weight of any type. The type is the same for all threads, so it costs a uniform branch.
enum class WeightType { kFloat, kBFloat16, kFloat16 };
template <class Weight>
constexpr WeightType kWeightType = std::is_same_v<Weight, float>      ? WeightType::kFloat
                                   : std::is_same_v<Weight, bfloat16> ? WeightType::kBFloat16
                                                                      : WeightType::kFloat16;
struct Weights {
  const void* data;
  WeightType type;

  // The weights from element i on.
  __device__ __forceinline__ Weights From(int64_t i) const {
    const int size = type == WeightType::kFloat ? sizeof(float) : sizeof(bfloat16);
    return {static_cast<const char*>(data) + i * size, type};
  }
};

template <bool kVectors>
__device__ __forceinline__ void EightWeights(const Weights& w, int64_t at, int64_t left,
                                             float (&v)[kEach]) {
  if (w.type == WeightType::kBFloat16)
    EightFloats<bfloat16, kVectors>(static_cast<const bfloat16*>(w.data) + at, left, v);
  else if (w.type == WeightType::kFloat)
    EightFloats<float, kVectors>(static_cast<const float*>(w.data) + at, left, v);
  else
    EightFloats<float16, kVectors>(static_cast<const float16*>(w.data) + at, left, v);
}

// Calls body(j, i) for the vectors of a thread. Vector j starts at element i.
template <class Shape, class Body>
__device__ __forceinline__ void ForVectors(int64_t cols, const Body& body) {
  const int64_t first = threadIdx.x % Shape::kTeam * kEach;
  if constexpr (Shape::kHeld > 0) {
#pragma unroll
    for (int j = 0; j < Shape::kHeld; ++j)
      if (first + j * Shape::kStep < cols) body(j, first + j * Shape::kStep);
  } else {
#pragma unroll 1
    for (int64_t i = first; i < cols; i += Shape::kStep) body(0, i);
  }
}

template <class Shape>
constexpr int kHeldOrOne = Shape::kHeld > 0 ? Shape::kHeld : 1;

// Returns vector j of a row, from registers or read again.
template <class Shape, class In>
__device__ __forceinline__ void ValuesOf(const Eight<In>& held, const In* row, int64_t i,
                                         int64_t cols, float (&v)[kEach]) {
  if constexpr (Shape::kHeld > 0)
    WidenWords<In>(held, v);
  else
    EightFloats<In, Shape::kVectors>(row + i, cols - i, v);
}

template <class Shape, class In>
__device__ __forceinline__ void Hold(const In* row, int64_t cols,
                                     Eight<In> (&held)[kHeldOrOne<Shape>]) {
  if constexpr (Shape::kHeld > 0)
    ForVectors<Shape>(cols, [&](int j, int64_t i) {
      held[j] = Load<kEach * sizeof(In), Read::kCached>(row + i);
    });
}

// Grid: x is the run, y the split of its rows (LaunchRaising).
template <class In, class Shape>
__global__ void __launch_bounds__(kThreads)
    RmsNormKernel(const In* x, const Weights weights, int64_t rows, int64_t cols, float eps, In* y,
                  float* rstd, float* amax) {
  Magnitude<In> m;
  const Weights weight = weights.From(blockIdx.x * cols);
  const int team = threadIdx.x / Shape::kTeam;
  // Teams do not synchronize in this loop, so they may run it a different number of times.
  for (int64_t r = int64_t{blockIdx.y} * Shape::kTeams + team; r < rows;
       r += int64_t{gridDim.y} * Shape::kTeams) {
    const int64_t row = blockIdx.x * rows + r;
    const In* from = x + row * cols;
    Eight<In> held[kHeldOrOne<Shape>];
    Hold<Shape>(from, cols, held);
    float lanes[kEach] = {};
    ForVectors<Shape>(cols, [&](int j, int64_t i) {
      float v[kEach];
      ValuesOf<Shape>(held[j], from, i, cols, v);
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (Shape::kVectors || i + e < cols) lanes[e] = FusedMultiplyAdd(v[e], v[e], lanes[e]);
    });
    const float scale = CanonicalNan(RmsInverse(TeamSum<Shape::kTeam>(lanes), cols, eps));
    if (threadIdx.x % Shape::kTeam == 0) rstd[row] = scale;
    ForVectors<Shape>(cols, [&](int j, int64_t i) {
      float v[kEach], w[kEach];
      ValuesOf<Shape>(held[j], from, i, cols, v);
      EightWeights<Shape::kVectors>(weight, i, cols - i, w);
#pragma unroll
      for (int e = 0; e < kEach; ++e) v[e] = RmsNorm(v[e], scale, w[e]);
      StoreEight<In, Shape::kVectors>(y + row * cols + i, cols - i, v, &m);
    });
  }
  const int32_t bits = TeamMax<kThreads>(m.AsFloatBits());
  if (threadIdx.x != 0) return;
  AwaitZeros();
  StoreOrRaise(amax + blockIdx.x, bits);
}

// A thread's vectors of a row of x and of the gradient. A few are in registers, more are in shared
// memory, and the vectors of the longest rows are read again. In shared memory a thread reads what
// it has copied itself, so threads do not synchronize.
template <class In, class Shape>
struct RowAndGrad {
  static constexpr int kMostInRegisters = 4, kVector = kEach * sizeof(In), kCopy = 16;
  static constexpr bool kShared = Shape::kHeld > kMostInRegisters;
  static constexpr bool kRegisters = Shape::kHeld > 0 && !kShared;
  static constexpr int kSharedBytes = kShared ? 2 * Shape::kHeld * kThreads * kVector : 0;

  const In *x, *grad;
  int64_t cols;
  uint4* shared;
  Eight<In> held[kRegisters ? Shape::kHeld : 1], held_grad[kRegisters ? Shape::kHeld : 1];

  __device__ __forceinline__ void Load() {
    if constexpr (kRegisters) {
      Hold<Shape>(x, cols, held);
      Hold<Shape>(grad, cols, held_grad);
    } else if constexpr (kShared) {
      ForVectors<Shape>(cols, [&](int j, int64_t i) {
#pragma unroll
        for (int part = 0; part < kVector / kCopy; ++part) {
          CopyAsync(SharedAddress(Place(0, j, part)), reinterpret_cast<const uint4*>(x + i) + part);
          CopyAsync(SharedAddress(Place(1, j, part)),
                    reinterpret_cast<const uint4*>(grad + i) + part);
        }
      });
      EndCopies();
      WaitForCopies<0>();
    }
  }

  // Returns vector j, which starts at element i.
  __device__ __forceinline__ void Get(int j, int64_t i, float (&v)[kEach], float (&g)[kEach]) {
    if constexpr (kShared) {
      WidenWords<In>(FromShared(0, j), v);
      WidenWords<In>(FromShared(1, j), g);
    } else {
      ValuesOf<Shape>(held[kRegisters ? j : 0], x, i, cols, v);
      ValuesOf<Shape>(held_grad[kRegisters ? j : 0], grad, i, cols, g);
    }
  }

 private:
  // Copies of 16 bytes of neighbouring threads are neighbours.
  __device__ __forceinline__ uint4* Place(int array, int j, int part) const {
    const int vector = array * Shape::kHeld + j;
    return shared + (vector * (kVector / kCopy) + part) * kThreads + threadIdx.x;
  }

  __device__ __forceinline__ Eight<In> FromShared(int array, int j) const {
    uint4 words[kVector / kCopy];
#pragma unroll
    for (int part = 0; part < kVector / kCopy; ++part) words[part] = *Place(array, j, part);
    Eight<In> v;
    memcpy(&v, words, kVector);
    return v;
  }
};

// A team takes the rows of a part.
template <class In, class Shape>
__global__ void __launch_bounds__(kThreads)
    RmsNormGradKernel(const In* x, const Weights weights, const float* rstd, const In* grad,
                      int64_t runs, int64_t rows, int64_t cols, In* dx, float* parts) {
  constexpr bool kVectors = Shape::kVectors;
  extern __shared__ uint4 shared[];
  const int64_t part = int64_t{blockIdx.x} * Shape::kTeams + threadIdx.x / Shape::kTeam;
  const int64_t count = CeilDiv(rows, kSumRows), run = runs == 1 ? 0 : part / count;
  if (part >= runs * count) return;  // the whole team, which is a warp if a block has several
  const int64_t begin = run * rows + (part - run * count) * kSumRows;
  const int64_t end = min((run + 1) * rows, begin + kSumRows);
  const Weights weight = weights.From(run * cols);
  float* own = parts + part * cols;
  float sums[kHeldOrOne<Shape>][kEach] = {};
#pragma unroll 1
  for (int64_t row = begin; row < end; ++row) {
    RowAndGrad<In, Shape> of{x + row * cols, grad + row * cols, cols, shared};
    of.Load();
    const float scale = rstd[row];
    float lanes[kEach] = {};
    ForVectors<Shape>(cols, [&](int j, int64_t i) {
      float v[kEach], g[kEach], w[kEach];
      of.Get(j, i, v, g);
      EightWeights<kVectors>(weight, i, cols - i, w);
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (kVectors || i + e < cols)
          lanes[e] = FusedMultiplyAdd(g[e] * w[e], v[e] * scale, lanes[e]);
    });
    const float along = Divide(TeamSum<Shape::kTeam>(lanes), static_cast<float>(cols));
    ForVectors<Shape>(cols, [&](int j, int64_t i) {
      float v[kEach], g[kEach], w[kEach];
      of.Get(j, i, v, g);
      EightWeights<kVectors>(weight, i, cols - i, w);
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        if (!kVectors && i + e >= cols) continue;
        if constexpr (Shape::kHeld > 0) {
          sums[j][e] = FusedMultiplyAdd(g[e], v[e] * scale, sums[j][e]);
        } else {
          const float before = row == begin ? 0.0f : own[i + e];
          const float sum = FusedMultiplyAdd(g[e], v[e] * scale, before);
          own[i + e] = row + 1 == end ? CanonicalNan(sum) : sum;
        }
        v[e] = RmsNormGrad(v[e], scale, w[e], g[e], along);
      }
      StoreEight<In, kVectors>(dx + row * cols + i, cols - i, v,
                               static_cast<Magnitude<In>*>(nullptr));
    });
  }
  if constexpr (Shape::kHeld > 0)
    ForVectors<Shape>(cols, [&](int j, int64_t i) {
#pragma unroll
      for (int e = 0; e < kEach; ++e) own[i + e] = CanonicalNan(sums[j][e]);
    });
}

// A thread block takes kWarp columns of a run, with kRowLanes partial sums each.
__global__ void __launch_bounds__(kWarp* kRowLanes)
    SumPartsKernel(const float* parts, int64_t count, int64_t cols, float* dweight) {
  __shared__ float lanes[kRowLanes][kWarp];
  const int64_t blocks = CeilDiv(cols, kWarp), run = blockIdx.x / blocks;
  const int lane = threadIdx.x / kWarp, column = threadIdx.x % kWarp;
  const int64_t i = (blockIdx.x - run * blocks) * kWarp + column;
  parts += run * count * cols;
  float sum = 0.0f;
  if (i < cols)
    for (int64_t part = lane; part < count; part += kRowLanes) sum = sum + parts[part * cols + i];
  lanes[lane][column] = sum;
  __syncthreads();
  if (lane > 0 || i >= cols) return;
  float all[kRowLanes];
#pragma unroll
  for (int k = 0; k < kRowLanes; ++k) all[k] = lanes[k][column];
  dweight[run * cols + i] = CanonicalNan(SumHalves<kRowLanes>(all));
}

// Calls launch(RowShape{}) with the shape for rows of `cols`.
template <class In, class Fn>
Status ForShape(bool vectors, int64_t cols, const Fn& launch) {
  if (!vectors) return launch(RowShape<kThreads, 0, false>{});
  if (cols <= kLanesOfWarp) return launch(RowShape<kWarp, 1, true>{});
  if (cols <= kSumLanes) return launch(RowShape<kThreads, 1, true>{});
  if (cols <= 4 * kSumLanes) return launch(RowShape<kThreads, 4, true>{});
  if (cols <= 8 * kSumLanes) return launch(RowShape<kThreads, 8, true>{});
  if constexpr (sizeof(In) == 2)
    if (cols <= 16 * kSumLanes) return launch(RowShape<kThreads, 16, true>{});
  return launch(RowShape<kThreads, 0, true>{});
}

}  // namespace

template <class In, class Weight>
Status RmsNormForward(const Exec<Cuda>& exec, const In* x, const Weight* weight, int64_t runs,
                      int64_t rows, int64_t cols, float eps, In* y, float* rstd, float* amax) {
  if (runs == 0) return {};
  return ForShape<In>(AreVectors(cols, {x, weight, y}), cols, [&](auto shape) {
    using Shape = decltype(shape);
    constexpr int kBlocksPerSm = 64;  // the last of few blocks would run alone
    const int64_t room = int64_t{Multiprocessors()} * kBlocksPerSm;
    const int64_t splits =
        std::max<int64_t>(1, std::min(CeilDiv(rows, Shape::kTeams), room / runs));
    const Weights weights{weight, kWeightType<Weight>};
    return LaunchRaising(exec, RmsNormKernel<In, Shape>, runs, splits, kThreads, amax, nullptr, x,
                         weights, rows, cols, eps, y, rstd, amax);
  });
}

template <class In, class Weight>
Status RmsNormBackward(const Exec<Cuda>& exec, const In* x, const Weight* weight, const float* rstd,
                       const In* grad, int64_t runs, int64_t rows, int64_t cols, In* dx,
                       float* parts, float* dweight) {
  const int64_t count = CeilDiv(rows, kSumRows);
  const Status status =
      ForShape<In>(AreVectors(cols, {x, weight, grad, dx}), cols, [&](auto shape) {
        using Shape = decltype(shape);
        const Weights weights{weight, kWeightType<Weight>};
        return LaunchShared(exec, RmsNormGradKernel<In, Shape>,
                            CeilDiv(runs * count, Shape::kTeams), kThreads,
                            RowAndGrad<In, Shape>::kSharedBytes, x, weights, rstd, grad, runs, rows,
                            cols, dx, parts);
      });
  if (status) return status;
  return Launch(exec, SumPartsKernel, runs * CeilDiv(cols, kWarp), kWarp * kRowLanes, parts, count,
                cols, dweight);
}

#define QSHARD_INSTANTIATE_NORM(In, Weight)                \
  QSHARD_INSTANTIATE_FOR(Cuda, RmsNormForward, In, Weight) \
  QSHARD_INSTANTIATE_FOR(Cuda, RmsNormBackward, In, Weight)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_NORM, float)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_NORM, bfloat16)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_NORM, float16)
#undef QSHARD_INSTANTIATE_NORM

}  // namespace qshard::kernels
