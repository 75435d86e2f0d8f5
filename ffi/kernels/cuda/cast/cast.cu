// Cast: data[i] = Encode<Code>(x[i] * scale of the run of i). For delayed scaling it also raises
// the amax of each run, after BeginDelayed (scale/delayed_scale.cu).
//
// Reads x once and writes data once: 3 bytes per element for a 16-bit x, 5 for float32. Reads each
// scale about once per vector of its run, from L1. Walks from the END of x, because after an amax,
// which walks forwards, L2 has the end of x.
//
// A thread block takes kSpan consecutive elements. Each thread issues loads of all its vectors, one
// sector each and spaced so that a warp's are contiguous, before it uses the first. Buffers need
// only their natural alignment. Elements before the first 16-byte boundary, after the last whole
// vector, and in a vector with two runs are cast one by one. If x and data cannot be aligned
// together, every element is.
//
// For an amax a thread keeps the maximum of its loads, and a thread block raises the amax of its
// run with one integer atomicMax. A maximum is exact, so order does not matter.
//
// Needs compute capability 8.9. Equals core/round.h bit for bit: NaN from x or the scale gives the
// format's NaN.
#include <type_traits>

#include "kernels/cast.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/raise_amax.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256, kSpan = 32 * kThreads;

// Runs of `length` elements.
struct Runs {
  explicit Runs(int64_t n) : length(n), seen(std::min<int64_t>(n, 2 * kSpan)) {}
  int64_t length;
  Divider seen;  // a thread block needs no more of a run
};

// The runs of elements [base, base + kSpan).
class RunsOfBlock {
 public:
  __device__ __forceinline__ RunsOfBlock(const Runs& runs, int64_t base)
      : seen_(runs.seen), first_(base / runs.length) {
    const int64_t left = (first_ + 1) * runs.length - base, seen = seen_.divisor();
    into_ = static_cast<int>(seen - min(left, seen));
  }

  // Returns the run of element base + offset.
  __device__ __forceinline__ int64_t Run(int offset) const { return first_ + Skipped(offset); }

  // Returns true if elements base + offset to base + offset + count - 1 are in one run.
  __device__ __forceinline__ bool OneRun(int offset, int count) const {
    return Skipped(offset) == Skipped(offset + count - 1);
  }

 private:
  __device__ __forceinline__ uint32_t Skipped(int offset) const {
    return seen_.Divide(static_cast<uint32_t>(into_ + offset));
  }

  Divider seen_;
  int64_t first_;
  int into_;  // elements of the first run before `base`, or as many as matter
};

template <class In>
struct CastArguments {
  const In* x;
  const float* scale;
  uint8_t* data;
  int64_t n;     // number of elements
  int64_t head;  // elements before the first vector
  Runs runs;     // of scales and of amaxes
  Nonfinite nonfinite;
  // For delayed scaling. Raising amaxes needs one run, or no elements before the first vector and
  // runs of whole kSpans.
  float target;
  float* amax;

  __device__ __forceinline__ float Scale(int64_t run) const {
    const float s = __ldg(scale + run);
    if (amax == nullptr || s != 0.0f) return s;
    return ScaleOrFirst(s, *static_cast<volatile float*>(amax + run), target);
  }
};

template <class Code, int kCount, class In>
__device__ __forceinline__ Words<kCount> EncodeScaled(const CastArguments<In>& a,
                                                      const Words<kCount * sizeof(In)>& x,
                                                      float scale) {
  float v[kCount];
  WidenWords<In>(x, v);
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    v[i] = a.nonfinite == Nonfinite::kNan ? ScaledOrNan(v[i], scale) : __fmul_rn(v[i], scale);
  return EncodeWords<Code>(v);
}

// Casts element i. Returns x[i].
template <class Code, class In>
__device__ __forceinline__ auto CastElement(const CastArguments<In>& a, int64_t i, float scale) {
  const auto x = Load<sizeof(In)>(a.x + i);
  Store<Write::kCached>(a.data + i, EncodeScaled<Code, 1>(a, x, scale));
  return x;
}

