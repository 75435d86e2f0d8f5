// cast_amax, cast_transpose_amax and update_delayed_scale.
//
// The casts read x once and write their planes once, as cast.cu and cast_transpose.cu do: 3 or 4
// bytes an element for a 16-bit x. A thread keeps the maximum of what it loads; a block of threads
// raises the amax of its run with one integer atomicMax, after a memset of amax to 0: a maximum is
// exact, so the order does not show. Where a block spans many runs, as runs are short or, for
// tiles, end within a matrix, the cast and the amax are two passes. update_delayed_scale is one
// launch for all tensors, a warp each. Equals the casts, core/scale.h and core/block_scale.h bit
// for bit.
#include "core/block_scale.h"
#include "kernels/amax.h"
#include "kernels/cast.h"
#include "kernels/cuda/cast_patches.cuh"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"
#include "kernels/cuda/runs.cuh"
#include "kernels/cuda/transpose_tile.cuh"
#include "kernels/delayed.h"

namespace qshard::kernels {
namespace {

constexpr int kWarp = 32;

// Raises *amax by the maxima of all threads of a block. Every thread calls this.
template <int kThreads, class In>
__device__ __forceinline__ void RaiseByBlock(Magnitude<In> m, float* amax) {
  __shared__ int32_t warps[kThreads / kWarp];
  m.ReduceOver(kWarp);
  if (threadIdx.x % kWarp == 0) warps[threadIdx.x / kWarp] = m.AsFloatBits();
  __syncthreads();
  if (threadIdx.x >= kWarp) return;
  int32_t bits = threadIdx.x < kThreads / kWarp ? warps[threadIdx.x] : 0;
  bits = __reduce_max_sync(0xFFFFFFFFu, bits);
  if (threadIdx.x == 0) RaiseAmax(amax, bits);
}

// --- cast_amax ---

constexpr int kCastThreads = 256, kPerThread = 32;
constexpr int kSpan = kCastThreads * kPerThread;  // elements of a block, at most a part of two runs

template <class In>
struct CastAmaxArguments {
  const In* x;
  const float* scale;
  int64_t scale_length, n, amax_length;
  RunLength scale_runs;
  uint8_t* data;
  float* amax;
};

template <class In, class Code, bool kOneScale, bool kVectors>
__global__ void __launch_bounds__(kCastThreads) CastAmaxKernel(const CastAmaxArguments<In> a) {
  constexpr int kWidth = kVectors ? 32 / sizeof(In) : 1;
  constexpr int kLoads = kVectors ? kPerThread / kWidth : 8;  // in flight a thread
  const int64_t base = int64_t{gridDim.x - 1 - blockIdx.x} * kSpan;
  const int count = static_cast<int>(min(int64_t{kSpan}, a.n - base));
  const int64_t run = base / a.amax_length;
  // Elements of the block that are in its first run.
  const int64_t left = (run + 1) * a.amax_length - base;
  const int first = static_cast<int>(min(left, int64_t{count}));
  const In* x = a.x + base;
  uint8_t* data = a.data + base;
  const BlockRuns scales(a.scale_runs, base);
  const auto scale_of = [&](int i) { return __ldg(a.scale + (kOneScale ? 0 : scales.Run(i))); };

  Magnitude<In> here, next;  // of the first run and of the second
  const auto element = [&](int i) {
    const auto w = Load<sizeof(In)>(x + i);
    i < first ? here.Add(w) : next.Add(w);
    float v[1];
    WidenWords<In>(w, v);
    v[0] = __fmul_rn(v[0], scale_of(i));
    Store<Write::kCached>(data + i, EncodeWords<Code>(v));
  };
  const int vectors = count / kWidth;
#pragma unroll 1
  for (int begin = threadIdx.x; begin < vectors; begin += kLoads * kCastThreads) {
    if constexpr (!kVectors) {
#pragma unroll 4
      for (int k = 0; k < kLoads; ++k)
        if (begin + k * kCastThreads < vectors) element(begin + k * kCastThreads);
    } else {
      Words<kWidth * sizeof(In)> w[kLoads];
      float scale[kLoads];
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int i = (begin + k * kCastThreads) * kWidth;
        w[k] = {};
        if (i < vectors * kWidth) w[k] = Load<kWidth * sizeof(In)>(x + i);
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int i = (begin + k * kCastThreads) * kWidth;
        if (i < vectors * kWidth) scale[k] = scale_of(i);
      }
#pragma unroll
      for (int k = 0; k < kLoads; ++k) {
        const int i = (begin + k * kCastThreads) * kWidth;
        if (i >= vectors * kWidth) continue;
        const bool one_amax = i + kWidth <= first || i >= first;
        if (one_amax && (kOneScale || scales.OneRun(i, kWidth))) {
          i < first ? here.Add(w[k]) : next.Add(w[k]);
          float v[kWidth];
          WidenWords<In>(w[k], v);
#pragma unroll
          for (int j = 0; j < kWidth; ++j) v[j] = __fmul_rn(v[j], scale[k]);
          Store<Write::kStream>(data + i, EncodeWords<Code>(v));
        } else {
#pragma unroll 1
          for (int j = 0; j < kWidth; ++j) element(i + j);
        }
      }
    }
  }
  if (kVectors && vectors * kWidth + static_cast<int>(threadIdx.x) < count)
    element(vectors * kWidth + threadIdx.x);

