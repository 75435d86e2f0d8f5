// out[r, i] = op(in[r, i], scale[r]) over a row-major [runs, length] buffer: what cast and
// dequantize share.
//
// Reads `in` once, writes `out` once, reads each scale about once per vector of its run (from L1).
// A block of kThreads threads takes kThreads * kPerThread consecutive elements: each thread starts
// loading all its vectors, 16 or 32 bytes on the wider side of the op and spaced so that a warp's
// are contiguous, before it uses the first. Nothing is needed of the buffers but their natural
// alignment: elements before the first 16-byte boundary, after the last whole vector, and in a
// vector that two runs share go one by one, and if the two sides cannot be aligned together every
// element does. Equals the loop over core/round.h.
//
// An op with kAmax also raises the largest |in| of runs of their own, amaxes, which are 0 before: a
// thread keeps the maximum of what it loads, and a block raises the amax of its run, or its two,
// with one integer atomicMax. A maximum is exact, so the order does not show.
//
// An op is a small class, passed by value, with
// - Input, Output: element types;
// - kAmax;
// - kWidth: elements of a vector;
// - Apply<kCount>(inputs, scale), kCount inputs to as many outputs, for kCount kWidth and 1.
#ifndef QSHARD_KERNELS_CUDA_SCALED_MAP_CUH_
#define QSHARD_KERNELS_CUDA_SCALED_MAP_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/runs.cuh"
#include "kernels/cuda/vector.cuh"

namespace qshard::kernels {

// How a map walks. `kBackward`: the first blocks take the last elements, which a kernel that just
// read `in` forwards has left in L2.
struct MapForward {
  static constexpr int kThreads = 256, kPerThread = 32;
  static constexpr bool kBackward = false;
  static constexpr Read kRead = Read::kOnce;
  static constexpr Write kWrite = Write::kStream;
};
struct MapBackward : MapForward {
  static constexpr bool kBackward = true;
};

template <class Op>
struct MapArguments {
  const typename Op::Input* in;
  const float* scale;
  typename Op::Output* out;
  int64_t n;     // elements
  int64_t head;  // of them, before the first vector
  RunLength runs;
  // Of kAmax. One run, or such that no block has a part in three.
  int64_t amax_length;
  float* amax;
  Op op;
};

template <class Op>
__device__ __forceinline__ auto MapElement(const MapArguments<Op>& a, int64_t i, float scale) {
  const auto x = Load<sizeof(typename Op::Input)>(a.in + i);
  Store<Write::kCached>(a.out + i, a.op.template Apply<1>(x, scale));
  return x;
}

// What a block of threads has of two runs, from element `base` on.
template <class In, int kThreads>
class TwoRuns {
 public:
  __device__ __forceinline__ TwoRuns(int64_t base, int64_t length)
      : run_(base / length),
        first_(static_cast<int>(min((run_ + 1) * length - base, int64_t{kMaxSpan}))) {}

  __device__ __forceinline__ bool OneRun(int offset, int count) const {
    return offset + count <= first_ || offset >= first_;
  }
  template <int kBytes>
  __device__ __forceinline__ void Add(int offset, const Words<kBytes>& x) {
    offset < first_ ? here_.Add(x) : next_.Add(x);
  }
  // Every thread calls this, of `count` elements.
  __device__ __forceinline__ void Raise(float* amax, int count) const {
    if (count > 0) RaiseByBlock<kThreads>(here_, amax + run_);
    if (count <= first_) return;
    __syncthreads();
    RaiseByBlock<kThreads>(next_, amax + run_ + 1);
  }