template <class In, class Code, bool kAmax, int kVector, bool kOneScale>
__global__ void __launch_bounds__(kThreads) CastKernel(const CastArguments<In> a) {
  constexpr int kBlockVectors = kSpan / kVector, kLoads = kBlockVectors / kThreads;
  constexpr int kBatch = kLoads < 8 ? kLoads : 8;  // loads in flight per thread
  static_assert(kLoads % kBatch == 0);

  const int64_t vectors = (a.n - a.head) / kVector;
  const int64_t first = int64_t{gridDim.x - 1 - blockIdx.x} * kBlockVectors;
  const int64_t base = a.head + first * kVector;
  const In* in = a.x + base;
  uint8_t* out = a.data + base;
  Magnitude<In> largest;  // if kAmax
  // Casts the next kBatch vectors of this thread, starting at `begin`. With `whole` all exist, else
  // only vectors before `left`.
  const auto run_batch = [&](auto whole, int begin, int left) {
    const auto index = [&](int k) { return begin + k * kThreads; };
    Words<kVector * sizeof(In)> x[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (whole || index(k) < left) x[k] = Load<kVector * sizeof(In)>(in + index(k) * kVector);
    }
    const RunsOfBlock runs(a.runs, base);
    const auto scale_of = [&](int offset) { return a.Scale(kOneScale ? 0 : runs.Run(offset)); };
    float scale[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k)
      if (whole || index(k) < left) scale[k] = scale_of(index(k) * kVector);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (!whole && index(k) >= left) continue;
      const int offset = index(k) * kVector;
      if (kVector == 1 || kOneScale || runs.OneRun(offset, kVector)) {
        Store<Write::kStream>(out + offset, EncodeScaled<Code, kVector>(a, x[k], scale[k]));
        if constexpr (kAmax) largest.Add(x[k]);
      } else {
#pragma unroll 1
        for (int j = offset; j < offset + kVector; ++j) {
          const auto one = CastElement<Code>(a, base + j, scale_of(j));
          if constexpr (kAmax) largest.Add(one);
        }
      }
    }
  };
  if (vectors - first >= kBlockVectors) {
#pragma unroll 1
    for (int i = 0; i < kLoads; i += kBatch)
      run_batch(std::true_type{}, i * kThreads + threadIdx.x, 0);
  } else {
    const int left = static_cast<int>(vectors - first);
#pragma unroll 1
    for (int i = 0; i < kLoads; i += kBatch)
      run_batch(std::false_type{}, i * kThreads + threadIdx.x, left);
  }

  if (kAmax && vectors > first) {
    const int32_t bits = TeamMax<kThreads>(largest.AsFloatBits());
    if (threadIdx.x == 0) RaiseAmax(a.amax + base / a.runs.length, bits);
  }

  // Elements at the ends: less than a vector each.
  if (kVector > 1 && blockIdx.x == 0) {
    const int64_t tail = a.head + vectors * kVector;
    if (threadIdx.x < a.head + (a.n - tail)) {
      const int64_t i = threadIdx.x < a.head ? threadIdx.x : tail + (threadIdx.x - a.head);
      const auto x = CastElement<Code>(a, i, a.Scale(kOneScale ? 0 : i / a.runs.length));
      if constexpr (kAmax) {
        Magnitude<In> m;
        m.Add(x);
        RaiseAmax(a.amax + i / a.runs.length, m.AsFloatBits());
      }
    }
  }
}

template <class Code, bool kAmax, class In>
Status LaunchCast(const Exec<Cuda>& exec, CastArguments<In> a) {
  constexpr int kVector = 32 / sizeof(In);
  const auto launch = [&](auto kernel, int width) {
    const int64_t blocks = CeilDiv((a.n - a.head) / width, kSpan / width);
    return Launch(exec, kernel, std::max<int64_t>(1, blocks), kThreads, a);
  };
  const int64_t to_boundary = -reinterpret_cast<uintptr_t>(a.x) % 16 / sizeof(In);
  a.head = std::min(a.n, to_boundary);
  if (IsAligned(a.data + a.head, std::min(16, kVector)))
    return a.n == a.runs.length ? launch(CastKernel<In, Code, kAmax, kVector, true>, kVector)
                                : launch(CastKernel<In, Code, kAmax, kVector, false>, kVector);
  a.head = 0;
  return launch(CastKernel<In, Code, kAmax, 1, false>, 1);
}

}  // namespace

template <class In, class Code>
Status Cast(const Exec<Cuda>& exec, const Scaled<In>& x, int64_t n, uint8_t* data) {
  if (x.runs > 0) QSHARD_RETURN_IF_ERROR(BeginDelayed(exec, x));
  if (n == 0) return {};
  const CastArguments<In> a{x.x,         x.scale,  data,  n, 0, Runs(x.length),
                            x.nonfinite, x.target, x.amax};
  if (x.runs == 0) return LaunchCast<Code, false>(exec, a);
  // Use two passes if a thread block would have elements of more than one run.
  const bool vectors = IsAligned(x.x, 16) && IsAligned(data, 16);
  if (x.runs > 1 && !(vectors && x.length % kSpan == 0)) {
    QSHARD_RETURN_IF_ERROR(Amax(exec, x.x, x.runs, x.length, x.amax));
    return LaunchCast<Code, false>(exec, a);
  }
  return LaunchCast<Code, true>(exec, a);
}

QSHARD_FOR_EACH_INPUT(QSHARD_FOR_EACH_FP8, QSHARD_INSTANTIATE_FOR, Cuda, Cast)

}  // namespace qshard::kernels