  RaiseByBlock<kCastThreads>(here, a.amax + run);
  if (first < count) {  // all threads of the block
    __syncthreads();
    RaiseByBlock<kCastThreads>(next, a.amax + run + 1);
  }
}

template <class In, class Code, bool kVectors>
void LaunchCastAmax(CUstream_st* stream, const CastAmaxArguments<In>& a) {
  const unsigned blocks = GridSize(CeilDiv(a.n, kSpan));
  if (a.n <= a.scale_length)
    CastAmaxKernel<In, Code, true, kVectors><<<blocks, kCastThreads, 0, stream>>>(a);
  else
    CastAmaxKernel<In, Code, false, kVectors><<<blocks, kCastThreads, 0, stream>>>(a);
}

// --- cast_transpose_amax ---

template <class In, bool kOneScale>
struct CastTransposeAmaxTuning : TransposeTuning {
  static constexpr bool kBackward = true;
  static constexpr Read kRead = Read::kOnce;
  static constexpr int kBlocksPerSm = sizeof(In) == 4 ? 2 : 3;
};

// TransposePatches of a cast, a tile a block, with the amax of each matrix's run.
template <class Source, class In, class Tuning>
__global__ void __launch_bounds__(kTileThreads, Tuning::kBlocksPerSm)
    CastTransposeAmaxPatches(const Source source, const TileGrid grid, bool wide, uint8_t* out,
                             int64_t matrices_per_run, float* amax) {
  __shared__ alignas(16) uint8_t tile[kTile * kTile];
  const int down = threadIdx.x / kPatches, across = threadIdx.x % kPatches;
  for (int64_t index = blockIdx.x; index < grid.tiles; index += gridDim.x) {
    const Tile t = TileAt<Tuning>(grid, index);
    typename Source::Patch patch;
    source.Load(patch, grid, t, down * kPatch, across * kPatch);
    Magnitude<In> m;
#pragma unroll
    for (int k = 0; k < kPatch; ++k) m.Add(patch.rows[k]);  // zeros beyond the matrix
    Words<kPatch> codes[kPatch];
    source.Codes(patch, grid, t, down * kPatch, across * kPatch, codes);
    PutPatch(tile, down, across, codes);
    __syncthreads();
    WriteTile<Tuning::kWrite>(tile, t, grid.rows, wide, out + grid.OffsetT(t, 0, 0));
    RaiseByBlock<kTileThreads>(m, amax + (matrices_per_run == 0 ? 0 : t.matrix / matrices_per_run));
    __syncthreads();
  }
}

// --- update_delayed_scale ---

constexpr int kUpdateThreads = 128;

// A warp a tensor. Outputs may be inputs: a warp reads 32 amaxes, each one place up if the window
// moves, before it writes any of them, and goes up.
__global__ void __launch_bounds__(kUpdateThreads)
    UpdateKernel(const float* amax, const float* history, const float* scale, int64_t n,
                 int64_t length, DelayedRule rule, float* new_history, float* new_scale,
                 float* scale_inv) {
  const int64_t i = (int64_t{blockIdx.x} * kUpdateThreads + threadIdx.x) / kWarp;
  if (i >= n) return;
  const int lane = threadIdx.x % kWarp;
  const float newest = amax[i], old_scale = scale[i];
  const int64_t shift = newest != 0.0f;  // NaN is an amax too
  const float* from = history + i * length;
  float* to = new_history + i * length;
  int32_t largest = 0;
  for (int64_t begin = 0; begin < length; begin += kWarp) {
    const int64_t j = begin + lane;
    const float v = j + shift < length ? from[j + shift] : newest;
    __syncwarp();
    if (j < length) {
      to[j] = v;
      largest = max(largest, FloatBits(v));
    }
    __syncwarp();
  }
  largest = __reduce_max_sync(0xFFFFFFFFu, largest);
  if (lane != 0) return;
  const float a = rule.most_recent ? newest : FloatFromBits(largest);
  const float s = shift ? DelayedScale(old_scale, a, rule.target) : old_scale;
  new_scale[i] = s;
  scale_inv[i] = CanonicalNan(ScaleInverse(s));
}

}  // namespace

