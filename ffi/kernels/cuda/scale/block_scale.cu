// Block scales, and global scales of NVFP4, from amaxes, elementwise.
//
// One thread per scale, or per four block scales, which then share the values from their tensor's
// amax. Equals core/scale.h and core/block_scale.h bit for bit.
#include "core/block_scale.h"
#include "core/scale.h"
#include "kernels/block_scale.h"
#include "kernels/cuda/convert.cuh"
#include "kernels/cuda/launch.cuh"

namespace qshard::kernels {
namespace {

constexpr int kBlocks = 4;  // per thread of BlockScales

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

QSHARD_FOR_EACH_SCALED_CODE(QSHARD_INSTANTIATE_FOR, Cuda, BlockScales)

}  // namespace qshard::kernels
