// ScaleFourOverSix: block scales from amaxes and x.
//
// One thread takes a row of a block, 16 elements. If a block has 16 rows, 16 neighbouring lanes add
// their errors. Equals core/block_scale.h bit for bit.
#include "core/block_scale.h"
#include "kernels/block_scale.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/e2m1.cuh"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {
namespace {

constexpr int kThreads = 256;

// FourOverSixDifference, with fewer steps to round the element.
__device__ __forceinline__ float Difference(float x, BlockScale<uint8_t> candidate, float d,
                                            float global_amax, float max) {
  const float q = RoundE2M1(__fmul_rn(x, candidate.scale));
  return __fadd_rn(Divide(__fmul_rn(__fmul_rn(q, d), global_amax), max), -x);
}

// One thread per row of a block. The `rows` rows of a block, 1 or 16, are neighbouring threads.
template <class In>
__global__ void __launch_bounds__(kThreads)
    FourOverSixKernel(const In* x, const float* amax, const float* global_amax, int64_t run,
                      FourOverSixRule rule, int64_t blocks, int64_t grid_cols, int rows,
                      bool vectors, float* scale, uint8_t* scale_inv) {
  const int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  // Clamped, because all lanes of a warp take part in the sum.
  const int64_t block = min(t / rows, blocks - 1);
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
      FourOverSixCandidates(AmaxOrNan(__ldg(amax + block), rule.nonfinite), global_scale);
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

}  // namespace

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

QSHARD_FOR_EACH_INPUT(QSHARD_INSTANTIATE_FOR, Cuda, ScaleFourOverSix)

}  // namespace qshard::kernels