template <class In, class Code>
Status CastAmax(const Exec<Cuda>& exec, const In* x, const float* scale, int64_t scale_length,
                int64_t n, int64_t runs, int64_t amax_length, uint8_t* data, float* amax) {
  if (n == 0) return Amax(exec, x, runs, 0, amax);
  if (amax_length < kSpan && runs > 1) {
    const Status status = Amax(exec, x, runs, amax_length, amax);
    if (status.error != nullptr) return status;
    return Cast<In, Code>(exec, x, scale, n / scale_length, scale_length, data);
  }
  const cudaError_t error = cudaMemsetAsync(amax, 0, runs * sizeof(float), exec.stream);
  if (error != cudaSuccess) return ToStatus(error);
  const CastAmaxArguments<In> a{x,    scale, scale_length, n, amax_length, RunLength(scale_length),
                                data, amax};
  if (IsAligned(x, 16) && IsAligned(data, 32 / sizeof(In)))
    LaunchCastAmax<In, Code, true>(exec.stream, a);
  else
    LaunchCastAmax<In, Code, false>(exec.stream, a);
  return LaunchStatus();
}

template <class In, class Code>
Status CastTransposeAmax(const Exec<Cuda>& exec, const In* x, const float* scale,
                         int64_t scale_length, int64_t batch, int64_t rows, int64_t cols,
                         int64_t runs, int64_t amax_length, uint8_t* data, uint8_t* data_t,
                         float* amax) {
  const int64_t matrix = rows * cols, n = batch * matrix;
  if (n == 0) return Amax(exec, x, runs, 0, amax);
  const bool one_scale = n <= scale_length;
  const bool row_runs =
      scale_length % cols == 0 || (cols % scale_length == 0 && scale_length % kPatch == 0);
  const bool one_tile_one_amax = runs == 1 || amax_length % matrix == 0;
  if (rows == 1 || cols == 1 || cols % kPatch != 0 || !IsAligned(x, 16) ||
      !IsAligned(data, kPatch) || !(one_scale || row_runs) || !one_tile_one_amax) {
    const Status status = Amax(exec, x, runs, amax_length, amax);
    if (status.error != nullptr) return status;
    return CastTranspose<In, Code>(exec, x, scale, scale_length, batch, rows, cols, data, data_t);
  }
  const cudaError_t error = cudaMemsetAsync(amax, 0, runs * sizeof(float), exec.stream);
  if (error != cudaSuccess) return ToStatus(error);
  const RowRuns scale_runs{std::max<int64_t>(1, scale_length / cols),
                           std::max<int64_t>(1, cols / scale_length), scale_length};
  const TileGrid grid(batch, rows, cols);
  const auto launch = [&](auto kOne) {
    using Tuning = CastTransposeAmaxTuning<In, kOne.value>;
    using Source = CastPatches<In, Code, kOne.value, Tuning>;
    CastTransposeAmaxPatches<Source, In, Tuning>
        <<<TileBlocks(grid), kTileThreads, 0, exec.stream>>>(
            Source{x, scale, scale_runs, data}, grid, WideColumns(rows, data_t), data_t,
            runs == 1 ? 0 : amax_length / matrix, amax);
  };
  if (one_scale)
    launch(std::true_type{});
  else
    launch(std::false_type{});
  return LaunchStatus();
}

Status UpdateDelayedScale(const Exec<Cuda>& exec, const float* amax, const float* history,
                          const float* scale, int64_t n, int64_t length, DelayedRule rule,
                          float* new_history, float* new_scale, float* scale_inv) {
  if (n == 0) return {};
  const unsigned blocks = GridSize(CeilDiv(n * kWarp, kUpdateThreads));
  UpdateKernel<<<blocks, kUpdateThreads, 0, exec.stream>>>(amax, history, scale, n, length, rule,
                                                           new_history, new_scale, scale_inv);
  return LaunchStatus();
}

#define QSHARD_INSTANTIATE_CODE(In, Code)                                                          \
  template Status CastAmax<In, Code>(const Exec<Cuda>&, const In*, const float*, int64_t, int64_t, \
                                     int64_t, int64_t, uint8_t*, float*);                          \
  template Status CastTransposeAmax<In, Code>(const Exec<Cuda>&, const In*, const float*, int64_t, \
                                              int64_t, int64_t, int64_t, int64_t, int64_t,         \
                                              uint8_t*, uint8_t*, float*);
#define QSHARD_INSTANTIATE(In)      \
  QSHARD_INSTANTIATE_CODE(In, E4M3) \
  QSHARD_INSTANTIATE_CODE(In, E5M2)
QSHARD_INSTANTIATE(float)
QSHARD_INSTANTIATE(bfloat16)
QSHARD_INSTANTIATE(float16)
#undef QSHARD_INSTANTIATE
#undef QSHARD_INSTANTIATE_CODE

}  // namespace qshard::kernels