 private:
  Magnitude<In> here_, next_;
  int64_t run_;
  int first_;  // elements of the first run
};

// In the place of it.
struct NoRuns {
  __device__ __forceinline__ NoRuns(int64_t, int64_t) {}
  __device__ __forceinline__ bool OneRun(int, int) const { return true; }
  template <int kBytes>
  __device__ __forceinline__ void Add(int, const Words<kBytes>&) {}
  __device__ __forceinline__ void Raise(float*, int) const {}
};

template <class Op, class Walk, int kVector, bool kOneScale>
__global__ void __launch_bounds__(Walk::kThreads) MapKernel(const MapArguments<Op> a) {
  using In = typename Op::Input;
  constexpr int kLoads = Walk::kPerThread / kVector;
  constexpr int kBatch = kLoads < 8 ? kLoads : 8;  // loads in flight a thread
  constexpr int kBlockVectors = Walk::kThreads * kLoads;
  static_assert(kBlockVectors * kVector <= kMaxSpan && kLoads % kBatch == 0);

  const int64_t block = Walk::kBackward ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const int64_t vectors = (a.n - a.head) / kVector;
  const int64_t first = block * kBlockVectors;
  const int64_t base = a.head + first * kVector;
  const In* in = a.in + base;
  auto* out = a.out + base;
  std::conditional_t<Op::kAmax, TwoRuns<In, Walk::kThreads>, NoRuns> amaxes(base, a.amax_length);
  // The next kBatch vectors of this thread, the first of them `begin`. `whole`: all exist; else
  // those before `left` do.
  const auto run_batch = [&](auto whole, int begin, int left) {
    const auto index = [&](int k) { return begin + k * Walk::kThreads; };
    Words<kVector * sizeof(In)> x[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (whole || index(k) < left)
        x[k] = Load<kVector * sizeof(In), Walk::kRead>(in + index(k) * kVector);
    }
    const BlockRuns runs(a.runs, base);
    const auto scale_of = [&](int offset) {
      return __ldg(a.scale + (kOneScale ? 0 : runs.Run(offset)));
    };
    float scale[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (whole || index(k) < left) scale[k] = scale_of(index(k) * kVector);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!whole && index(k) >= left) continue;
      const int offset = index(k) * kVector;
      if (kVector == 1 ||
          ((kOneScale || runs.OneRun(offset, kVector)) && amaxes.OneRun(offset, kVector))) {
        Store<Walk::kWrite>(out + offset, a.op.template Apply<kVector>(x[k], scale[k]));
        amaxes.Add(offset, x[k]);
      } else {
#pragma unroll 1
        for (int j = offset; j < offset + kVector; ++j)
          amaxes.Add(j, MapElement(a, base + j, scale_of(j)));
      }
    }
  };
  if (vectors - first >= kBlockVectors) {
#pragma unroll 1
    for (int i = 0; i < kLoads; i += kBatch)
      run_batch(std::true_type{}, i * Walk::kThreads + threadIdx.x, 0);
  } else {
    const int left = static_cast<int>(vectors - first);
#pragma unroll 1
    for (int i = 0; i < kLoads; i += kBatch)
      run_batch(std::false_type{}, i * Walk::kThreads + threadIdx.x, left);
  }

  amaxes.Raise(a.amax, static_cast<int>(min(int64_t{kBlockVectors}, vectors - first)) * kVector);

  // What is left over: less than a vector at each end.
  if (kVector > 1 && blockIdx.x == 0) {
    const int64_t tail = a.head + vectors * kVector;
    if (threadIdx.x < a.head + (a.n - tail)) {
      const int64_t i = threadIdx.x < a.head ? threadIdx.x : tail + (threadIdx.x - a.head);
      const auto x = MapElement(a, i, __ldg(a.scale + (kOneScale ? 0 : i / a.runs.length)));
      if constexpr (Op::kAmax) {
        Magnitude<In> m;
        m.Add(x);
        RaiseAmax(a.amax + i / a.amax_length, m.AsFloatBits());
      }
    }
  }
}

template <class Op, class Walk, int kVector>
void LaunchMapVectors(CUstream_st* stream, const MapArguments<Op>& a) {
  const int64_t vectors = (a.n - a.head) / kVector;
  constexpr int kBlockVectors = Walk::kThreads * (Walk::kPerThread / kVector);
  const unsigned blocks = GridSize(std::max<int64_t>(1, CeilDiv(vectors, kBlockVectors)));
  if constexpr (kVector > 1)
    if (a.n <= a.runs.length)
      return MapKernel<Op, Walk, kVector, true><<<blocks, Walk::kThreads, 0, stream>>>(a);
  MapKernel<Op, Walk, kVector, false><<<blocks, Walk::kThreads, 0, stream>>>(a);
}

template <class Op, class Walk>
Status LaunchMap(const Exec<Cuda>& exec, const typename Op::Input* in, const float* scale,
                 int64_t runs, int64_t length, typename Op::Output* out, int64_t amax_length = 1,
                 float* amax = nullptr, const Op& op = {}) {
  using In = typename Op::Input;
  using Out = typename Op::Output;
  const int64_t n = runs * length;
  if (n == 0) return {};
  constexpr int kWidth = Op::kWidth;
  constexpr int64_t kInBytes = std::min<int64_t>(16, kWidth * sizeof(In));
  constexpr int64_t kOutBytes = std::min<int64_t>(16, kWidth * sizeof(Out));
  // Elements until the side of the larger vectors is aligned.
  const uintptr_t address = sizeof(In) >= sizeof(Out) ? reinterpret_cast<uintptr_t>(in)
                                                      : reinterpret_cast<uintptr_t>(out);
  constexpr int64_t kElement = std::max(sizeof(In), sizeof(Out));
  constexpr int64_t kBytes = std::max(kInBytes, kOutBytes);
  const int64_t to_boundary = static_cast<int64_t>((kBytes - address % kBytes) % kBytes) / kElement;
  MapArguments<Op> a{in,          scale, out, n, std::min(n, to_boundary), RunLength(length),
                     amax_length, amax,  op};
  if (IsAligned(in + a.head, kInBytes) && IsAligned(out + a.head, kOutBytes)) {
    LaunchMapVectors<Op, Walk, kWidth>(exec.stream, a);
  } else {
    a.head = 0;
    LaunchMapVectors<Op, Walk, 1>(exec.stream, a);
  }
  return LaunchStatus();
}

}  // namespace qshard::kernels

#endif  // QSHARD_KERNELS_CUDA_SCALED_MAP_CUH_
