// Scales from amaxes, elementwise; scale_four_over_six, which also reads x; and
// update_delayed_scale.
//
// One thread a scale, of which most calls have one, or one for each weight of a model; or four, of
// blocks, which share what follows from the amax of their tensor. Of scale_four_over_six one thread
// a row of a block, 16 elements, whose errors 16 neighbouring lanes add up where a block has 16
// rows. Not for speed but for x: the rest is a sixteenth of a matrix or less. Equals core/scale.h
// and core/block_scale.h bit for bit.
#include "core/block_scale.h"
#include "core/scale.h"
#include "kernels/block_scale.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/e2m1.cuh"
#include "kernels/cuda/launch.cuh"
#include "kernels/cuda/magnitude.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 4;  // of a thread of BlockScales

// FourOverSixDifference, with the element rounded in fewer steps.
__device__ __forceinline__ float Difference(float x, BlockScale<uint8_t> candidate, float d,
                                            float global_amax, float max) {
  const float q = RoundE2M1(__fmul_rn(x, candidate.scale));
  return __fadd_rn(Divide(__fmul_rn(__fmul_rn(q, d), global_amax), max), -x);
}

// A thread a row of a block; `rows`, 1 or 16, of a block are neighbours.
template <class In>
__global__ void __launch_bounds__(kThreads)
    FourOverSixKernel(const In* x, const float* amax, const float* global_amax, int64_t run,
                      FourOverSixRule rule, int64_t blocks, int64_t grid_cols, int rows,
                      bool vectors, float* scale, uint8_t* scale_inv) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t block = min(t / rows, blocks - 1);  // all lanes of a warp add errors up
  const int row = static_cast<int>(t % rows);
  const int64_t strip = block / grid_cols;
  const In* from =
      x + ((strip * rows + row) * grid_cols + (block - strip * grid_cols)) * kNvfp4Block;
  float v[kNvfp4Block];
  if (vectors) {
    WidenWords<In>(Load<kNvfp4Block * sizeof(In)>(from), v);
  } else {
#pragma unroll
    for (int i = 0; i < kNvfp4Block; ++i) v[i] = Widen(from[i]);
  }
  const float global = __ldg(global_amax + (run >= blocks ? 0 : block / run));
  const float global_scale = qshard::GlobalScaleNvfp4(global, rule.scale_max);
  const FourAndSix candidates =
      FourOverSixCandidates(ShownAmax(__ldg(amax + block), rule.nonfinite), global_scale);
  const float max = __fmul_rn(E2M1::kMax, rule.scale_max);
  const auto error = [&](BlockScale<uint8_t> candidate) {
    const float d = Decode<E4M3>(candidate.scale_inv);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kNvfp4Block; ++i) {
      const float difference = Difference(v[i], candidate, d, global, max);
      const float term = rule.squared ? __fmul_rn(difference, difference) : fabsf(difference);
      sum = i == 0 ? term : __fadd_rn(sum, term);
    }
    for (int half = rows / 2; half > 0; half /= 2)
      sum = __fadd_rn(sum, __shfl_down_sync(0xFFFFFFFFu, sum, half));
    return sum;
  };
  const float four = error(candidates.four), six = error(candidates.six);
  if (row != 0 || t / rows >= blocks) return;
  const BlockScale<uint8_t> s = four < six ? candidates.four : candidates.six;
  scale[block] = s.scale;
  scale_inv[block] = s.scale_inv;
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

template <class Code, class Scales>
Status BlockScales(const Exec<Cuda>& exec, const float* amax, int64_t n, const Scales& scales,
                   float* scale, typename Scales::Stored* scale_inv) {
  using Stored = typename Scales::Stored;
  using Codes = Words<kBlocks * sizeof(Stored)>;
  const bool vectors = IsAligned(amax, 16) && IsAligned(scale, 16) &&
                       IsAligned(scale_inv, std::min<int64_t>(16, sizeof(Codes)));
  const bool alike = scales.run % kBlocks == 0 || scales.run >= n;
  return ForEach(exec, CeilDiv(n, kBlocks), [=] __device__(int64_t thread) {
    const int64_t begin = thread * kBlocks;
    const int count = static_cast<int>(min(n - begin, int64_t{kBlocks}));
    const bool whole = vectors && count == kBlocks;
    float found[kBlocks], made[kBlocks];
    Stored inverse[kBlocks];
    if (whole) WidenWords<float>(Load<sizeof(found)>(amax + begin), found);
    float shared = scales.template Shared<Code>(begin);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i >= count) break;
      if (!whole) found[i] = amax[begin + i];
      if (i > 0 && !alike) shared = scales.template Shared<Code>(begin + i);
      const auto s = scales.Of(found[i], shared);
      made[i] = s.scale;
      inverse[i] = s.scale_inv;
      if (whole) continue;
      scale[begin + i] = made[i];
      scale_inv[begin + i] = inverse[i];
    }
    if (!whole) return;
    Codes codes;
    memcpy(&codes, inverse, sizeof(codes));
    Store<Write::kCached>(scale + begin, NarrowWords<float>(made));
    Store<Write::kCached>(scale_inv + begin, codes);
  });
}

Status GlobalScaleNvfp4(const Exec<Cuda>& exec, const float* global_amax, int64_t n,
                        float scale_max, float* global_scale, float* global_scale_inv) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    const float s = qshard::GlobalScaleNvfp4(global_amax[i], scale_max);
    global_scale[i] = s;
    global_scale_inv[i] = ScaleInverse(s);
  });
}

template <class In>
Status ScaleFourOverSix(const Exec<Cuda>& exec, const In* x, const float* amax,
                        const float* global_amax, int64_t run, FourOverSixRule rule,
                        const Blocks& blocks, float* scale, uint8_t* scale_inv) {
  const int64_t n = blocks.GridSize();
  const int rows = static_cast<int>(blocks.block_rows);
  return Launch(exec, FourOverSixKernel<In>, CeilDiv(n * rows, kThreads), kThreads, x, amax,
                global_amax, run, rule, n, blocks.GridCols(), rows, IsAligned(x, 16), scale,
                scale_inv);
}

Status DelayedScales(const Exec<Cuda>& exec, const float* amax, const float* scale, int64_t n,
                     float target, float* new_scale, float* scale_inv) {
  return ForEach(exec, n, [=] __device__(int64_t i) {
    const float s = ScaleOrFirst(scale[i], amax[i], target);
    new_scale[i] = s;
    scale_inv[i] = ScaleInverse(s);
  });
}

Status UpdateDelayedScale(const Exec<Cuda>& exec, const float* amax, const float* history,
                          const float* scale, int64_t n, int64_t length, DelayedRule rule,
                          float* new_history, float* new_scale, float* scale_inv) {
  return Launch(exec, UpdateKernel, CeilDiv(n * kWarp, kUpdateThreads), kUpdateThreads, amax,
                history, scale, n, length, rule, new_history, new_scale, scale_inv);
}

QSHARD_FOR_EACH_SCALED_CODE(QSHARD_INSTANTIATE_FOR, Cuda, BlockScales)
QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, ScaleFourOverSix)

}  // namespace qshard::kernels
